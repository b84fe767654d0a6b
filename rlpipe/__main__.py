"""Entry point of `python -m rlpipe COMMAND ...`, for shells in which `rlpipe` is not on PATH."""

import os
import sys

# `python -m` searches the current folder first. Move it to the end, so that its files shadow no package.
if __name__ == "__main__" and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109  (nor a pathlib.py there)
    sys.path.append(sys.path.pop(0))

from rlpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
