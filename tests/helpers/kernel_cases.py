"""Inputs for verification kernels, and equality with the torch reference up to ties."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from rlpipe.spec import kernels, verify

RULES = ("verify_chain", "verify_block", "verify_target_only")
EDGE = 2.0**-53  # the largest uniform is 1 - EDGE


@dataclass(slots=True, kw_only=True)
class Case:
    """Arguments of a verification rule, in their order."""

    draft_tokens: torch.Tensor
    draft_probs: torch.Tensor
    target_probs: torch.Tensor
    accept_uniforms: torch.Tensor
    residual_uniforms: torch.Tensor

    def with_(self, **changes: torch.Tensor) -> Case:
        """A copy with some arguments replaced."""
        return replace(self, **changes)

    def map(self, change) -> Case:
        """A copy with `change` applied to every tensor."""
        return Case(**{f.name: change(getattr(self, f.name)) for f in fields(self)})

    def arguments(self, rule: str) -> list[torch.Tensor | None]:
        """Positional arguments for `rule`; target-only is told no draft probabilities."""
        tensors = [getattr(self, f.name) for f in fields(self)]
        if rule == "verify_target_only":
            tensors[1] = None
        return tensors


def random_case(
    batch: int, gamma: int, vocab: int, *, seed: int = 0, zeros: float = 0.1, padding: int = 0
) -> Case:
    """float32 softmax rows in which a share `zeros` of the tokens has probability 0 in p and q each.

    The draft resembles the target, so that all depths are accepted now and then. The last `padding`
    columns are zero.
    """
    generator = torch.Generator().manual_seed(seed)

    def logits(rows: int) -> torch.Tensor:
        values = 1.5 * torch.randn(batch, rows, vocab, generator=generator)
        dead = torch.rand(batch, rows, vocab, generator=generator) < zeros
        dead[..., vocab // 2] = False
        dead[..., vocab - padding :] = True
        return values.masked_fill(dead, float("-inf"))

    target = logits(gamma + 1)
    draft = (logits(gamma) * 0.5 + target[:, :gamma].nan_to_num(neginf=-2.0)).softmax(-1)
    tokens = torch.multinomial(draft.reshape(-1, vocab), 1, generator=generator).view(batch, gamma)
    return Case(
        draft_tokens=tokens,
        draft_probs=draft,
        target_probs=target.softmax(-1),
        accept_uniforms=torch.rand(batch, gamma, dtype=torch.float64, generator=generator),
        residual_uniforms=torch.rand(batch, dtype=torch.float64, generator=generator),
    )


def tie_width(vocab: int) -> float:
    """Distance of a uniform from a boundary below which kernel and reference may differ (see launch.py)."""
    return max(vocab, 4) * 2.0**-52


def assert_equal_to_reference(rule: str, case: Case, device: str = "cpu") -> verify.Verdict:
    """The kernel's verdict is the reference's, bit by bit; at a tie its token is either neighbour.

    A tie is where the reference's own token changes when the uniform moves by `tie_width`.
    """
    reference = getattr(verify, rule)
    ours = getattr(kernels, rule)(*case.map(lambda x: x.to(device)).arguments(rule))
    wanted = reference(*case.arguments(rule))
    torch.testing.assert_close(ours.num_accepted.cpu(), wanted.num_accepted, rtol=0, atol=0)
    torch.testing.assert_close(ours.accept_prob.cpu(), wanted.accept_prob, rtol=0, atol=0)
    width = tie_width(case.target_probs.shape[2])
    low, high = (
        reference(
            *case.with_(residual_uniforms=(case.residual_uniforms + shift).clamp(0, 1)).arguments(rule)
        ).next_token
        for shift in (-width, width)
    )
    token = ours.next_token.cpu()
    wrong = ~((token == low) | (token == high) | (token == wanted.next_token))
    assert not wrong.any(), (
        f"{rule}: rows {wrong.nonzero().flatten().tolist()} gave {token[wrong].tolist()}, "
        f"the reference {wanted.next_token[wrong].tolist()}"
    )
    return ours


def lattice(weights: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniforms just inside both ends of the CDF interval of each token, and the token that each must give.

    weights: [V] >= 0. tokens: [K] int64, each of a weight far above rounding. Returns [2K], [2K].
    """
    cdf = weights.double().cumsum(0)
    inside = 4 * tie_width(len(weights))
    upper = cdf[tokens] / cdf[-1] - inside
    lower = (cdf[tokens] - weights[tokens].double()) / cdf[-1] + inside
    return torch.cat([lower, upper]), torch.cat([tokens, tokens])
