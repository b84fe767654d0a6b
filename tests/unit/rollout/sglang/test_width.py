"""The policy that chooses a server's drafts, without a server."""

import runpy
import sys
from types import SimpleNamespace

import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.rollout.sglang.answers import spec_counts
from rlpipe.rollout.sglang.arguments import server_environment
from rlpipe.spec.gamma import AdaptiveGamma
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
DEEPEST = 3


@pytest.fixture
def width(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(ROOT / "sglang_env" / "plugin"))
    import rlpipe_sglang.width as module

    yield module
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        del sys.modules[name]


class Load:
    """Steps on a made-up clock: a step costs 1 + price[batch] a draft, and keeps every draft."""

    def __init__(self, width, price, kept=lambda width: width):
        self.now, self.price, self.kept = 0.0, price, kept
        self.policy = width.Widths(DEEPEST, AdaptiveGamma, clock=lambda: self.now)

    def step(self, batch):
        chosen = self.policy.get_steps_for_batch(batch)
        self.now += 1 + self.price[batch] * chosen
        assert self.policy.on_verify_complete([self.kept(chosen)] * batch, batch) is None
        assert self.policy.finished == chosen
        return chosen


def test_each_width_is_measured_first_and_then_the_batch_decides(width):
    load = Load(width, {1: 0.01, 64: 5.0})
    assert {load.step(1) for _ in range(15)} == {0, 1, 2, 3}
    assert {load.step(64) for _ in range(15)} == {0, 1, 2, 3}
    assert [load.step(1) for _ in range(5)] == [DEEPEST] * 5
    assert [load.step(64) for _ in range(60)].count(0) >= 54  # but for trials


def test_requests_that_end_while_widths_are_measured_favour_none(width):
    """A step of a row takes 1 + 0.2 a draft; measured one after another, the last width looked cheap."""
    load = Load(width, {})
    for batch in range(64, 49, -1):
        chosen = load.policy.get_steps_for_batch(batch)
        load.now += batch * (1 + 0.2 * chosen)
        load.policy.on_verify_complete([chosen] * batch, batch)
    policy = load.policy._policy
    costs = [policy.seconds(57, w) / policy.seconds(57, 0) for w in range(DEEPEST + 1)]
    assert costs == pytest.approx([1.0, 1.2, 1.4, 1.6], rel=0.01)


def test_a_full_batch_keeps_its_costs_when_a_row_ends(width):
    load = Load(width, {64: 0.01, 63: 0.01})
    for step in range(15):
        load.step(64 - step % 2)
    assert load.policy._known == {6}
    load.step(63)
    assert load.policy._known == {6} and len(load.policy._measured) == 1


def test_drafts_that_are_never_kept_are_given_up(width):
    load = Load(width, {1: 0.3}, kept=lambda _: 0)
    assert [load.step(1) for _ in range(200)][-1] == 0


def test_the_time_of_a_prefill_is_no_steps_time(width):
    load = Load(width, {1: 0.01})
    for count in range(60):
        if count % 5 == 4:
            load.now += 100
            load.policy.disturbed()
        load.step(1)
    assert max(load.policy._policy.seconds(1, w) for w in range(DEEPEST + 1)) < 1.1


def test_a_choice_knows_only_steps_that_are_over(width):
    """Two runs whose steps end alike choose alike, whatever the running steps will keep."""
    one, other = Load(width, {2: 0.1}), Load(width, {2: 0.1})
    for _ in range(60):
        assert one.step(2) == other.step(2)
    begun = [load.policy.get_steps_for_batch(2) for load in (one, other)]
    following = [load.policy.get_steps_for_batch(2) for load in (one, other)]  # overlapping: none is told yet
    assert begun[0] == begun[1] and following[0] == following[1]
    one.now, other.now = one.now + 1, other.now + 1
    one.policy.on_verify_complete([0, 0], 2)
    other.policy.on_verify_complete([begun[1]] * 2, 2)
    assert one.policy.finished == other.policy.finished == begun[0]


def test_counts_are_right_whatever_the_widths_were(width, monkeypatch):
    steps = [(3, 3), (0, 0), (1, 0), (2, 1), (3, 0), (0, 0), (1, 1)]  # (drafted, kept)
    asked = SimpleNamespace(spec_correct_drafts_histogram=[])
    monkeypatch.setattr(width, "policy", SimpleNamespace(candidate_steps=[0, 1, 2, 3], finished=0))
    for drafted, kept in steps:
        width.policy.finished = drafted
        width.counted(None, asked, kept)
    meta = {"spec_verify_ct": len(steps), "spec_num_proposed_drafts": DEEPEST * len(steps)}
    counts = spec_counts(meta | {"spec_correct_drafts_histogram": asked.spec_correct_drafts_histogram})
    assert counts.proposed == sum(drafted for drafted, _ in steps) == 10
    assert counts.drafted == [sum(w > d and k >= d for w, k in steps) for d in range(DEEPEST)] == [5, 2, 1]
    assert counts.accepted == [sum(k > d for _, k in steps) for d in range(DEEPEST)] == [3, 1, 1]
    assert counts.verify_steps == len(steps)


def test_the_policy_travels_by_its_path():
    variables = server_environment(RolloutConfig(), on_gpu=False, adaptive=True)
    assert variables["RLPIPE_GAMMA"] == str(ROOT / "rlpipe" / "spec" / "gamma.py")
    assert "RLPIPE_GAMMA" not in server_environment(RolloutConfig(), on_gpu=False)


def test_the_benchmark_forces_a_width_and_teaches_nothing_by_it(width, monkeypatch, tmp_path):
    order = tmp_path / "order"
    order.write_text("a")
    monkeypatch.setenv("RLPIPE_BENCH_POLICY", str(ROOT / "rlpipe" / "spec" / "gamma.py"))
    monkeypatch.setenv("RLPIPE_BENCH_ORDER", str(order))
    load = Load(width, {1: 0.01})
    load.policy._gamma = runpy.run_path(str(ROOT / "scripts" / "bench" / "forced_gamma.py"))["AdaptiveGamma"]
    for _ in range(15):
        load.step(1)
    assert load.step(1) == DEEPEST
    alphas = load.policy._policy.alphas
    order.write_text("1")
    load.kept = lambda _: 0
    assert [load.step(1) for _ in range(40)] == [1] * 40
    assert load.policy._policy.alphas == alphas
    order.write_text("a")
    assert load.step(1) == DEEPEST
