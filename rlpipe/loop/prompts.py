"""Computes the n-th prompt as a pure function of (seed, n), so that resuming is exact."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlpipe.types import Prompt


class PromptStream:
    """Seeded epochs over the training instances, each instance once per epoch.

    >>> stream = PromptStream(["a", "b", "c"], seed=0)
    >>> sorted(stream[i].instance_id for i in range(3))
    ['a', 'b', 'c']

    An epoch goes through the stages of a curriculum in order:

    >>> stream = PromptStream.of_stages([["a", "b"], ["x", "y"]], seed=0)
    >>> sorted(stream[i].instance_id for i in range(2))
    ['a', 'b']
    """

    def __init__(self, instance_ids: Sequence[str], seed: int) -> None:
        if not instance_ids:
            raise ValueError("the training set is empty: check env.train_file.")
        self._ids = list(instance_ids)
        self._stages = [len(self._ids)]  # number of instances in each stage
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    @classmethod
    def of_stages(cls, stages: Sequence[Sequence[str]], seed: int) -> PromptStream:
        """Make the prompts of several sets of instances; every epoch goes through them in this order."""
        stream = cls([instance for stage in stages for instance in stage], seed)
        stream._stages = [len(stage) for stage in stages]
        return stream

    def __getitem__(self, index: int) -> Prompt:
        """Return the prompt with number `index` (0-based) in the order of admission."""
        return Prompt(
            instance_id=self.instance(index),
            group_id=f"g{index:06d}",
            seed=random.Random(f"{self._seed}/prompt/{index}").getrandbits(48),
        )

    def instance(self, index: int) -> str:
        """Return the instance of the prompt with number `index`."""
        epoch, place = divmod(index, len(self._ids))

        # Each epoch has a separate order; only the current one is cached.
        if epoch not in self._orders:
            rng, order = random.Random(f"{self._seed}/{epoch}"), []
            for size in self._stages:
                stage = list(range(len(order), len(order) + size))
                rng.shuffle(stage)
                order += stage
            self._orders = {epoch: order}

        return self._ids[self._orders[epoch][place]]


class MixedPrompts(PromptStream):
    """Mixes prompts of training sets by their shares; among the first n, shares are exact to one prompt.

    sets: (share, stages of instances). Each set has separate epochs.

    >>> stream = MixedPrompts([(0.75, [["a", "b"]]), (0.25, [["x"]])], seed=0)
    >>> "".join(stream[i].instance_id for i in range(8)).count("x")
    2
    """

    def __init__(self, sets: Sequence[tuple[float, Sequence[Sequence[str]]]], seed: int) -> None:
        super().__init__([instance for _, stages in sets for stage in stages for instance in stage], seed)
        self._shares = [share for share, _ in sets]
        self._streams = [PromptStream.of_stages(stages, seed) for _, stages in sets]
        self._counts = [0] * len(sets)
        self._turns: list[tuple[int, int]] = []  # for each prompt: its set, and its index in the set

    def instance(self, index: int) -> str:
        """Return the instance of a prompt."""
        while len(self._turns) <= index:
            # The next prompt is from the set that is furthest behind its share.
            due = [
                share * (len(self._turns) + 1) - n
                for share, n in zip(self._shares, self._counts, strict=True)
            ]
            number = due.index(max(due))
            self._turns.append((number, self._counts[number]))
            self._counts[number] += 1

        number, place = self._turns[index]
        return self._streams[number].instance(place)
