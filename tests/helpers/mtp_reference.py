"""Objectives written down from their definitions, in float64, with autograd: slow, dense, no code shared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.drafts.loss import depth_targets


@dataclass(slots=True, kw_only=True)
class Case:
    """Inputs of one call of `mtp_loss`."""

    draft: Tensor
    target: Tensor
    mask: Tensor
    tokens: Tensor
    turn_starts: Tensor

    def to(self, dtype: torch.dtype | str) -> Case:
        """Logits in another dtype, or everything on another device."""
        if isinstance(dtype, torch.dtype):
            logits = self.draft.detach().to(dtype).requires_grad_(), self.target.to(dtype)
            return Case(
                draft=logits[0],
                target=logits[1],
                mask=self.mask,
                tokens=self.tokens,
                turn_starts=self.turn_starts,
            )
        return Case(
            draft=self.draft.detach().to(dtype).requires_grad_(),
            target=self.target.to(dtype),
            mask=self.mask.to(dtype),
            tokens=self.tokens.to(dtype),
            turn_starts=self.turn_starts.to(dtype),
        )

    def kwargs(self) -> dict[str, Tensor]:
        """Keyword arguments that all kinds accept."""
        return {"tokens": self.tokens, "turn_starts": self.turn_starts}


def random_case(
    vocab: int, *, batch: int = 2, length: int = 7, depths: int = 3, seed: int = 0, noise: float = 0.7
) -> Case:
    """Sequences with turns, and a draft that is a noisy copy of the target; float64."""
    generator = torch.Generator().manual_seed(seed)
    sequences = torch.randint(0, vocab, (batch, length), generator=generator)
    sampled = torch.ones(batch, length, dtype=torch.bool)
    sampled[:, 0] = False
    if batch > 1:
        sampled[1, length // 2] = False  # two turns
    found = depth_targets(sequences, sampled, depths)
    shape = (batch * length, depths, vocab)
    target = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    draft = target + noise * torch.randn(shape, generator=generator, dtype=torch.float64)
    return Case(
        draft=draft.requires_grad_(),
        target=target,
        mask=found.mask,
        tokens=found.tokens,
        turn_starts=found.turn_starts,
    )


def reference_loss(
    kind: DraftObjective | str,
    case: Case,
    *,
    temperature: float = 1.0,
    weights: Tensor | None = None,
) -> Tensor:
    """The definition of a loss."""
    kind = DraftObjective(kind)
    log_q = (case.draft.double() / temperature).log_softmax(-1)
    log_p = (case.target.double() / temperature).log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    alpha = torch.minimum(p, q).sum(-1)
    kl = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    reverse = torch.nn.functional.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)
    q_x, p_x = (x.gather(-1, case.tokens[..., None])[..., 0] for x in (q, p))
    weights = torch.ones(len(alpha), dtype=torch.float64) if weights is None else weights.double()
    if kind is DraftObjective.VERIFY_STEPS:
        return reference_verify_steps(torch.minimum(torch.ones_like(q_x), q_x / p_x), case)
    if kind in (DraftObjective.E2E_TV, DraftObjective.E2E_CHAIN, DraftObjective.E2E_BLOCK):
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for n, mask in enumerate(case.mask.tolist()):
            depths = mask.index(False) if False in mask else len(mask)
            expected = torch.zeros((), dtype=torch.float64)
            for j in range(1, depths + 1):
                if kind is DraftObjective.E2E_TV:
                    expected = expected + alpha[n, :j].prod()
                elif kind is DraftObjective.E2E_CHAIN:
                    ratio = torch.minimum(torch.ones(1).double(), q_x[n, : j - 1] / p_x[n, : j - 1])
                    expected = expected + ratio.prod() * alpha[n, j - 1]
                else:
                    joint = [q_x[n, :k].prod() / p_x[n, :k].prod() for k in range(j + 1)]
                    expected = expected + torch.stack(joint).min()
            total = total + weights[n] * (depths - expected)
            weight += weights[n].item() * depths
        return total / weight
    share = (-3.0 * alpha.detach()).exp()
    top = log_q.topk(min(1000, log_q.shape[-1]), -1)
    row = {
        DraftObjective.HARD_CE: -q_x.log(),
        DraftObjective.KL: kl,
        DraftObjective.REVERSE_KL: reverse,
        DraftObjective.TV: (p - q).abs().sum(-1) / 2,
        DraftObjective.TV_LINEAR: torch.stack(
            [(p - q).abs().sum(-1)[:, k] / 2 * (1 - k / p.shape[1]) for k in range(p.shape[1])], 1
        ),
        DraftObjective.TV_DECAY: torch.stack(
            [(p - q).abs().sum(-1)[:, k] / 2 * 0.8**k for k in range(p.shape[1])], 1
        ),
        DraftObjective.TV_CLAMP: ((p - q).abs().sum(-1) / 2).minimum(torch.tensor(0.9).double()),
        DraftObjective.TV_TOP: 1 - top.values.softmax(-1).minimum(p.gather(-1, top.indices)).sum(-1),
        DraftObjective.LK: share * kl + (1 - share) * (p - q).abs().sum(-1) / 2,
    }[kind]
    weights = weights[:, None] * case.mask
    return (weights * row.where(case.mask, 0)).sum() / weights.sum()


def reference_verify_steps(accept: Tensor, case: Case) -> Tensor:
    """Expected verify steps per emitted token, following a step's outcomes turn by turn, from the front."""
    batch, length = case.turn_starts.shape
    accept, mask = (x.view(batch, length, -1) for x in (accept, case.mask))
    steps, emitted = torch.zeros((), dtype=torch.float64), 0
    for b in range(batch):
        for start in case.turn_starts[b].nonzero().flatten().tolist():
            end = start
            while end < length and mask[b, end, 0]:
                end += 1
            emitted += end - start
            steps = steps + _steps_from(start, end, accept[b], mask[b], {})
    return steps / emitted


def _steps_from(t: int, end: int, accept: Tensor, mask: Tensor, known: dict[int, Tensor]) -> Tensor:
    if t >= end:
        return torch.zeros((), dtype=torch.float64)
    if t not in known:
        expected, survive = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        for k in range(accept.shape[-1]):
            a = accept[t, k] * mask[t, k]
            expected = expected + survive * (1 - a) * _steps_from(t + k + 1, end, accept, mask, known)
            survive = survive * a
        last = t + accept.shape[-1] + 1
        known[t] = expected + survive * _steps_from(last, end, accept, mask, known)
    return known[t]
