"""Reads the step times that an engine measured for some batch sizes and gammas when it started.

Imports no NumPy, because the report needs them before it needs anything heavy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

STEP_SECONDS = "spec/step_seconds/"


def step_seconds(records: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], float]:
    """Return the seconds of a decode step by (batch size, gamma); later records win.

    The engine measures them when it starts; {} for an engine that measures none.
    """
    named = ((n, x) for r in records for n, x in r.items() if n.startswith(STEP_SECONDS) and x is not None)
    matches = ((re.fullmatch(r"batch_(\d+)/gamma_(\d+)", n.removeprefix(STEP_SECONDS)), x) for n, x in named)
    return {(int(match[1]), int(match[2])): seconds for match, seconds in matches if match}
