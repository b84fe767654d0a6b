"""python -m rlpipe.report RUN [RUN...]: write the HTML report of one run, or compare several. No torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlpipe.metrics.report import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rlpipe.report",
        description="Write one self-contained HTML page about a run, or comparing several.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--out",
        type=Path,
        help="file to write (report.html in the run's directory; compare.html for several)",
    )
    given = parser.parse_args(arguments)
    out = given.out or (given.runs[0] / "report.html" if len(given.runs) == 1 else Path("compare.html"))
    try:
        write_report(given.runs, out)
    except ValueError as error:
        print(f"rlpipe.report: {error}", file=sys.stderr)
        return 2
    print(f"report: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
