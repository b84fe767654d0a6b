"""The expected speed-up of a drafted window and its exact gradient, under chain and block verification.

From an anchor the drafter writes d = d_1 .. d_K, d_t ~ q_t = q(. | d_<t); the target has p_t = p(. | d_<t).
Verification accepts the first k drafts and the step emits k + 1 tokens. For every k the step costs one pass
of the target and K drafts of c passes each. Compared with one token per pass the speed-up is

    f(k) = (1 + k) / (1 + c K),      R(theta) = E_{d ~ q} E_{coins} f(k).

**Coins.** Under both rules at least j drafts are accepted with a probability S_j that depends only on d_1 ..
d_j. With r_t = p_t(d_t) / q_t(d_t) and S_0 = 1 it is

    chain:  S_j = S_{j-1} min(1, r_j)     Leviathan et al. (arXiv 2211.17192); PPOW C.1, averaged over coins
    block:  S_j = min(1, S_{j-1} r_j)     Sun et al. (arXiv 2403.10444); `rlpipe.spec.verify.block`

so (1 + c K) R = 1 + sum_j E_d S_j(d), and no coin is left to be sampled.

**The missing term of PPOW's gradient.** S_j depends on theta twice, through the sampling of d and through
r_t:

    grad E_d S_j = E_d [ S_j sum_{i <= j} grad log q_i(d_i)  +  grad S_j(d) ].
                         score-function term                    pathwise term

PPOW (arXiv 2605.14978, §4.1), like any REINFORCE that treats the reward as given, has only the first term. In
the second term, S_j has a factor 1 / q_i(d_i) where the minimum at i is r_i; its gradient, - S_j grad log
q_i(d_i), cancels the score term of that token entirely. Let clip_i = 1 where the minimum at i is 1: q_i(d_i)
<= p_i(d_i) for the chain, q_i(d_i) <= S_{i-1} p_i(d_i) for the block. The remaining terms are

    grad E_d S_j = E_d [ S_j sum_{i <= j} u_ij grad log q_i(d_i) ],
    chain:  u_ij = clip_i                    block:  u_ij = max(clip_i, .., clip_j)

(block's S_j is r_{m+1} .. r_j, with m the last clip up to j, so its pathwise term cancels the tokens after
m). In words: acceptance does not make a token likelier if the drafter already proposes it too often.

**Rao-Blackwell over the token.** For j = i the mean over d_i is a sum over the vocabulary, which can be
computed:

    E[ S_i clip_i grad log q_i(d_i) | d_<i ] = S' sum_{v: clip_i(v)} grad q_i(v),

S' = S_{i-1} for the chain (so this is S_{i-1} grad alpha_i, alpha = sum_v min(p, q)) and S' = 1 for the
block. Only the terms j > i need a sampled d_i: h_i = sum_{j > i} u_ij S_j.

**Baseline.** F_i(d) = sum_{j > i} S_j with S_i set to 1: the drafts accepted after a clip at i. b_i is the
mean of F_i over the other G - 1 windows of the anchor, hence independent of this window. By the equation
above, the mean of S' b_i clip_i grad log q_i(d_i) is S' b_i sum_{v: clip_i(v)} grad q_i(v). Subtract the
first and add its mean:

    g = sum_i { S' (1 + b_i) sum_{v: clip_i(v)} grad q_i(v)  +  (h_i - S' b_i clip_i) grad log q_i(d_i) }

    grad R = E[g] / (1 + c K)                                                                            (1)

exactly, for any G >= 2. For K = 1 nothing in g is random: it is the gradient of alpha_1 (Bebop Eq. 11).

`window_gradient` returns g as derivatives by log q, [W, G, K, V], so its cost is linear in the vocabulary.
The tests compare the mean of (1) over all groups of windows with finite differences of R, to 1e-8. A tie q =
p counts as a clip, like in `rlpipe.drafts.visit`; R has a kink there.

**Notes.** c scales R but does not change the direction of its gradient, as K is fixed and every draft is paid
for (PPOW's reward charges only the accepted ones). R is a mean over the sampled anchors; they are sampled
uniformly where both `ppow.hard_start` and `ppow.hard_end` are 0. `e2e_tv` (Bebop Eq. 13) multiplies overlaps
along a text of the target; here the drafter samples the windows, and 1 + sum_j E_d S_j is the number of
tokens that an engine emits from these anchors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.windows.rollout import Rollout, kl_sum, logprobs_of
from rlpipe.drafts.windows.totals import PpowTotals


def speedup(accepted: Tensor, depths: int, draft_cost: float) -> Tensor:
    """Compute f(k) = (1 + k) / (1 + c K), the tokens of a step divided by its cost in passes of the target.

    accepted: k or, as f is linear, its expectation; any shape. depths: K. draft_cost: c.

    >>> speedup(torch.tensor([0.0, 3.0]), 3, 1 / 3).tolist()
    [0.5, 2.0]
    """
    return (1 + accepted) / (1 + draft_cost * depths)


def log_survival(log_ratio: Tensor, *, block: bool) -> Tensor:
    """Compute log S_j, where S_j is the probability that at least j drafts are accepted: [..., K] -> same.

    log_ratio: log r_t of the drafts. block: whether drafts are verified as a block or one after the other.

    >>> ratios = torch.tensor([0.5, 4.0]).log()
    >>> log_survival(ratios, block=False).exp().tolist(), log_survival(ratios, block=True).exp().tolist()
    ([0.5, 0.5], [0.5, 1.0])
    """
    if not block:
        return log_ratio.clamp(max=0).cumsum(-1)

    survival, current = torch.empty_like(log_ratio), log_ratio.new_zeros(log_ratio.shape[:-1])
    for depth, ratio in enumerate(log_ratio.unbind(-1)):
        current = (current + ratio).clamp(max=0)
        survival[..., depth] = current
    return survival


@torch.no_grad()
def window_gradient(log_q: Tensor, log_p: Tensor, tokens: Tensor, *, block: bool) -> tuple[Tensor, Tensor]:
    """Estimate the gradient of each window's expected number of accepted drafts, without bias.

    log_q, log_p: [..., G, K, V], normalised log-probabilities of drafter and target at each draft. tokens:
    [..., G, K], sampled from q; the G >= 2 windows of an anchor are independent. block: see `log_survival`.
    Returns two tensors. The first, w [..., G, K, V], is the module's g as derivatives by log q: g = sum_v w_v
    grad log q(v). The second, sum_j S_j [..., G], is an unbiased estimate of the number accepted.
    """
    log_ratio = logprobs_of(log_p, tokens) - logprobs_of(log_q, tokens)
    log_s = log_survival(log_ratio, block=block)
    survival, before = log_s.exp(), torch.nn.functional.pad(log_s[..., :-1], (1, 0))
    clipped = ((before if block else 0) + log_ratio) >= 0
    scale = torch.ones_like(survival) if block else before.exp()

    # Compute, depth by depth, the weight of each clipped q(v) and the weight of the sampled token.
    depths, siblings = tokens.shape[-1], tokens.shape[-2] - 1
    known, sampled = [], []
    for t in range(depths):
        later = log_survival(log_ratio[..., t + 1 :], block=block).exp().sum(-1)  # F, after a clip at t
        baseline = scale[..., t] * (later.sum(-1, keepdim=True) - later) / siblings
        counted = clipped[..., t:].cummax(-1).values if block else clipped[..., t : t + 1]
        after = (survival[..., t:] * counted)[..., 1:].sum(-1)

        known.append(scale[..., t] + baseline)
        sampled.append(after - baseline * clipped[..., t])

    bar = log_p + before.unsqueeze(-1) if block else log_p
    weights = torch.where(log_q <= bar, log_q.exp() * torch.stack(known, -1).unsqueeze(-1), 0)
    weights.scatter_add_(-1, tokens.unsqueeze(-1), torch.stack(sampled, -1).unsqueeze(-1))
    return weights, survival.sum(-1)


def expected_speedup(
    log_q: Tensor, log_p: Tensor, tokens: Tensor, *, draft_cost: float, block: bool
) -> Tensor:
    """Compute each window's speed-up from sum_j S_j, [..., G]; its gradient by log q is given by Eq. (1).

    For the arguments see `window_gradient`; the gradient flows into log_q only. draft_cost: cost of a drafted
    token, in verify steps.
    """
    weights, accepted = window_gradient(log_q, log_p, tokens, block=block)
    linear = (weights * log_q).sum((-1, -2)) / (1 + draft_cost * tokens.shape[-1])
    return speedup(accepted, tokens.shape[-1], draft_cost) + linear - linear.detach()


def reward(
    num_accepted: Tensor,
    accept_prob: Tensor,
    gap: Tensor,
    *,
    draft_cost: float,
    config: PpowConfig,
    block: bool = False,
) -> Tensor:
    """Compute E_{coins} f(k) of each window from the `accept_prob` of its `Verdict`: [..., K] -> [...].

    accept_prob: S_j for block verification, S_j / S_{j-1} for a chain. draft_cost: cost of a drafted token,
    in verify steps.
    """
    survival = accept_prob if block else accept_prob.cumprod(-1)
    return speedup(survival.sum(-1), accept_prob.shape[-1], draft_cost)


def windows_loss(
    rollout: Rollout, hard: float, config: PpowConfig, *, block: bool = False
) -> tuple[Tensor, PpowTotals]:
    """Compute the loss, minus the window's expected speed-up summed over drafts, a scalar; and totals.

    hard: the share of windows sampled by score. Only the settings for cost, windows and curriculum are used:
    there is no clip, no KL and no R_dist.
    """
    log_q, log_p, tokens = rollout.logprobs, rollout.target_logprobs[:, :, :-1], rollout.tokens
    value = expected_speedup(log_q, log_p, tokens, draft_cost=rollout.draft_cost, block=block)
    total = -tokens.shape[-1] * value.sum()
    kl = kl_sum(log_q, log_p)
    return total, PpowTotals.from_rollout(rollout, hard, loss=total, kl=kl)
