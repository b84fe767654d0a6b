"""Objectives on given text: each file holds `OBJECTIVE`, a `Supervised`, under the name of the file.

Pure functions of row statistics; no logits, no vocabulary. Notation: p target, q draft, alpha_k =
sum_v min(p_k, q_k) at depth k, a_k = min(1, q_k(x_k) / p_k(x_k)) at the realised token, m the mask, w_n the
weight of anchor n. Every loss is a ratio of sums, a mean over drafted tokens:

    by depth:  sum_n w_n sum_k m_nk loss_nk / sum_n w_n sum_k m_nk
    by chain:  sum_n w_n (g_n - E[tau_n])   / sum_n w_n g_n,     g_n = leading unmasked depths of anchor n

so a chain cut short by the end of a turn counts for what it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from torch import Tensor

from rlpipe.config.mtp_loss import SUPERVISED, MtpObjective

if TYPE_CHECKING:
    from rlpipe.drafts.loss.rows import Rows


@dataclass(slots=True, kw_only=True, frozen=True)
class Supervised:
    """One objective, by exactly one of its three forms.

    by_depth: rows -> loss of each drafted token, [N, K]. by_chain: rows and mask, without gaps -> expected
    accepted drafts of each anchor, [N]. by_sequence: rows, mask, turn_starts -> numerator and denominator.
    needs_tokens: whether realised tokens enter. needs_target: whether it has a KL term, whose gradient reads
    the target again.
    """

    by_depth: Callable[[Rows], Tensor] | None = None
    by_chain: Callable[[Rows, Tensor], Tensor] | None = None
    by_sequence: Callable[[Rows, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    needs_tokens: bool = False
    needs_target: bool = False


def supervised(kind: MtpObjective | str) -> Supervised:
    """The objective of a name. Raises ValueError for an unknown one, and one that learns from windows."""
    kind = MtpObjective(kind)
    if kind not in SUPERVISED:
        raise ValueError(
            f"kind={kind} learns from windows that a draft makes itself and has no loss on given text: use "
            f"one of {', '.join(SUPERVISED)} here, or train a draft with mtp.objective={kind}."
        )
    return import_module(f"{__name__}.{kind}").OBJECTIVE
