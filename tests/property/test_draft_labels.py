"""Labels of drafts never cross the end of a turn, of a trajectory or of what a rank has, however packed."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rlpipe.batching import draft_layout
from rlpipe.batching.micro_batch import MicroBatch
from rlpipe.batching.packing import pack
from rlpipe.drafts.loss import alignment
from rlpipe.trainer.context import ContextLayout
from rlpipe.types import Trajectory
from tests.helpers.played_ranks import PlayedRanks
from tests.helpers.trajectories import make_trajectory

pytestmark = pytest.mark.property
VOCAB = 10**6  # so many that a token tells where it stands


@st.composite
def batches(draw: st.DrawFn, vocab: int = VOCAB) -> tuple[list[Trajectory], int, int, int, bool, int]:
    """Trajectories of several turns, some with common beginnings, and how they are laid out.

    Depths, tokens of a micro-batch, data parallel ranks, whether prefixes are shared, context parallel ranks.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    made: list[Trajectory] = []
    for _ in range(draw(st.integers(1, 6))):
        turns = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
        one = make_trajectory(rng, vocab=vocab, prompt=draw(st.integers(1, 8)), turns=turns, tool=2)
        if made and draw(st.booleans()):  # begins as another one did, then goes its own way
            other = draw(st.sampled_from(made))
            common = draw(st.integers(1, len(other.token_ids) - 1))
            for name in Trajectory.COLUMNS:
                own = getattr(one, name)
                start = getattr(other, name)[:common]
                setattr(one, name, np.concatenate((start, own[min(common, len(own) - 1) :])))
        made.append(one)
    budget = max(len(t.token_ids) for t in made) + draw(st.integers(0, 60))
    how = draw(st.sampled_from([1, 2])), draw(st.booleans()), draw(st.sampled_from([1, 2, 4]))
    return made, draw(st.integers(1, 4)), budget, *how


Label = tuple[tuple[int, ...], tuple[int, ...], int]  # the text up to an anchor, what drafts read, what comes


def expected(trajectories: list[Trajectory], depths: int) -> Iterator[Label]:
    """By definition: depth k at t reads t + 1 .. t + k and predicts t + k + 1, all sampled in one turn."""
    for t in trajectories:
        ids, mask = t.token_ids.tolist(), [*t.loss_mask.tolist(), 0]
        for anchor in range(len(ids)):
            for k in range(1, depths + 1):
                label = anchor + k + 1
                if label < len(ids) and all(mask[anchor + 1 : label + 1]):
                    yield tuple(ids[: anchor + 1]), tuple(ids[anchor + 1 : label]), ids[label]


def laid_out(
    batch, depths: int, budget: int, ranks: int, share: bool, cp: int, layout, aligned
) -> Iterator[Label]:
    """The same from what the trainer computes; every anchor must know its place and its own past."""
    packed = pack(batch, None, budget, dp_size=ranks, share_prefixes=share)
    for micro in (one for mini in packed.minibatches for shard in mini.shards for one in shard):
        found = layout.draft_batch(micro, depths)
        if found is None:
            continue
        read = read_by_ranks(micro, cp)
        starts = np.cumsum([0, *(b.length for b in found.branches)])
        targets = aligned.depth_targets(torch.tensor(found.tokens), torch.tensor(found.sampled), depths)
        for cell, anchor in enumerate(found.anchors.flatten()):
            seen = layout.tokens_up_to(found.branches, starts, anchor)
            for k in range(1, depths + 1):
                if targets.mask[cell, k - 1]:
                    assert found.positions[seen].tolist() == list(range(len(seen)))
                    text = read[found.places[seen]]
                    reads = found.following[:k, anchor]
                    deeper = found.following[k - 1, seen]  # what keys of this depth were made of
                    line = np.concatenate([text, reads])
                    assert deeper.tolist() == line[k:].tolist()
                    yield tuple(text), tuple(reads), int(targets.tokens[cell, k - 1])


def read_by_ranks(micro: MicroBatch, cp: int) -> np.ndarray:
    """Tokens of a micro-batch, each from the context parallel rank that gives the draft its state."""
    ranks, device = PlayedRanks(cp), torch.device("cpu")

    def mine() -> torch.Tensor:
        layout = ContextLayout(micro, ranks, device)
        return layout.gather(torch.from_numpy(layout.tokens[:, None]))

    with pytest.MonkeyPatch.context() as patch:
        everywhere = ranks.run(mine, patch)
    for other in everywhere[1:]:
        assert torch.equal(other, everywhere[0])
    return everywhere[0][:, 0].numpy()


@settings(max_examples=150, deadline=None)
@given(batches())
def test_labels_are_those_of_the_definition_under_any_packing(batch):
    trajectories, depths, *how = batch
    found = Counter(laid_out(trajectories, depths, *how, draft_layout, alignment))
    assert found == Counter(expected(trajectories, depths))


MUTANTS = {
    "nothing shifted": (draft_layout, "[1 : depths + 1]", "[0:depths]"),
    "labels shifted twice": (
        alignment,
        "torch.arange(2, depths + 2, device",
        "torch.arange(3, depths + 3, device",
    ),
    "labels not shifted": (
        alignment,
        "torch.arange(2, depths + 2, device",
        "torch.arange(1, depths + 1, device",
    ),
    "padding after a turn is a label": (alignment, "sampled[:, 1:] & sampled[:, :-1]", "True"),
    "turns joined over what tools said": (draft_layout, "np.flatnonzero(np.diff(sampled) > 1) + 1", "[]"),
    "siblings share anchors that read apart": (draft_layout, "max(0, same - depths)", "same"),
    "positions begin again": (draft_layout, "np.arange(shared, len(token_ids))", "np.arange(fresh)"),
    "anchors one late": (draft_layout, "slice(turn[0] - 1, turn[-1])", "slice(turn[0], turn[-1] + 1)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_seen(name, monkeypatch):
    module, right, wrong = MUTANTS[name]
    text = Path(module.__file__).read_text()
    assert text.count(right) == 1
    mutant = types.ModuleType(module.__name__)
    mutant.__file__ = module.__file__
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)  # where its dataclasses look for themselves
    exec(compile(text.replace(right, wrong), module.__file__, "exec"), mutant.__dict__)
    parts = [mutant if one is module else one for one in (draft_layout, alignment)]

    @settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(batches())
    def check(batch):
        trajectories, depths, *how = batch
        found = Counter(laid_out(trajectories, depths, *how, *parts))
        assert found == Counter(expected(trajectories, depths))

    with pytest.raises((AssertionError, IndexError, ValueError)):
        check()
