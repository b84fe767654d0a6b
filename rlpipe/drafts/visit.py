"""Where verify steps start, exactly, from one teacher-forced forward: the visit recursion.

Owns the Markov chain of a rollout's verify steps; knows no logits and no engine. Given an emitted sequence x
sampled from the target, the token at i of a step came from an accepted draft with probability

    a_i = min(1, q_i(x_i) / p_i(x_i)),   independently of the others,

because the part min(p, q)(x) of the mass p(x) comes from drafts and the remainder from the residual. A step
at anchor t that accepts j drafts emits j + 1 tokens, so the next one starts at t + j + 1:

    P_t(j) = a_1 ... a_j (1 - a_{j+1}),  a_{gamma+1} = 0
    visit(t) = [t starts a turn] + sum_j visit(t - j - 1) P_{t-j-1}(j)

and sum_t visit(t) is the expected number of verify steps (notes/mtp_objectives). Its gradient comes from
the value function V(t) = 1 + sum_j P_t(j) V(t + j + 1): d steps / d P_t(j) = visit(t) V(t + j + 1).

None of this holds for text from another source (prompts, tool output, another model): there the mean of a_i
is a different number, so training refuses such text (`rlpipe.preflight.settings`). Under staleness the tokens
are those of an earlier policy, and the error of the result is as large as the two policies differ.

All functions take accept [B, T, K], the a_i of depth 1..K at anchor t, and mask [B, T, K]; an anchor is
active where depth 1 is unmasked, a masked depth ends the chain, steps never cross into another turn. Cost:
two small operations per position, in float64, no synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlpipe.drafts.loss.rows import Rows


@dataclass(slots=True, kw_only=True)
class VisitForecast:
    """Expected counts of an engine, float64.

    visits: [B, T] probability that a verify step starts at the anchor.
    verify_steps: [B]. emitted: [B] tokens they emit (a turn's first token is the prefill's).
    drafted, accepted: [B, K], as `SpecCounts`: steps that reached the depth, and that accepted it, for
    drafts inside the turn.
    """

    visits: Tensor
    verify_steps: Tensor
    emitted: Tensor
    drafted: Tensor
    accepted: Tensor

    @property
    def acceptance_length(self) -> Tensor:
        """Emitted tokens per verify step over all sequences, a scalar."""
        return self.emitted.sum() / self.verify_steps.sum()


def accept_probabilities(draft_logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """Compute min(1, q / p) at realised tokens, of any shape [...] in nats -> the same shape.

    A tie q = p passes its gradient on, as in the overlap.
    """
    return (draft_logprobs - target_logprobs).clamp(max=0).exp()


def expected_accepted(last: Tensor, passed: Tensor, mask: Tensor) -> Tensor:
    """Compute [N] sum_j passed_1 ... passed_{j-1} last_j over leading depths of a chain; arguments [N, K].

    By Horner's rule, so that its gradient is the product of the depths before and of the chain after, and
    never divides: a probability of 0 in mid-chain is an ordinary number.
    """
    accepted = torch.zeros_like(last[:, 0])
    for depth in reversed(range(last.shape[1])):
        accepted = mask[:, depth] * (last[:, depth] + passed[:, depth] * accepted)
    return accepted


def by_sequence(rows: Rows, mask: Tensor, turn_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape accept probabilities and mask to [B, T, K].

    Raises ValueError where turn_starts does not have one entry per anchor.
    """
    if turn_starts.numel() != len(mask):
        raise ValueError(
            f"turn_starts has shape {list(turn_starts.shape)} but there are {len(mask)} anchors; "
            "pass one entry per anchor, [B, T] with N = B * T."
        )

    shape = (*turn_starts.shape, -1)
    accept = accept_probabilities(rows.draft_logprob, rows.target_logprob)
    return accept.view(shape), mask.view(shape)


def expected_verify_steps(accept: Tensor, mask: Tensor, turn_starts: Tensor) -> Tensor:
    """Compute [B] float64 expected verify steps of each sequence, differentiable in accept.

    accept, mask: [B, T, K]. turn_starts: [B, T] bool.
    """
    transitions = _transitions(accept.double(), mask, turn_starts)
    return _ExpectedSteps.apply(transitions, turn_starts & mask[..., 0])[0]


def visit_probabilities(accept: Tensor, mask: Tensor, turn_starts: Tensor) -> Tensor:
    """Compute [B, T] float64, detached: the probability that a verify step starts at each anchor."""
    with torch.no_grad():
        transitions = _transitions(accept.double(), mask, turn_starts)
        return _visits(transitions, turn_starts & mask[..., 0])


def forecast(accept: Tensor, mask: Tensor, turn_starts: Tensor) -> VisitForecast:
    """Compute the expected counts of an engine that emits these sequences; detached.

    >>> one = torch.ones(1, 4, 1)
    >>> start = torch.tensor([[True, False, False, False]])
    >>> forecast(one, one.bool(), start).acceptance_length.item()  # gamma = 1, every draft accepted
    2.0
    """
    with torch.no_grad():
        visits = visit_probabilities(accept, mask, turn_starts)

        # Follow the probability of each step down its chain: reached, then accepted, depth by depth.
        reached, reach = [], visits
        for depth in range(accept.shape[-1]):
            reach = reach * mask[..., depth]
            reached.append(reach.sum(-1))
            reach = reach * accept[..., depth]
            reached.append(reach.sum(-1))

        in_turn = mask[..., 0] & (turn_starts.cumsum(1) > 0)
        return VisitForecast(
            visits=visits,
            verify_steps=visits.sum(-1),
            emitted=in_turn.sum(-1).double(),
            drafted=torch.stack(reached[::2], -1),
            accepted=torch.stack(reached[1::2], -1),
        )


def _transitions(accept: Tensor, mask: Tensor, turn_starts: Tensor) -> Tensor:
    """Compute [B, T, K + 1]: P_t(j), zero where t + j + 1 is not an anchor of the same turn."""
    length, depths = accept.shape[1:]
    survive, rows = torch.ones_like(accept[..., 0]), []
    for depth in range(depths):
        a = torch.where(mask[..., depth], accept[..., depth], 0)
        rows.append(survive * (1 - a))
        survive = survive * a
    rows.append(survive)

    # Steps never cross into another turn.
    turn = torch.where(mask[..., 0], turn_starts.cumsum(1), 0)
    later = torch.nn.functional.pad(turn, (0, depths + 1)).unfold(1, length, 1)[:, 1:]  # [B, K + 1, T]
    allowed = (later == turn[:, None]) & (turn > 0)[:, None]
    return torch.stack(rows, -1) * allowed.transpose(1, 2)


def _visits(transitions: Tensor, starts: Tensor) -> Tensor:
    """Run the forward recursion: [B, T, K + 1] and [B, T] -> [B, T]."""
    batch, length, width = transitions.shape
    rows = transitions.permute(1, 2, 0).contiguous()  # position first: slices are contiguous
    visits = rows.new_zeros(length + width, batch)
    visits[:length] = starts.T
    for t in range(length):
        visits[t + 1 : t + 1 + width].addcmul_(rows[t], visits[t])
    return visits[:length].T


class _ExpectedSteps(torch.autograd.Function):
    """sum_t visit(t), with the gradient from the value function."""

    @staticmethod
    def forward(ctx, transitions: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        visits = _visits(transitions, starts)
        ctx.save_for_backward(transitions, visits)
        ctx.mark_non_differentiable(visits)
        return visits.sum(-1), visits

    @staticmethod
    def backward(ctx, grad_steps: Tensor, _: Tensor) -> tuple[Tensor, None]:
        transitions, visits = ctx.saved_tensors
        batch, length, width = transitions.shape
        rows = transitions.permute(1, 2, 0).contiguous()
        values = rows.new_zeros(length + width, batch)
        for t in reversed(range(length)):
            values[t] = (rows[t] * values[t + 1 : t + 1 + width]).sum(0) + 1
        later = values.T.unfold(1, length, 1)[:, 1 : width + 1].transpose(1, 2)  # [B, T, K + 1]
        return (grad_steps[:, None] * visits)[..., None] * later, None
