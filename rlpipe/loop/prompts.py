"""The instance of the n-th admitted prompt: a pure function of (seed, n), so that resuming is exact."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlpipe.types import Prompt


class PromptStream:
    """Seeded epochs over the training instances, each instance once per epoch.

    >>> stream = PromptStream(["a", "b", "c"], seed=0)
    >>> sorted(stream[i].instance_id for i in range(3))
    ['a', 'b', 'c']
    """

    def __init__(self, instance_ids: Sequence[str], seed: int) -> None:
        if not instance_ids:
            raise ValueError("the training set is empty: check env.train_file.")
        self._ids = list(instance_ids)
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def __getitem__(self, index: int) -> Prompt:
        """Return the prompt admitted as number `index` (0-based) of the run."""
        epoch, place = divmod(index, len(self._ids))

        # Each epoch has a separate order; only the current one is cached.
        if epoch not in self._orders:
            order = list(range(len(self._ids)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._orders = {epoch: order}

        return Prompt(
            instance_id=self._ids[self._orders[epoch][place]],
            group_id=f"g{index:06d}",
            seed=random.Random(f"{self._seed}/prompt/{index}").getrandbits(48),
        )
