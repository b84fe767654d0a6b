"""Several MTP layers: every depth drafts what chained modules say of the whole text, whatever came before.

The reference runs each layer over all anchors (DeepSeek-V3, arXiv:2412.19437, section 2.2) with no cache.
"""

from __future__ import annotations

import pytest
import torch

from rlpipe.models.checkpoint import read_weights
from rlpipe.rollout.embedded import depths
from rlpipe.rollout.embedded.decoder import Decoder
from tests.helpers.draft_oracle import read_layers
from tests.helpers.driven_engine import GammaScript, RandomGamma, Recorded, driven_engine
from tests.helpers.engines import request, transformers_logits
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit
TOLERANCE = 1e-4
PROMPTS = [[5, 9, 33, 2, 17], [60, 3, 3, 41, 8, 11, 29, 7], [12, 50], [7], [12, 50]]  # the last is a copy


class Reference:
    """Distributions of a checkpoint with several MTP layers."""

    def __init__(self, path) -> None:
        from transformers import AutoModelForCausalLM

        self.target = transformers_logits(path)
        self._layers, weights = read_layers(path), read_weights(path)
        self._backbone = AutoModelForCausalLM.from_pretrained(path).model
        self._embedding, self._head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]

    @torch.no_grad()
    def draft(self, ids: list[int], drafts: list[int]) -> torch.Tensor:
        """q [V] after the last draft: depth len(drafts) + 1 at the last anchor whose state is known."""
        state = self._backbone(torch.tensor([ids[:-1]])).last_hidden_state
        text, anchors = [*ids, *drafts], len(ids) - 1
        own = min(len(drafts) + 1, len(self._layers))
        for depth in range(1, own + 1):
            before, read = state, text[depth : depth + anchors]
            state = self._layer(depth, before, read)
        for depth in range(own + 1, len(drafts) + 2):  # the last layer again, on its own states
            before, read = torch.cat((before, state[:, -1:]), 1), [*read, drafts[depth - 2]]
            state = self._layer(own, before, read)
        return (state[0, -1] @ self._head.T).softmax(-1)

    def _layer(self, depth, states, tokens):
        count = states.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        embedded = self._embedding[torch.tensor([tokens])]
        return self._layers[depth - 1](states, embedded, torch.arange(count)[None], mask)


@pytest.fixture(scope="module", params=[2, 3], ids=["two layers", "three layers"])
def checkpoint(request, tmp_path_factory):
    path = write_random_checkpoint(
        tmp_path_factory.mktemp("model"), mtp_layers=request.param, head_scale=0.5, seed=request.param
    )
    return path, Reference(path)


def worst_error(steps: list[tuple], reference: Reference) -> float:
    """How far p and q of any draft are from the reference's."""
    worst = 0.0
    for ids, tokens, drafted, choices, _ in steps:
        for row, text in enumerate(ids):
            for depth in range(tokens.shape[1]):
                path = tokens[row, :depth].tolist()
                q = (drafted.probs[row, depth] - reference.draft(text, path)).abs().max()
                p = (choices[row, depth] - reference.target([*text, *path])[-1].softmax(-1)).abs().max()
                worst = max(worst, float(q), float(p))
    return worst


def play(path, policy=None, *, gamma: int = 3, mode: str = "rejection") -> list[tuple]:
    """Prompts of which some join late, one is a copy, and two go on: one of them with another past."""
    with driven_engine(path, mode, gamma=gamma, policy=policy) as driven:
        recorded = Recorded(driven)
        for i, prompt in enumerate(PROMPTS[:2]):
            driven.submit(request(i, prompt, session=str(i), max_new_tokens=6 + i))
        for _ in range(2):
            driven.round()
        driven.submit(*(request(i, p, max_new_tokens=9) for i, p in enumerate(PROMPTS) if i > 1))
        driven.run()
        for i, (prompt, cut) in enumerate(zip(PROMPTS, (7, 3), strict=False)):
            turn = driven.results[str(i)].output_ids.tolist()[:cut]
            driven.submit(request(f"{i} goes on", [*prompt, *turn, 44, 45], session=str(i), max_new_tokens=7))
        driven.run()
    return recorded.steps


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_p_and_q_of_every_depth_are_those_of_the_whole_text(checkpoint, gamma, mode):
    """Steps that accept some, copies, turns that go on; depths with a layer of their own and beyond."""
    path, reference = checkpoint
    steps = play(path, gamma=gamma, mode=mode)
    accepted = {int(n) for *_, judged in steps for n in judged.accepted}
    assert accepted >= {0, 1} and len(steps) > 10
    assert worst_error(steps, reference) < TOLERANCE


@pytest.mark.parametrize("script", [None, [3, 0, 0, 2], [0, 0, 3, 1, 0, 3]])
def test_the_layers_catch_up_after_steps_that_drafted_less(checkpoint, script):
    path, reference = checkpoint
    steps = play(path, RandomGamma(3) if script is None else GammaScript(*script))
    assert sum(tokens.shape[1] > 0 for _, tokens, *_ in steps) > 3
    assert worst_error([step for step in steps if step[1].shape[1]], reference) < TOLERANCE


def test_the_layers_are_right_after_an_update(checkpoint, tmp_path):
    path, _ = checkpoint
    layers = len(read_layers(path))
    other = write_random_checkpoint(tmp_path, mtp_layers=layers, head_scale=0.5, seed=9)
    with driven_engine(path, kv_on_update="recompute") as driven:
        driven.submit(*(request(i, p, max_new_tokens=20) for i, p in enumerate(PROMPTS)))
        for _ in range(3):
            driven.round()
        recorded = Recorded(driven)
        driven.update(read_weights(other), 1)
        for _ in range(3):
            driven.round()
    assert worst_error(recorded.steps, Reference(other)) < TOLERANCE


def frontier_of_its_own_depth(patch):
    """A layer goes on from its own frontier instead of that of the layer before it."""
    right = depths.carried
    patch.setattr("rlpipe.rollout.embedded.decoder.carried", lambda s, f, p: right(s, f.roll(1, 0), p))


def keys_of_the_first_layer(patch):
    """Every layer puts its keys where the first one does: they are a place too far."""

    def wrong(model, part, depth, *, joined):
        return part.span

    patch.setattr("rlpipe.rollout.embedded.decoder.behind", wrong)


def frontier_not_redrafted(patch):
    """A depth runs over its newest anchor alone; keys of those before it are of rejected drafts."""
    right = depths.draft_deeper

    def wrong(model, frontier, window, tokens, last):
        if len(tokens) > 1:
            frontier = frontier * 0
        return right(model, frontier, window, tokens, last)

    patch.setattr("rlpipe.rollout.embedded.drafting.draft_deeper", wrong)


def copies_keep_another_state(patch):
    """A copied row drafts on from what its leader sampled."""
    right = Decoder._copy

    def wrong(self, first, copies, tokens, read, draft):
        right(self, first, copies, tokens, read[:1], draft)

    patch.setattr(Decoder, "_copy", wrong)


BUGS = [
    frontier_of_its_own_depth,
    keys_of_the_first_layer,
    frontier_not_redrafted,
    copies_keep_another_state,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_seen(tmp_path, monkeypatch, bug):
    path = write_random_checkpoint(tmp_path, mtp_layers=3, head_scale=0.5, seed=3)
    bug(monkeypatch)
    assert worst_error(play(path), Reference(path)) > 10 * TOLERANCE
