"""The policy that a server of `sglang_gamma.py` loads: rlpipe's policy, which a file can overrule.

It imports nothing from rlpipe, which is not installed in the server's environment.
"""

import os
import runpy
from collections.abc import Sequence

POLICY, ORDER = "RLPIPE_BENCH_POLICY", "RLPIPE_BENCH_ORDER"  # paths: of gamma.py, and of the file
ADAPTIVE = b"a"


class AdaptiveGamma(runpy.run_path(os.environ[POLICY])["AdaptiveGamma"]):
    """Drafts as many tokens as the digit in the file, without learning; for `a`, follows rlpipe's policy."""

    def choose(self, batch: int) -> int:
        """Return the width of the next step."""
        file = self.__dict__.setdefault("_file", None) or os.open(os.environ[ORDER], os.O_RDONLY)
        self._file, order = file, os.pread(file, 1, 0)
        self._forced = order != ADAPTIVE
        return int(order) if self._forced else super().choose(batch)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn acceptance, unless the file states how many to draft."""
        if not self.__dict__.get("_forced"):
            super().observe(drafted, accepted)

    def timed(self, batch: int, gamma: int, seconds: float) -> None:
        """Learn costs, unless the file states how many to draft."""
        if not self.__dict__.get("_forced"):
            super().timed(batch, gamma, seconds)
