"""Greedy equals argmax decoding; typical acceptance follows Medusa's threshold and says that it is lossy."""

from __future__ import annotations

import math

import pytest
import torch

from rlpipe.spec.verify import LossyVerdict, TreeVerdict, Verdict, verify_greedy, verify_typical
from tests.helpers.verification_law import Process, all_drafts

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("scores", ["probabilities", "logits"])
def test_greedy_emits_argmax_decoding_for_every_draft(scores):
    vocab, gamma = 4, 3
    target = Process.random(vocab, gamma + 1, seed=3)
    drafts = all_drafts(vocab, gamma)
    rows = target.rows(drafts, gamma + 1)
    verdict = verify_greedy(drafts, rows if scores == "probabilities" else 3 * rows.log() + 5)
    decoded: list[int] = []
    for depth in range(gamma + 1):
        decoded.append(int(target.probs[depth][tuple(decoded)].argmax()))
    for draft, accepted, token in zip(
        drafts.tolist(), verdict.num_accepted.tolist(), verdict.next_token.tolist(), strict=True
    ):
        assert [*draft[:accepted], token] == decoded[: accepted + 1]
        assert accepted == gamma or draft[accepted] != decoded[accepted]


def _typical(draft: list[int], rows: list[list[float]], uniforms=None, **thresholds) -> LossyVerdict:
    return verify_typical(torch.tensor([draft]), torch.tensor([rows]), uniforms, **thresholds)


def test_typical_accepts_above_the_lower_of_a_constant_and_an_entropy_threshold():
    row = [0.5, 0.25, 0.25]
    entropy = -(0.5 * math.log(0.5) + 0.5 * math.log(0.25))
    rows = [row, row, row]
    below, above = 0.2499 * math.exp(entropy), 0.2501 * math.exp(entropy)
    assert _typical([1, 2], rows, epsilon=0.9, delta=below).num_accepted.item() == 2
    assert _typical([1, 2], rows, epsilon=0.9, delta=above).num_accepted.item() == 0
    assert _typical([0, 1], rows, epsilon=0.9, delta=above).num_accepted.item() == 1
    assert _typical([1, 1], rows, epsilon=0.2, delta=above).num_accepted.item() == 2


def test_typical_emits_the_argmax_or_a_sample_of_the_row_after_the_accepted_drafts():
    rows = [[0.0, 1.0, 0.0], [0.6, 0.0, 0.4], [0.0, 0.3, 0.7]]
    settings = {"epsilon": 0.09, "delta": 0.3}
    assert _typical([1, 1], rows, **settings).next_token.item() == 0
    sampled = _typical([1, 1], rows, torch.tensor([0.9], dtype=torch.float64), **settings)
    assert (sampled.num_accepted.item(), sampled.next_token.item()) == (1, 2)
    assert sampled.accept_prob.tolist() == [[1.0, 0.0]]


def test_a_lossy_verdict_names_its_rule_and_is_no_verdict():
    verdict = _typical([0], [[0.5, 0.5], [0.5, 0.5]], epsilon=0.09, delta=0.3)
    assert verdict.rule == "typical"
    assert not isinstance(verdict, Verdict | TreeVerdict)


@pytest.mark.parametrize("thresholds", [(0.0, 0.3), (1.0, 0.3), (0.09, 0.0), (float("nan"), 0.3)])
def test_thresholds_that_are_none_are_refused(thresholds):
    with pytest.raises(ValueError, match="set 0 < epsilon < 1 and delta > 0"):
        _typical([0], [[1.0], [1.0]], epsilon=thresholds[0], delta=thresholds[1])
