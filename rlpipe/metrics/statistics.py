"""Statistics that metrics, diagnosis and the report share. No numpy at import."""

from __future__ import annotations

Z95 = 1.96  # half width of a 95% interval, in standard errors
