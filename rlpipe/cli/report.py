"""`rlpipe report RUN [RUN...]`: writes an HTML report of one run, or a comparison of several. Needs no torch.

--png      also write every plot as a PNG file, in a folder next to the page
--watch    serve the page instead, and update it while the runs continue
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlpipe.report.live import make_server
from rlpipe.report.png import write_pngs
from rlpipe.report.write import load_runs, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or serve the report; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="rlpipe report",
        description="Write one self-contained HTML page about one run, or comparing several.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--out",
        type=Path,
        help="file to write (report.html in the run's directory; compare.html for several)",
    )
    parser.add_argument("--png", action="store_true", help="also write every plot as a PNG, next to the page")
    parser.add_argument("--watch", action="store_true", help="serve a live page instead, until Ctrl-C")
    parser.add_argument("--host", default="127.0.0.1", help="address that --watch listens on (%(default)s)")
    parser.add_argument("--port", type=int, default=8008, help="its port; 0 picks a free one (%(default)s)")
    options = parser.parse_args(arguments)

    try:
        return _watch(options) if options.watch else _write(options)
    except (ValueError, OSError) as error:
        print(f"rlpipe report: {error}", file=sys.stderr)
        return 2


def _write(options: argparse.Namespace) -> int:
    """Write the report, and its plots as PNG files if requested; return the exit status."""
    out = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("compare.html"))
    write_report(options.runs, out)
    print(f"report: {out}")

    if options.png:
        pictures = out.with_name(f"{out.stem}_png")
        print(f"pictures: {len(write_pngs(load_runs(options.runs), pictures))} in {pictures}")

    return 0


def _watch(options: argparse.Namespace) -> int:
    """Serve the live report until Ctrl-C; return the exit status."""
    with make_server(options.runs, options.host, options.port) as server:
        host, port = server.server_address[:2]
        print(f"live report: http://{host}:{port} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
