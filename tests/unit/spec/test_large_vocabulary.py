"""The path of large vocabularies on a CPU, forced on small ones: exact, and equal to one sweep off ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlpipe.spec import sampling
from rlpipe.spec.sampling import sample_cdf
from rlpipe.spec.verify import verify_block, verify_chain, verify_target_only
from tests.helpers.kernel_cases import EDGE, RULES, Case, lattice, random_case
from tests.helpers.verification_law import Process, emitted_law

pytestmark = pytest.mark.unit
VERIFIERS = {
    "verify_chain": verify_chain,
    "verify_block": verify_block,
    "verify_target_only": verify_target_only,
}
EXACT = 1e-12


@pytest.fixture
def tiled(monkeypatch):
    """Force the path: tiles of `tile` tokens, from a vocabulary of 1 on."""

    def force(tile: int = 2, vocab: int = 1) -> None:
        monkeypatch.setattr(sampling, "TILE", tile)
        monkeypatch.setattr(sampling, "TILED_VOCAB", vocab)

    return force


def verdicts(rule: str, case: Case) -> list[torch.Tensor]:
    verdict = VERIFIERS[rule](*case.arguments(rule))
    return [verdict.num_accepted, verdict.next_token, verdict.accept_prob]


def off_ties(case: Case) -> Case:
    """Residual uniforms on a lattice that no boundary of random probabilities meets."""
    batch = len(case.residual_uniforms)
    return case.with_(residual_uniforms=(torch.arange(batch, dtype=torch.float64) + 0.5) / batch)


@pytest.mark.parametrize("rule", ["verify_chain", "verify_block"])
@pytest.mark.parametrize(("vocab", "gamma", "zeros"), [(5, 1, 0.0), (4, 2, 0.3), (3, 3, 0.3)])
def test_the_joint_law_of_the_target_is_emitted_exactly(rule, vocab, gamma, zeros, tiled):
    tiled()
    target = Process.random(vocab, gamma + 1, seed=1, sharpness=1.5, zeros=zeros)
    draft = Process.random(vocab, gamma, seed=2, zeros=zeros)
    joint = draft.joint(gamma)
    law = emitted_law(VERIFIERS[rule], target, draft, lambda drafts: joint[tuple(drafts.T)])
    assert (law - target.joint(gamma + 1)).abs().max() < EXACT


@pytest.mark.parametrize("gamma", [1, 2])
def test_target_only_emits_exactly_the_law_of_the_target(gamma, tiled):
    tiled()
    target, draft = Process.random(3, gamma + 1, seed=1), Process.random(3, gamma, seed=2)

    def argmax_drafts(drafts: torch.Tensor) -> torch.Tensor:
        return (draft.rows(drafts, gamma).argmax(-1) == drafts).all(1).double()

    law = emitted_law(verify_target_only, target, None, argmax_drafts)
    assert (law - target.joint(gamma + 1)).abs().max() < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab", [1, 2, 3, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_verdicts_are_those_of_one_sweep(rule, vocab, dtype, tiled):
    case = off_ties(random_case(40, 3, vocab, seed=vocab, zeros=0.3 if vocab > 3 else 0.0))
    case = case.with_(draft_probs=case.draft_probs.to(dtype), target_probs=case.target_probs.to(dtype))
    case.accept_uniforms[torch.arange(40).unsqueeze(1) % 4 > torch.arange(3)] = 0.0  # all depths are reached
    wanted = verdicts(rule, case)
    tiled(tile=16)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(verdicts(rule, case), wanted, strict=True))
    assert vocab < 257 or set(wanted[0].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", RULES)
def test_verdicts_are_those_of_one_sweep_at_a_production_vocabulary(rule, monkeypatch):
    case = off_ties(random_case(3, 2, 151_936, padding=267))
    case.accept_uniforms[1] = 0.0  # the bonus row, once
    ours = verdicts(rule, case)
    monkeypatch.setattr(sampling, "sample_tiles", None)  # not to be called from here on
    with pytest.raises(TypeError):
        sample_cdf(case.target_probs[:, 0], case.residual_uniforms)
    monkeypatch.setattr(sampling, "TILED_VOCAB", math.inf)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, verdicts(rule, case), strict=True))


def test_a_uniform_nearer_to_a_boundary_than_float32_resolves_is_decided_in_float64(tiled):
    row = torch.rand(512, generator=torch.Generator().manual_seed(0)) + 0.01
    cdf = row.double().cumsum(0)
    edges = cdf[63:-1:64] / cdf[-1]  # of tiles: where one ends and the next begins
    for offset in (-1e-11, 1e-11):
        expected = torch.arange(63, 511, 64) + (offset > 0)
        tiled(tile=64)
        assert torch.equal(sample_cdf(row.repeat(len(edges), 1), edges + offset), expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_no_error_that_float32_sums_may_have_changes_the_token(sign, tiled, monkeypatch):
    """The worst: tiles before a boundary too heavy by the bound, those behind too light, or the reverse."""
    tiled(tile=16)
    row = torch.rand(256, generator=torch.Generator().manual_seed(0)) + 0.01
    cdf = row.double().cumsum(0)
    exact, bound, in_float64 = sampling._mass, sampling.ROUNDING, []
    for boundary in range(5, 255, 11):

        def mass(tiles, dtype, at=boundary // 16):
            found = exact(tiles, torch.float64)
            if dtype is torch.float64:
                in_float64.append(at)
                return found
            return found * (1 + bound * sign * np.where(np.arange(len(found)) < at, 1, -1))

        monkeypatch.setattr(sampling, "_mass", mass)
        for offset in (0.01, 0.1, 0.3, 0.49, 0.6, 1.0, 3.0):
            edge = cdf[boundary] / cdf[-1]
            uniforms = torch.stack([edge - offset * bound, edge + offset * bound])
            assert sample_cdf(row.repeat(2, 1), uniforms).tolist() == [boundary, boundary + 1]
    assert 0 < len(in_float64) < 23 * 14 / 2  # most that are near a boundary, and few of the others


def test_both_ends_of_every_interval_give_their_token(tiled):
    row = random_case(1, 1, 50, zeros=0.3).target_probs[0, 0]
    uniforms, expected = lattice(row, row.gt(1e-7).nonzero().flatten())
    for tile in (1, 2, 7, 50, 64):
        tiled(tile=tile)
        assert sample_cdf(row.expand(len(uniforms), -1), uniforms).tolist() == expected.tolist()


def test_any_uniform_gives_a_token_of_positive_weight(tiled):
    """Boundaries of tiles are hit exactly, and approached by a rounding error from both sides."""
    tiled(tile=4)
    row = torch.tensor([0.0, 0.1, 0.0, 0.2, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.7, 0.0, 0.0, 0.0])
    cdf = row.double().cumsum(0)
    edges = cdf.unique() / cdf[-1]
    below, above = edges.nextafter(torch.zeros_like(edges)), edges.nextafter(torch.ones_like(edges))
    uniforms = torch.cat([edges, below, above, torch.tensor([1 - EDGE, 1.0], dtype=torch.float64)])
    tokens = sample_cdf(row.expand(len(uniforms), -1), uniforms)
    assert (row[tokens] > 0).all()
    assert set(tokens.tolist()) == {1, 3, 7, 13}
    assert tokens[-1].item() == 13


def test_a_start_of_a_tile_that_rounds_beyond_the_uniform_gives_no_token_without_weight(tiled):
    """Each tile opens with a zero; the uniforms lie at the ends of tiles, to a rounding error."""
    tiled()
    weights = torch.rand(1000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights[:, ::2] = 0.0
    cdf = weights.cumsum(1)
    for end in (1, 3, 5):
        uniforms = cdf[:, end] / cdf[:, -1]
        for _ in range(3):
            assert (weights.gather(1, sample_cdf(weights, uniforms).unsqueeze(1)) > 0).all()
            uniforms = uniforms.nextafter(torch.ones_like(uniforms))


@pytest.mark.parametrize("rule", RULES)
def test_only_rows_without_mass_fall_back_to_the_target(rule, tiled):
    """A coin of 1 rejects all; row 0 has p = q (for target-only, all of p at the draft), row 1 has not."""
    tiled()
    p = torch.tensor([0.0, 1.0, 0.0]) if rule == "verify_target_only" else torch.tensor([0.25, 0.75, 0.0])
    other = torch.tensor([0.25, 0.25, 0.5])
    uniforms = torch.tensor([0.9, 0.3, 1.0], dtype=torch.float64)  # 0.3 of `other` itself would be 1
    case = Case(
        draft_tokens=torch.tensor([[1], [1], [1]]),
        draft_probs=torch.stack([p, torch.tensor([0.0, 1.0, 0.0]), p])[:, None],
        target_probs=torch.stack([p, other, p])[:, None].expand(-1, 2, -1),
        accept_uniforms=torch.ones(3, 1, dtype=torch.float64),
        residual_uniforms=uniforms,
    )
    accepted, tokens, _ = verdicts(rule, case)
    assert accepted.tolist() == [0, 0, 0]
    assert tokens.tolist() == [1, 0, 1]


@pytest.mark.parametrize("rule", RULES)
def test_a_row_does_not_depend_on_the_batch_around_it(rule, tiled):
    tiled(tile=8)
    case = random_case(7, 3, 100, seed=4)
    whole = verdicts(rule, case)
    for b in range(7):
        alone = verdicts(rule, case.map(lambda x, b=b: x[b : b + 1]))
        assert all(torch.equal(a, w[b : b + 1]) for a, w in zip(alone, whole, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_batch_gives_empty_verdicts(rule, tiled):
    tiled()
    assert [len(x) for x in verdicts(rule, random_case(2, 1, 9).map(lambda x: x[:0]))] == [0, 0, 0]
