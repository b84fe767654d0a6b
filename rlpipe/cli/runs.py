"""`rlpipe runs [DIR]`: a table of the run directories at or below a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlpipe.report.table import run_directories, runs_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="rlpipe runs", description="Print a table of the run directories at or below a folder."
    )
    parser.add_argument(
        "root", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help="folder (%(default)s)"
    )
    options = parser.parse_args(arguments)

    directories = run_directories(options.root)
    if not directories:
        print(f"rlpipe runs: no run directory at or below {str(options.root)!r}.", file=sys.stderr)
        return 2

    try:
        print(runs_table(directories))
    except ValueError as error:
        print(f"rlpipe runs: {error}", file=sys.stderr)
        return 2

    return 0
