"""The report of a run: its page, its plots, its live server, and the command `python -m rlpipe.report`."""
