"""`python -m rlpipe.run +recipe=NAME [overrides]`: `rlpipe run` where the command is not on PATH."""

import sys

from rlpipe.cli.run import main

if __name__ == "__main__":
    sys.exit(main())
