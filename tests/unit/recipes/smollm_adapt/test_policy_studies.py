"""Drafts along policies: a tiny layer that follows heads in place, planted rewards, and paired figures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from recipes.smollm_adapt import pools, replay
from recipes.smollm_adapt.objectives import Drafts, visits
from recipes.smollm_adapt.policies import Policies, Policy, write_between
from recipes.smollm_adapt.texts import Text
from rlpipe.drafts.loss import mtp_loss
from rlpipe.models.checkpoint import MTP_PREFIX, read_weights
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit

VOCAB, HIDDEN, LENGTH = 30, 16, 14
MATRICES = {
    "input_proj": (HIDDEN, 2 * HIDDEN),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (2 * HIDDEN, HIDDEN),
    "mlp.up_proj": (2 * HIDDEN, HIDDEN),
    "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
}
NORMS = ("token", "hidden", "input", "post_attention", "final")


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def policy(generator: torch.Generator, head: torch.Tensor, count: int = 4) -> Policy:
    texts = []
    for _ in range(count):
        hidden = normal(generator, LENGTH, HIDDEN).bfloat16()
        logits = (hidden @ head.T).float()
        p = logits.softmax(-1)
        texts.append(
            Text(
                ids=torch.randint(0, VOCAB, (LENGTH,), generator=generator),
                sampled=torch.arange(LENGTH) > 2,
                hidden=hidden,
                normaliser=logits.logsumexp(-1),
                entropy=torch.special.entr(p).sum(-1),
                top=logits.argmax(-1),
            )
        )
    rewards, prompts = [0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1]
    return Policy(head, texts, rewards, prompts, held_out=texts, sweep=texts, others=texts[:2])


@pytest.fixture
def policies():
    """A tiny layer and embedding; `enter` is the real one."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.Embedding(VOCAB, HIDDEN, dtype=torch.bfloat16)
    names = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HIDDEN // 2}
    model = SimpleNamespace(
        config=SimpleNamespace(**names, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 1e4}),
        get_input_embeddings=lambda: embedding,
        get_output_embeddings=lambda: embedding,
    )
    weights = {f"{name}.weight": normal(generator, *shape) / 4 for name, shape in MATRICES.items()}
    weights |= {f"{name}_layernorm.weight": torch.ones(HIDDEN) for name in NORMS}
    made = object.__new__(Policies)
    made.model, made.table = model, torch.arange(0, VOCAB, 2)
    made.start = {MTP_PREFIX + name: weight for name, weight in weights.items()}
    return made


def test_a_draft_that_learns_along_the_policies_accepts_more_than_a_frozen_one(policies):
    generator = torch.Generator().manual_seed(1)
    line = [policy(generator, normal(generator, VOCAB, HIDDEN).bfloat16()) for _ in range(3)]
    args = SimpleNamespace(steps=40, batch=2)
    frozen, online = (
        replay.walk(policies, line, kind, lr=1e-2, seed=0, args=args) for kind in (None, "e2e_tv")
    )
    assert len(frozen) == len(online) == 3
    assert online[0] == frozen[0]  # measured before any training
    assert online[2]["rejection"] > frozen[2]["rejection"] + 0.1
    assert frozen == replay.walk(policies, line, None, lr=1.0, seed=5, args=args)


def test_a_draft_follows_the_head_of_the_policy_that_is_entered(policies):
    generator = torch.Generator().manual_seed(2)
    head = normal(generator, VOCAB, HIDDEN).bfloat16()
    one = policy(generator, head)
    other = replace(one, head=head / 4)
    points = replay.walk(policies, [one, other, one], None, lr=0.0, seed=0, args=None)
    assert points[0] == points[2] and points[1]["draft_entropy"] > points[0]["draft_entropy"] + 0.1


def test_policies_that_do_not_change_have_nothing_to_split(policies):
    generator = torch.Generator().manual_seed(3)
    one = policy(generator, normal(generator, VOCAB, HIDDEN).bfloat16())
    for parts in replay.split(policies, [one, one]).values():
        assert parts["change"] == parts["entropy"] == parts["mismatch"] == 0 and parts["slope"] != 0


def test_arms_are_compared_run_by_run():
    def course(end: float) -> list[dict[str, float]]:
        return [{"rejection": 1.0}, {"rejection": end}]

    ends = {"frozen": (0.5, 0.6, 0.7), "online e2e TV": (0.7, 0.8, 0.9), "online hard CE": (0.6, 0.9, 0.6)}
    table = replay.summary({arm: [course(end) for end in values] for arm, values in ends.items()})
    row = table["online e2e TV"]["rejection"]
    assert row["minus frozen"] == pytest.approx([0.2, 0.2, 0.2], abs=1e-3)
    assert row["seeds to decide, minus frozen"] == 2 and row["change"][0] == pytest.approx(-0.2)
    low, high = table["online hard CE"]["rejection"]["minus online e2e TV"][1:]
    assert low < 0 < high and "minus frozen" not in table["frozen"]["rejection"]


def test_a_pool_has_the_answers_that_its_name_says():
    one = policy(torch.Generator().manual_seed(4), torch.ones(VOCAB, HIDDEN).bfloat16())
    wanted = {"all": [0, 1, 2, 3], "visit": [0, 1, 2, 3], "rewarded": [1, 2, 3], "undecided": [0, 1]}
    for pool, numbers in wanted.items():
        taken = pools.choose(one, pool)
        assert [id(text) for text in taken] == [id(one.training[number]) for number in numbers]


def test_anchors_by_visit_weigh_as_the_loss_with_whole_texts(policies):
    """Against `mtp_loss` itself, which computes the visits of full rows."""
    one = policy(torch.Generator().manual_seed(5), torch.ones(VOCAB, HIDDEN).bfloat16())
    drafts = Drafts(policies.model, policies.table, policies.start)
    rows = drafts.rows(one.training)
    weights, anchors = visits(rows), rows["anchors"]
    assert 0 <= weights.min() < 0.9 and weights.max() == 1

    def spread(name: str) -> torch.Tensor:
        wide = torch.zeros(*anchors.shape, *rows[name].shape[1:], dtype=rows[name].dtype)
        wide[anchors] = rows[name]
        return wide.flatten(0, 1)

    starts = anchors & (anchors.cumsum(1) == 1)
    inputs = {"mask": spread("mask"), "tokens": spread("tokens")}
    wanted, _ = mtp_loss(
        "e2e_tv", spread("draft"), spread("target"), anchors="visit", turn_starts=starts, **inputs
    )
    assert drafts.loss("e2e_tv", one.training, by_visit=True)[0].item() == pytest.approx(wanted.item())
    assert drafts.loss("e2e_tv", one.training)[0].item() != pytest.approx(wanted.item(), abs=1e-4)


def test_pools_are_compared_with_the_draft_trained_along_the_way():
    cells = {
        arm: [
            {"answers": 4, "rejection": value + run / 10, "target_only": 0.5, "out of domain": 0.4}
            for run in range(3)
        ]
        for arm, value in (("frozen", 0.5), ("e2e TV, all", 0.8), ("hard CE, all", 0.7))
    }
    table = pools.summary(cells, {"e2e_tv": [0.7, 0.8, 0.9]})
    assert table["e2e TV, all"]["rejection"]["minus online"] == pytest.approx([0.1, 0.1, 0.1])
    assert table["hard CE, all"]["rejection"]["minus e2e TV, all"][0] == pytest.approx(-0.1)
    assert "minus online" not in table["hard CE, all"]["rejection"]


def test_weights_between_two_checkpoints_lie_on_the_straight_line(tmp_path):
    ends = [tmp_path / name for name in ("before", "after")]
    for seed, path in enumerate(ends):
        write_random_checkpoint(path, "llama", seed=seed)
    first, last = map(read_weights, ends)
    for part in (0.0, 0.25, 1.0):
        out = tmp_path / f"{part}"
        out.mkdir()
        write_between(*ends, part, out)
        for name, weight in read_weights(out).items():
            torch.testing.assert_close(weight, first[name] + part * (last[name] - first[name]))
    assert (out / "config.json").read_text() == (ends[1] / "config.json").read_text()
