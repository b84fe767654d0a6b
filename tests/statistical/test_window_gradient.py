"""The sampled gradient of the expected speed-up has no bias; that of PPOW's score term has one.

Windows are drafted, verified and turned into a loss by the code of a training step, n groups of G = 3 from
one anchor, each with tables of its own, so that the gradient of every group is seen. For each coordinate

    z = (mean over the groups - finite differences of the expectation) / standard error,

and the largest |z| is compared with the normal quantile at alpha / coordinates, alpha = .001 for each test.
Of coordinates that few groups reach the mean is not normal: those are left out, by their probability and not
by what was sampled. Power: the same test of a gradient whose acceptance probabilities are held fixed, with as
many groups, must exceed the bound; its largest |z| is above four times the bound.
"""

from __future__ import annotations

import pytest
import torch

from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.objectives import exact_window
from rlpipe.drafts.objectives.exact_window import log_survival, speedup
from rlpipe.drafts.windows.rollout import logprobs_of
from rlpipe.drafts.windows.training import WindowTraining
from tests.helpers.window_tables import TableDrafter, Tables

pytestmark = pytest.mark.statistical

GROUPS, SIZE, COST, ALPHA = 6000, 3, 0.2, 0.001
OBJECTIVES = {"chain": DraftObjective.EXACT_WINDOW, "block": DraftObjective.EXACT_BLOCK}


def score_only(log_q, log_p, tokens, *, block):
    """A wrong `window_gradient`: R times the score, less the siblings' R, without the pathwise term."""
    log_ratio = logprobs_of(log_p, tokens) - logprobs_of(log_q, tokens)
    accepted = log_survival(log_ratio, block=block).exp().sum(-1)
    others = (accepted.sum(-1, keepdim=True) - accepted) / (tokens.shape[-2] - 1)
    weights = torch.zeros_like(log_q)
    gap = (accepted - others)[..., None, None].expand(*tokens.shape, 1)
    return weights.scatter_add_(-1, tokens.unsqueeze(-1), gap), accepted


def largest_z(tables, *, block, seed):
    """The largest |z| over coordinates, and its bound at ALPHA."""
    text = TableDrafter(tables, GROUPS)
    config = PpowConfig(group_size=SIZE, windows=GROUPS, draft_cost=COST, hard_start=0.0, hard_end=0.0)
    objective = OBJECTIVES["block" if block else "chain"]
    training = WindowTraining(config, objective, depths=tables.depths, steps=1, seed=seed)
    total, _ = training.loss(text, 0)
    total.backward()

    # The loss is a sum over windows and drafts of minus the speed-up.
    samples = -torch.cat(list(text.gradients()), 1) / (SIZE * tables.depths)
    f = speedup(torch.arange(tables.depths + 1.0, dtype=torch.float64), tables.depths, COST)
    exact = tables.gradient(f, block=block)

    common = []
    windows = tables.windows()
    chance = logprobs_of(tables.logprobs(tables.draft, windows, tables.depths), windows).sum(-1).exp()
    for depth in range(tables.depths):
        prefix = chance.view(tables.vocab**depth, -1).sum(1)
        common.append(prefix > 300 / (GROUPS * SIZE))
    common = torch.cat(common)[:, None].expand_as(exact)

    # Where no token can clip, a block's gradient is 0 in every sample: exactly right, and no z.
    error, bias = samples.std(0) / GROUPS**0.5, samples.mean(0) - exact
    assert (bias[common & (error == 0)].abs() < 1e-8).all()
    z = (bias / error)[common & (error > 0)]
    assert z.numel() > 40
    bound = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - ALPHA / 2 / z.numel()))
    return z.abs().max().item(), bound.item()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
def test_sampled_windows_give_the_gradient_of_the_expected_speedup_without_bias(block, temperature):
    z, bound = largest_z(Tables(4, 3, temperature=temperature, seed=2), block=block, seed=11)
    assert z < bound


@pytest.mark.parametrize("block", [False, True], ids=["chain", "block"])
def test_a_gradient_without_the_pathwise_term_is_found_biased(block, monkeypatch):
    monkeypatch.setattr(exact_window, "window_gradient", score_only)
    z, bound = largest_z(Tables(4, 3, seed=2), block=block, seed=11)
    assert z > 4 * bound
