"""The engine's samples against the exact joint law of the first tokens, and planted samplers against it.

One chi-square test per sampler on the joint law of the first 4 tokens (vocabulary 5, 625 cells, cells
of expectation below 5 pooled), n = 20,000 requests with seeds 0..n-1, alpha = 1e-4 each. The seeds are
fixed, so a right engine passes always or never. Power: for a sampler whose law has noncentrality
lambda = n * sum (p' - p)^2 / p over k cells, power > 0.999 from lambda = 8.2 * sqrt(2 k) on, about 290
here; the test asserts that each planted bug is caught.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

import rlpipe.rollout.embedded.decoder as decoder
from rlpipe.spec.sampling import Stream
from tests.helpers.engines import generate, request, running_engine, transformers_logits
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.wrong_verifiers import bonus_from_draft, resample_from_target

pytestmark = pytest.mark.statistical
VOCAB, DEPTH, SAMPLES = 5, 4, 20_000
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


def _sample(checkpoint, mode: str) -> torch.Tensor:
    """Counts per cell of the first DEPTH tokens."""
    with running_engine(checkpoint, mode, gamma=2, max_running=64, max_context=16) as engine:
        results = generate(engine, *(request(seed, PROMPT, max_new_tokens=DEPTH) for seed in range(SAMPLES)))
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


@pytest.mark.parametrize("mode", ["none", "target_only", "rejection"])
def test_the_engine_samples_the_exact_joint_law(checkpoint, exact_law, mode):
    assert _excess(_sample(checkpoint, mode), exact_law) < Z_ALPHA


def _shared_noise(verify):
    """The coin is the number that drew the draft."""

    def wrong(uniforms):
        uniforms = uniforms.clone()
        uniforms[..., Stream.COIN] = uniforms[..., Stream.DRAFT]
        return uniforms

    return wrong


@pytest.mark.parametrize("bug", ["resample_from_target", "bonus_from_draft", "shared_noise", "untempered_draft"])
def test_a_wrong_sampler_is_caught(checkpoint, exact_law, monkeypatch, bug):
    if bug == "resample_from_target":
        monkeypatch.setattr(decoder, "verify_chain", resample_from_target)
    elif bug == "bonus_from_draft":
        monkeypatch.setattr(decoder, "verify_chain", bonus_from_draft)
    elif bug == "shared_noise":
        real = decoder.verify_chain
        draws = {}
        sample = decoder.sample_cdf

        def remember(weights, uniforms):
            draws.setdefault("last", []).append(uniforms)
            return sample(weights, uniforms)

        def wrong(drafts, q, p, coins, residual):
            shared = torch.stack(draws["last"][-drafts.shape[1] :], 1)
            return real(drafts, q, p, shared, residual)

        monkeypatch.setattr(decoder, "sample_cdf", remember)
        monkeypatch.setattr(decoder, "verify_chain", wrong)
    else:
        sample = decoder.sample_cdf
        real = decoder.verify_chain

        def colder(drafts, q, p, coins, residual):
            q = q**2 / (q**2).sum(-1, keepdim=True)
            return real(drafts, q, p, coins, residual)

        monkeypatch.setattr(decoder, "verify_chain", colder)
    assert _excess(_sample(checkpoint, "rejection"), exact_law) > 3 * Z_ALPHA
