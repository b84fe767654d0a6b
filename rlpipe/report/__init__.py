"""The report of a run: its page, its plots, and its live server."""
