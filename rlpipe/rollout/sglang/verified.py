"""Shares of a server's verify steps by the code that ran them, from counts of rlpipe's plugin.

If the plugin's kernels are missing on a GPU, or do not support the sampling parameters, the results are
correct but slow, and no other metric shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_KERNELS, _TORCH = "rlpipe", "rlpipe without kernels"


class VerifiedSteps:
    """Counts of one server at a time; `shares` is called after each of its updates."""

    def __init__(self) -> None:
        self._server, self._before = "", Counter[str]()

    def shares(self, server: str, info: Mapping[str, Any]) -> dict[str, float]:
        """Return the shares of verify steps since the last call by metric name; empty without verify steps.

        server: id of the server process; a new one counts from 0. info: its answer to `/server_info`.

        >>> info = {"internal_states": [{"rlpipe_plugin": {"judged": {"rlpipe": 30, "greedy": 10}}}]}
        >>> VerifiedSteps().shares("a", info)
        {'spec/verified_without_kernels': 0.0, 'spec/verified_by_sglang': 0.25}
        """
        if server != self._server:
            self._server, self._before = server, Counter()

        counts = Counter[str]()
        for state in info.get("internal_states") or ():
            counts.update((state.get("rlpipe_plugin") or {}).get("judged") or {})
        steps, self._before = counts - self._before, counts
        if not (total := steps.total()):
            return {}
        return {
            "spec/verified_without_kernels": steps[_TORCH] / total,
            "spec/verified_by_sglang": (total - steps[_KERNELS] - steps[_TORCH]) / total,
        }
