"""Greedy verification equals argmax decoding."""

from __future__ import annotations

import pytest

from rlpipe.spec.verify import verify_greedy
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
