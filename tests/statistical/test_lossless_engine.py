"""The engine's samples against the exact joint law of the first tokens, and planted samplers against it.

One chi-square test per sampler on the joint law of the first 4 tokens (vocabulary 5, 625 cells, cells
of expectation below 5 pooled), n = 12,000 requests with seeds 0..n-1, alpha = 1e-4 each (8e-4 over the
file). The seeds are fixed, so a right engine passes always or never. Power: the statistic of a wrong
sampler is shifted by n * sum (p' - p)^2 / p, and power exceeds 0.999 from a shift of 7 standard
deviations on. The planted bugs score 14 (bonus from the draft) to 52 here; each must be caught.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

import rlpipe.rollout.embedded.drafting as decoder
from tests.helpers.engines import generate, request, running_engine, transformers_logits
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.wrong_verifiers import bonus_from_draft, resample_from_target

pytestmark = pytest.mark.statistical
VOCAB, DEPTH, SAMPLES = 5, 4, 12_000
PROMPT = [2, 4, 1, 3]
Z_ALPHA = 3.719  # standard normal quantile of 1 - 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(
        tmp_path_factory.mktemp("law"), vocab=VOCAB, hidden=16, heads=2, kv_heads=1, head_scale=0.5
    )


@pytest.fixture(scope="module")
def exact_law(checkpoint) -> torch.Tensor:
    """[VOCAB ** DEPTH] float64, from transformers' logits."""
    logits = transformers_logits(checkpoint)
    law = torch.empty([VOCAB] * DEPTH, dtype=torch.float64)
    for prefix in product(range(VOCAB), repeat=DEPTH - 1):
        rows = logits([*PROMPT, *prefix])[len(PROMPT) - 1 :].double().softmax(-1)
        chance = math.prod(rows[i, token].item() for i, token in enumerate(prefix))
        law[prefix] = chance * rows[-1]
    assert abs(law.sum().item() - 1) < 1e-6
    return law.flatten()


def _sample(checkpoint, mode: str, samples: int) -> torch.Tensor:
    """Counts per cell of the first DEPTH tokens."""
    with running_engine(checkpoint, mode, gamma=2, max_running=64, max_context=16) as engine:
        results = generate(engine, *(request(seed, PROMPT, max_new_tokens=DEPTH) for seed in range(samples)))
    powers = torch.tensor([VOCAB ** (DEPTH - 1 - i) for i in range(DEPTH)])
    cells = torch.tensor([result.output_ids for result in results]) @ powers
    return torch.bincount(cells, minlength=VOCAB**DEPTH).double()


def _excess(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square statistic as a standard normal score (Wilson-Hilferty)."""
    expected = law * counts.sum()
    small = expected < 5
    observed = torch.cat((counts[~small], counts[small].sum()[None]))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    statistic = ((observed - expected) ** 2 / expected)[expected > 0].sum().item()
    freedom = int((expected > 0).sum()) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("mode", ["none", "target_only", "rejection", "block", "tree"])
def test_the_engine_samples_the_exact_joint_law(checkpoint, exact_law, mode):
    assert _excess(_sample(checkpoint, mode, SAMPLES), exact_law) < Z_ALPHA


def _shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coin of a draft is the very number that drew it."""
    sample, verify, drawn = decoder.sample_cdf, decoder.verify_chain, []

    def remember(weights, uniforms):
        drawn.append(uniforms)
        return sample(weights, uniforms)

    def wrong(drafts, q, p, coins, residual):
        return verify(drafts, q, p, torch.stack(drawn[-drafts.shape[1] :], 1), residual)

    monkeypatch.setattr(decoder, "sample_cdf", remember)
    monkeypatch.setattr(decoder, "verify_chain", wrong)


def _misstated_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are sampled at temperature 1 and judged as if at 1/2."""
    verify = decoder.verify_chain

    def wrong(drafts, q, p, coins, residual):
        return verify(drafts, q**2 / (q**2).sum(-1, keepdim=True), p, coins, residual)

    monkeypatch.setattr(decoder, "verify_chain", wrong)


BUGS = {
    "resample_from_target": lambda patch: patch.setattr(decoder, "verify_chain", resample_from_target),
    "bonus_from_draft": lambda patch: patch.setattr(decoder, "verify_chain", bonus_from_draft),
    "shared_noise": _shared_noise,
    "misstated_draft": _misstated_draft,
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_sampler_is_caught(checkpoint, exact_law, monkeypatch, bug):
    BUGS[bug](monkeypatch)
    score = _excess(_sample(checkpoint, "rejection", SAMPLES), exact_law)
    assert score > Z_ALPHA
