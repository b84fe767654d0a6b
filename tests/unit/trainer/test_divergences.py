"""Divergences of actor and policy, and their gradient, against float64 autograd of their definitions."""

from __future__ import annotations

import pytest
import torch

from rlpipe.trainer.decoupled import divergences

pytestmark = pytest.mark.unit

P, V = 7, 13


def logits(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (3 * torch.randn(P, V, generator=torch.Generator().manual_seed(seed))).to(dtype)


def by_definition(actor: torch.Tensor, policy: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """KL(p || q), KL(q || p) and sum min(p, q)."""
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in (actor, policy))
    q, p = log_q.exp(), log_p.exp()
    return (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1), torch.minimum(p, q).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("which", ["kl", "reverse_kl"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients_equal_those_of_the_definition(which, temperature, dtype, error):
    policy, weights = (
        logits(1),
        torch.rand(P, generator=torch.Generator().manual_seed(2), dtype=torch.float64),
    )
    reference = logits(0).requires_grad_()
    kl, reverse, overlap = by_definition(reference, policy, temperature)
    (weights * {"kl": kl, "reverse_kl": reverse}[which]).sum().backward()

    actor = logits(0).to(dtype).requires_grad_()
    rows = divergences(actor, policy.to(dtype), temperature=temperature)
    (weights.to(dtype) * getattr(rows, which)[:, 0]).sum().backward()
    for found, expected in ((rows.kl, kl), (rows.reverse_kl, reverse), (rows.alpha, overlap)):
        torch.testing.assert_close(found[:, 0].double(), expected, atol=error, rtol=error)
    torch.testing.assert_close(actor.grad.double(), reference.grad, atol=error, rtol=error)
    assert reference.grad.abs().max() > 0.1 and kl.min() > 0


def test_the_policy_is_a_constant():
    actor, policy = (logits(seed).requires_grad_() for seed in range(2))
    divergences(actor, policy).kl.sum().backward()
    assert policy.grad is None and actor.grad.abs().sum() > 0


def test_equal_models_diverge_nowhere_and_pull_nowhere():
    actor = logits(0).requires_grad_()
    rows = divergences(actor, logits(0))
    (rows.kl + rows.reverse_kl).sum().backward()
    assert rows.kl.abs().max() < 1e-12 and actor.grad.abs().max() < 1e-12


def test_padding_of_a_shard_is_no_token():
    actor, policy = (torch.nn.functional.pad(logits(s), (0, 3), value=-torch.inf) for s in range(2))
    actor.requires_grad_()
    rows = divergences(actor, policy)
    rows.kl.sum().backward()
    torch.testing.assert_close(rows.kl[:, 0], by_definition(logits(0), logits(1), 1.0)[0])
    assert (actor.grad[:, V:] == 0).all()
