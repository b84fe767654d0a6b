"""The visit recursion: exact probabilities of where verify steps start, from one teacher-forced pass.

Owns the Markov chain of a rollout's verify steps; knows no logits and no engine. Given a sequence x sampled
from the target, the i-th token of a step came from an accepted draft with probability

    a_i = min(1, q_i(x_i) / p_i(x_i)),   independently of the others,

because the part min(p, q)(x) of the mass p(x) comes from drafts and the remainder from the residual. A step
at anchor t that accepts j drafts emits j + 1 tokens, so the next step starts at t + j + 1:

    P_t(j) = a_1 ... a_j (1 - a_{j+1}),  a_{gamma+1} = 0
    visit(t) = [t starts a turn] + sum_j visit(t - j - 1) P_{t-j-1}(j)

and sum_t visit(t) is the expected number of verify steps (notes/mtp_objectives). Its gradient comes from
the value function V(t) = 1 + sum_j P_t(j) V(t + j + 1): d steps / d P_t(j) = visit(t) V(t + j + 1).

None of this holds for text from another source (prompts, tool output, another model): there the mean of a_i
is a different number, so training refuses such text (`rlpipe.preflight.settings`). With staleness an earlier
policy sampled the tokens, and the result has an error of the size of the difference between the two policies.

All functions take accept [B, T, K], the a_i of depth 1..K at anchor t, and mask [B, T, K]. An anchor is
active where depth 1 is unmasked, a masked depth ends the chain, and steps never cross into another turn. The
cost is two small operations per position, in float64, without synchronisation.
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
    verify_steps: [B]. emitted: [B] tokens that these steps emit (without a turn's first token, which comes
    from the prefill). drafted, accepted: [B, K], as in `SpecCounts`: steps that reached the depth, and steps
    that accepted its draft, for drafts inside the turn.
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
    """Compute min(1, q / p) at realised tokens from log-probabilities in nats: [...] twice -> [...].

    At a tie q = p the gradient flows, as in the overlap.
    """
    return (draft_logprobs - target_logprobs).clamp(max=0).exp()


def expected_accepted(last: Tensor, passed: Tensor, mask: Tensor) -> Tensor:
    """Compute sum_j passed_1 ... passed_{j-1} last_j over unmasked leading depths: [N, K] each -> [N].

    It uses Horner's rule. The gradient is then a product of the depths before and the chain after, without a
    division, so a probability of 0 within a chain is no special case.
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
    """Compute the probability that a verify step starts at each anchor: [B, T] float64, detached."""
    with torch.no_grad():
        transitions = _transitions(accept.double(), mask, turn_starts)
        return _visits(transitions, turn_starts & mask[..., 0])


def forecast(accept: Tensor, mask: Tensor, turn_starts: Tensor) -> VisitForecast:
    """Compute the expected counts of an engine that emits these sequences; no gradient flows.

    >>> one = torch.ones(1, 4, 1)
    >>> start = torch.tensor([[True, False, False, False]])
    >>> forecast(one, one.bool(), start).acceptance_length.item()  # gamma = 1, every draft accepted
    2.0
    """
    with torch.no_grad():
        visits = visit_probabilities(accept, mask, turn_starts)

        # For each step, compute depth by depth the probability of being reached, then accepted.
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
    """Computes sum_t visit(t); its gradient comes from the value function."""

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
