"""The visit recursion against enumeration of coins, a backward oracle and simulated verification."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from rlpipe.drafts.loss import mtp_loss
from rlpipe.drafts.visit import accept_probabilities, expected_verify_steps, forecast, visit_probabilities
from rlpipe.spec.sampling import sample_cdf
from rlpipe.spec.verify import verify_chain
from tests.helpers.mtp_reference import random_case, reference_verify_steps
from tests.helpers.verification_law import Process

pytestmark = pytest.mark.unit


def _one_turn(length: int, depths: int, seed: int = 0):
    accept = torch.rand(1, length, depths, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.arange(length)[:, None] + torch.arange(depths) < length
    starts = torch.zeros(1, length, dtype=torch.bool)
    starts[0, 0] = True
    return accept, mask[None], starts


@pytest.mark.parametrize("depths", [1, 2, 3])
def test_visits_equal_enumeration_of_every_coin(depths):
    length = 4
    accept, mask, starts = _one_turn(length, depths)
    expected = torch.zeros(length, dtype=torch.float64)
    drafted = torch.zeros(depths, dtype=torch.float64)
    accepted = torch.zeros(depths, dtype=torch.float64)
    places = mask[0].nonzero().tolist()
    for coins in product((True, False), repeat=len(places)):
        outcome = dict(zip(map(tuple, places), coins, strict=True))
        chance = 1.0
        for place, coin in outcome.items():
            chance *= accept[0][place].item() if coin else 1 - accept[0][place].item()
        t = 0
        while t < length:
            expected[t] += chance
            k = 0
            while outcome.get((t, k), False):
                drafted[k] += chance
                accepted[k] += chance
                k += 1
            if (t, k) in outcome:
                drafted[k] += chance
            t += k + 1
    found = forecast(accept, mask, starts)
    torch.testing.assert_close(found.visits[0], expected)
    torch.testing.assert_close(found.drafted[0], drafted)
    torch.testing.assert_close(found.accepted[0], accepted)
    assert found.verify_steps.item() == pytest.approx(expected.sum().item())
    assert found.acceptance_length.item() == pytest.approx(length / expected.sum().item())


def test_turns_and_sequences_of_a_padded_batch_do_not_touch_each_other():
    case = random_case(9, batch=3, length=12, depths=3, seed=5)
    shape = (*case.turn_starts.shape, -1)
    accept = torch.rand(case.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert case.turn_starts.sum(1).max() > 1
    steps = expected_verify_steps(accept.view(shape), case.mask.view(shape), case.turn_starts)
    emitted = forecast(accept.view(shape), case.mask.view(shape), case.turn_starts).emitted.sum()
    expected = reference_verify_steps(accept, case)
    assert (steps.sum() / emitted).item() == pytest.approx(expected.item(), abs=1e-14)


def test_the_gradient_is_that_of_finite_differences_even_at_zero_and_one():
    accept, mask, starts = _one_turn(5, 2)
    accept[0, 1, 0], accept[0, 2, 1] = 0.0, 1.0
    assert torch.autograd.gradcheck(
        lambda a: expected_verify_steps(a, mask, starts), accept.requires_grad_(), eps=1e-6
    )


def test_perfect_and_useless_drafts_have_known_step_counts():
    accept, mask, starts = _one_turn(12, 3)
    assert expected_verify_steps(torch.ones_like(accept), mask, starts).item() == 3  # 4 tokens a step
    assert expected_verify_steps(torch.zeros_like(accept), mask, starts).item() == 12
    visits = visit_probabilities(torch.ones_like(accept), mask, starts)
    assert visits[0].nonzero().flatten().tolist() == [0, 4, 8]


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_forecast_averages_to_what_simulated_chain_verification_needs(gamma):
    """Exact in expectation over sequences; 20,000 simulated rollouts, tolerance 4 standard errors."""
    vocab, length, rollouts = 3, 6, 20_000
    target = Process.random(vocab, length, seed=1, sharpness=1.5)
    drafts = {t: _draft_after(t, gamma, length, vocab) for t in range(length)}
    sequences = torch.tensor(list(product(range(vocab), repeat=length)))
    accept = torch.zeros(len(sequences), length, gamma, dtype=torch.float64)
    mask = (torch.arange(length)[:, None] + torch.arange(gamma) < length).expand(len(sequences), -1, -1)
    p = target.rows(sequences, length).gather(-1, sequences[..., None])[..., 0]
    for t, k in product(range(length), range(gamma)):
        if t + k < length:
            q = drafts[t][k][tuple(sequences[:, : t + k].T)]
            q = q.expand(len(sequences), vocab).gather(-1, sequences[:, t + k, None])[:, 0]
            accept[:, t, k] = accept_probabilities(q.log(), p[:, t + k].log())
    starts = torch.zeros(len(sequences), length, dtype=torch.bool)
    starts[:, 0] = True
    predicted = (p.prod(1) * forecast(accept, mask, starts).verify_steps).sum().item()
    steps = _simulate(target, drafts, gamma, length, rollouts)
    error = steps.std().item() / rollouts**0.5
    assert abs(steps.mean().item() - predicted) < 4 * error
    assert error < 0.012


def _draft_after(t: int, gamma: int, length: int, vocab: int) -> list[torch.Tensor]:
    """Laws of a draft that starts after t tokens, by depth, each given all tokens before it."""
    return [
        Process.random(vocab, t + k + 1, seed=100 * t + k).probs[-1] for k in range(min(gamma, length - t))
    ]


def _simulate(target: Process, drafts, gamma: int, length: int, rollouts: int) -> torch.Tensor:
    """[rollouts] verify steps that `verify_chain` needs for `length` tokens."""
    generator = torch.Generator().manual_seed(0)

    def uniforms(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    vocab = target.probs[0].shape[-1]
    tokens = torch.zeros(rollouts, length + gamma + 1, dtype=torch.long)
    done, steps = torch.zeros(rollouts, dtype=torch.long), torch.zeros(rollouts, dtype=torch.float64)
    for t in range(length):
        rows = (done == t).nonzero().flatten()
        if not len(rows):
            continue
        here, depths = tokens[rows], min(gamma, length - t)
        q = torch.zeros(len(rows), depths, vocab, dtype=torch.float64)
        for k in range(depths):
            q[:, k] = drafts[t][k][tuple(here[:, : t + k].T)]
            here[:, t + k] = sample_cdf(q[:, k], uniforms(len(rows)))
        p = torch.full((len(rows), depths + 1, vocab), 1 / vocab, dtype=torch.float64)
        for k in range(depths + 1):
            if t + k < length:
                p[:, k] = target.probs[t + k][tuple(here[:, : t + k].T)]
        verdict = verify_chain(
            here[:, t : t + depths], q, p, uniforms(len(rows), depths), uniforms(len(rows))
        )
        for j in range(depths + 1):
            ended = verdict.num_accepted == j
            here[ended, t + j] = verdict.next_token[ended]
        tokens[rows] = here
        done[rows] += verdict.num_accepted + 1
        steps[rows] += 1
    return steps


def test_estimators_from_target_samples_are_exact_and_the_product_of_overlaps_is_not():
    """E[tau] over all x ~ target, against acceptance of chain and block verification under the draft."""
    vocab, gamma = 3, 3
    target, draft = Process.random(vocab, gamma, seed=1, sharpness=1.5), Process.random(vocab, gamma, seed=2)
    x = torch.tensor(list(product(range(vocab), repeat=gamma)))
    p_rows, q_rows = target.rows(x, gamma), draft.rows(x, gamma)
    p, q = (rows.gather(-1, x[..., None])[..., 0] for rows in (p_rows, q_rows))
    chain, block = torch.zeros(2, dtype=torch.float64)
    for i in range(len(x)):
        carried = 1.0
        for j in range(gamma):
            first_of_suffix = not x[i, j + 1 :].any()  # count each prefix once
            carried = min(1.0, carried * (p[i, j] / q[i, j]).item())  # 2403.10444, Eq. for p_i
            if first_of_suffix:
                chain += torch.minimum(p[i, : j + 1], q[i, : j + 1]).prod()
                block += q[i, : j + 1].prod() * carried
    mask, law = torch.ones(len(x), gamma, dtype=torch.bool), p.prod(1)

    def expected(kind: str) -> float:
        logits = q_rows.log(), p_rows.log()
        loss, _ = mtp_loss(kind, *logits, mask=mask, tokens=x, anchors=law, normalizer=1.0)
        return gamma - loss.item()

    assert expected("e2e_chain") == pytest.approx(chain.item(), abs=1e-12)
    assert expected("e2e_block") == pytest.approx(block.item(), abs=1e-12)
    assert expected("e2e_block") > expected("e2e_chain")
    assert abs(expected("e2e_tv") / chain.item() - 1) > 1e-3

    # On text that another source wrote neither is acceptance, so training refuses such text.
    others = Process.random(vocab, gamma, seed=7, sharpness=1.5).rows(x, gamma)
    law = others.gather(-1, x[..., None])[..., 0].prod(1)
    assert abs(expected("e2e_chain") / chain.item() - 1) > 0.05
    assert abs(expected("e2e_block") / block.item() - 1) > 0.05
