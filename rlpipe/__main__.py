"""`python -m rlpipe COMMAND ...`: the command `rlpipe` where it is not on PATH."""

import sys

from rlpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
