"""Which code verified drafts in a server since its last update, as its plugin counts them.

Without its kernels on a GPU, or with sampling that they do not cover, a run is right and only slow, so no
other figure shows it.
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
        """Return the shares of verify steps since the last call by metric name; empty without any.

        server: id of the process. info: its answer to `/server_info`. A new server counts from 0.

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
