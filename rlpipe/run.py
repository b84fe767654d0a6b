"""`python -m rlpipe.run +recipe=NAME [overrides]`: another way to type `rlpipe run` (`rlpipe.cli.run`)."""

import sys

from rlpipe.cli.run import main

if __name__ == "__main__":
    sys.exit(main())
