"""Objectives on windows that the draft generates and the target verifies; each has a row in `LOSSES`.

`rlpipe.drafts.windows` samples, drafts and verifies windows, in the same way for every objective and drafter.
Its settings are in the section `ppow`.

    ppow          published: score-function term only, clipped, with a KL       `objectives.ppow`
    ppow_exact    the same with its missing pathwise term                      `objectives.ppow`
    ppow_measured published, with the speed-up of a step as its reward         `objectives.ppow`
    exact_window  exact gradient of the expected speed-up, chain verification  `objectives.exact_window`
    exact_block   the same under block verification                            `objectives.exact_window`
    own_kl        KL(target || draft) after the draft's own tokens             `objectives.own_tokens`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.objectives import exact_window, own_tokens, ppow
from rlpipe.drafts.windows.rollout import Rollout
from rlpipe.drafts.windows.totals import PpowTotals
from rlpipe.spec.verify import verify_block, verify_chain
from rlpipe.spec.verify.verdict import Verdict

# (windows, share of them sampled by score, settings) -> sum over drafts of the loss, a scalar, and totals.
# It is called for parts of the windows, which never separate siblings, and the results are added.
WindowsLoss = Callable[[Rollout, float, PpowConfig], tuple[Tensor, PpowTotals]]


@dataclass(slots=True, kw_only=True, frozen=True)
class WindowObjective:
    """One objective on windows.

    loss: see `WindowsLoss`. reward: computes the reward of each window from `Verdict.num_accepted`,
    `Verdict.accept_prob`, the gap to the target's greedy window, draft_cost and config. proximity: whether
    the reward uses that gap; then the target's greedy windows are computed. verify: the rule that accepts
    drafts.
    """

    loss: WindowsLoss
    reward: Callable[..., Tensor]
    proximity: bool = False
    verify: Callable[..., Verdict] = verify_chain


LOSSES: dict[DraftObjective, WindowObjective] = {
    DraftObjective.PPOW: WindowObjective(loss=ppow.windows_loss, reward=ppow.reward, proximity=True),
    DraftObjective.PPOW_EXACT: WindowObjective(
        loss=partial(ppow.windows_loss, exact=True), reward=ppow.reward, proximity=True
    ),
    DraftObjective.PPOW_MEASURED: WindowObjective(
        loss=ppow.windows_loss, reward=ppow.measured_reward, proximity=True
    ),
    DraftObjective.EXACT_WINDOW: WindowObjective(loss=exact_window.windows_loss, reward=exact_window.reward),
    DraftObjective.EXACT_BLOCK: WindowObjective(
        loss=partial(exact_window.windows_loss, block=True),
        reward=partial(exact_window.reward, block=True),
        verify=verify_block,
    ),
    DraftObjective.OWN_KL: WindowObjective(loss=own_tokens.windows_loss, reward=exact_window.reward),
}
