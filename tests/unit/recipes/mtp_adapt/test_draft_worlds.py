"""The worlds in which a draft meets RL: what is measured of a draft, by another enumeration."""

from __future__ import annotations

import pytest
import torch

from recipes import theory
from recipes.mtp_adapt import worlds
from recipes.mtp_adapt.worlds import DEPTHS, HALF, SEEN, VOCAB, World

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def world():
    return World(2)


@pytest.fixture(scope="module")
def weights():
    return torch.randn(2, SEEN + 1, VOCAB, generator=torch.Generator().manual_seed(9))


def test_acceptance_is_that_of_the_drafts_that_rejection_judges(world, weights):
    found = worlds.measure(world, world.states, weights, 0)
    tokens, anchors = worlds.everything(world, 0)
    p, q = (
        worlds.along(tables, tokens, anchors).softmax(-1).gather(-1, tokens[..., None])[..., 0]
        for tables in (world.policy(world.states), world.draft(world.states, weights))
    )
    reach = (q.prod(-1)[:, None] * theory.chain_reach_drafted(p, q)).view(2, -1, DEPTHS).sum(1) / HALF
    product = torch.ones(2, dtype=reach.dtype)
    for k in range(DEPTHS):
        product = product * found[f"depth {k + 1}"]
        torch.testing.assert_close(product, reach[:, k], atol=1e-5, rtol=0)
    torch.testing.assert_close(found["rejection"].double(), reach.sum(-1), atol=1e-5, rtol=0)


def test_target_only_follows_the_drafts_own_argmax(world, weights):
    accepted = 0.0
    for anchor in world.anchors(1)[HALF:].tolist():  # of the second world
        prefix, chance = [], 1.0
        for depth in range(DEPTHS):
            index = sum(x * VOCAB ** (depth - 1 - i) for i, x in enumerate(prefix))
            best = int(world.draft(world.states, weights)[depth][anchor, index].argmax())
            chance *= world.policy(world.states)[depth][anchor, index, best].exp().item()
            accepted += chance
            prefix.append(best)
    found = worlds.measure(world, world.states, weights, 1)
    assert found["target-only"][1].item() == pytest.approx(accepted / HALF, abs=1e-5)


def test_the_parts_of_acceptance_add_up_and_a_perfect_draft_has_all_of_it(world, weights):
    found = worlds.measure(world, world.states, weights, 0)
    torch.testing.assert_close(found["alpha"], found["alpha q>p"] + found["alpha p>q"])
    torch.testing.assert_close(found["alpha"], found["depth 1"])

    class Perfect(World):
        def draft(self, states, weights):
            return self.policy(states)

    perfect = worlds.measure(Perfect(2), world.states, weights, 0)
    torch.testing.assert_close(perfect["rejection"], torch.full((2,), float(DEPTHS)))
    torch.testing.assert_close(perfect["kl"], torch.zeros(2))
    torch.testing.assert_close(perfect["entropy gap"], torch.zeros(2))


def test_rl_raises_right_tokens_lowers_entropy_and_leaves_other_anchors_alone(world):
    states = world.states
    for _ in range(60):
        states = worlds.learn_policy(world, states)

    def right(states):
        return (world.policy(states)[0].exp() * world.right[0]).sum(-1)

    inside, others = world.anchors(0), world.anchors(1)
    assert (right(states)[inside] > right(world.states)[inside]).all()
    assert torch.equal(right(states)[others], right(world.states)[others])
    flat = torch.zeros(2, SEEN + 1, VOCAB)
    before, after = (worlds.measure(world, s, flat, 0)["entropy"] for s in (world.states, states))
    assert (after < before).all()


def test_texts_are_the_policys_own(world):
    """n = 320 first tokens of each anchor and world: five standard errors."""
    counts = torch.zeros(len(world.world_of), VOCAB)
    for _ in range(40):
        tokens, anchors = worlds.texts(world, world.states)
        counts.index_put_((anchors, tokens[:, 0]), torch.ones(len(tokens)), accumulate=True)
    inside = world.anchors(0)
    expected = world.policy(world.states)[0][inside, 0].exp()
    error = 5 * (expected * (1 - expected) / 320).sqrt() + 0.01
    assert ((counts[inside] / 320 - expected).abs() < error).all()
    assert counts[world.anchors(1)].sum() == 0


def test_a_world_learns_as_it_does_alone(world):
    """Worlds share a loss and an optimizer, not a gradient: texts of one leave the draft of the other."""
    learner = worlds.Learner(torch.zeros(2, SEEN + 1, VOCAB))
    tokens, anchors = worlds.texts(world, world.states)
    first = world.world_of[anchors] == 0
    learner.step(world, world.states, "e2e_tv", (tokens[first], anchors[first]))
    assert learner.weights[0].abs().max() > 0 and learner.weights[1].abs().max() == 0


def test_intervals_are_over_worlds_and_paired():
    world = torch.arange(3.0)
    names = ("alpha", "kl", "entropy gap", "reverse kl", "rejection", "depth 1", "depth 2", "depth 3")
    point = dict.fromkeys(names, 0 * world) | {"rejection": 1.1 * world, "alpha": world, "kl": world.square()}
    point |= {"entropy gap": -world, "reverse kl": world % 2}
    curves = {kind: [[point, point]] * 2 for kind in worlds.OBJECTIVES}
    curves["tv"] = [[point | {"rejection": point["rejection"] + 0.25}] * 2] * 2
    runs = {name: [point, point | {"rejection": world + 2}] for name in worlds.ONLINE}

    found = worlds.summary(curves, runs)
    assert found["objectives"]["tv"]["in domain, rejection, minus kl"] == pytest.approx([0.25] * 3)
    change = found["rl"]["CE, frozen"]["rejection"]
    assert change["end"][0] == pytest.approx(3.0) and change["change"][0] == pytest.approx(1.9)
    assert change["end minus TV, frozen"] == pytest.approx([0, 0, 0])
    assert found["correlations"]["entropy gap"] == -1 and found["correlations"]["drafts"] == 30
