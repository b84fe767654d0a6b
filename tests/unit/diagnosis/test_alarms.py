"""Every alarm rings on a series that is ill, stays silent on one that is not, and rings once per crossing."""

import json
import random
import re
from pathlib import Path

import pytest

from rlpipe.config.alarms import AlarmRule, AlarmsConfig, AlarmTest, default_rules
from rlpipe.diagnosis.alarms import Alarms
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.console import ConsoleSink, Header
from rlpipe.metrics.values import Mean

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3]
PAGE, RECIPES = ROOT / "docs" / "alarms.md", ROOT / "recipes"

# For each rule a series of its metric that must ring at the end and one that never does. Two-metric rules
# list pairs (metric, against); None was not measured.
STEADY = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.1, 0.9, 1.0] * 2
CASES = {
    "logprob_mismatch": ([0.1] * 3, [0.1, 0.1, 0.001] * 4),
    "rollout_kl": ([0.2] * 3, [0.05] * 6),
    "ratio_tail": ([9.0] * 3, [0.5] * 6),
    "policy_kl": ([0.3], [0.1] * 6),
    "entropy_collapse": ([*STEADY, 0.15, 0.15, 0.15], [*STEADY, 0.5, 0.4, 0.3, 0.25]),
    "entropy_explosion": ([*STEADY, 4.5, 4.6, 4.7], [*STEADY, 2.0, 3.0, 3.5]),
    "entropy_decline": (
        [*[1.6 + x for x in STEADY], 1.4, 1.3, 1.2],
        [*[1.6 + x for x in STEADY], *[2.4, 2.0, 1.7] * 4],
    ),
    "repetition": ([*[0.85 * x for x in STEADY], 0.6, 0.5, 0.5], [*[0.85 * x for x in STEADY], *[0.75] * 8]),
    "gradient_spike": ([*STEADY, 11.0], [*STEADY, 5.0, 9.0]),
    "skipped_updates": ([1.0] * 3, [1.0, 1.0, 0.0] * 3),
    "reward_hacking": (
        [(0.2, None), (0.2, 0.3), (0.4, None), (0.4, 0.25), (0.5, 0.28)],
        [(0.2, None), (0.2, 0.3), (0.4, None), (0.4, 0.45), (0.5, 0.5), (0.6, 0.6)],
    ),
    "length_collapse": ([*STEADY, *[0.2] * 5], [*STEADY, *[0.4] * 8]),
    "truncation": ([0.7] * 5, [0.7] * 4 + [0.4] * 4),
    "no_signal": ([0.95] * 5, [0.8] * 8),
    "tamper": ([0.0, 0.1], [0.0] * 8),
    "staleness": ([5.0] * 3, [1.0] * 8),
    "acceptance_drop": ([*STEADY, *[0.7] * 5], [*STEADY, *[0.85] * 8]),
    "kernels_failed": ([0.0, 0.2], [0.0] * 8),
    "draft_harmed": ([3.0, 3.5, 3.6, 3.4, 3.3], [3.0, 2.9, 3.6, 3.4, 3.5, 3.4, 3.5]),
    "draft_stale": ([-0.2] * 2, [-0.02, 0.01] * 4),
    "slow_step": ([*STEADY, 16.0], [*STEADY, 9.0]),
}


def listened(rules):
    rung = []
    alarms = Alarms(AlarmsConfig(rules=rules), lambda kind, **fields: rung.append((kind, fields)))
    return alarms, rung


def records(rule, series):
    for step, values in enumerate(series, 1):
        pair = values if isinstance(values, tuple) else (values, None)
        found = dict(zip((rule.metric, rule.against or "unused"), pair, strict=True))
        yield {"training/global_step": step} | {k: v for k, v in found.items() if v is not None}


def test_every_default_rule_has_its_cases_and_its_section():
    sections = re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert set(sections) == {*default_rules(), "stall"} == {*CASES, "stall"}


@pytest.mark.parametrize("name", CASES)
def test_an_ill_series_rings_at_its_end_and_not_before(name):
    rule = default_rules()[name]
    alarms, rung = listened({name: rule})
    *before, last = records(rule, CASES[name][0])
    for record in before:
        alarms.see(record)
    assert rung == []
    alarms.see(last)
    [(kind, fields)] = rung
    assert kind == "alarm" and fields["alarm"] == name and fields["see"] == f"docs/alarms.md#{name}"


@pytest.mark.parametrize("name", CASES)
def test_a_healthy_series_is_silent(name):
    rule = default_rules()[name]
    alarms, rung = listened({name: rule})
    for record in records(rule, CASES[name][1]):
        alarms.see(record)
    assert rung == []


def smollm(step, *, entropy, distinct, reward, length, rng):
    """Step 1 to 40 of a run: each metric from its first value to its last, with noise as between batches."""
    at = {
        "rollout/entropy": entropy,
        "rollout/distinct_tokens": distinct,
        "critic/rewards/mean": reward,
        "response_length/mean": length,
    }
    record = {
        name: first + (last - first) * (step - 1) / 39 + rng.gauss(0, 0.03 * first)
        for name, (first, last) in at.items()
    }
    return record | {"training/global_step": step, "response_length/clip_ratio": max(0.0, 0.6 - 0.02 * step)}


RISE = {"reward": (0.12, 0.8), "length": (30.0, 15.0)}


def rung_by(steps, **series):
    alarms, rung = listened(default_rules())
    rng = random.Random(0)
    for step in range(1, steps + 1):
        alarms.see(smollm(step, **RISE, **series, rng=rng))
    return {fields["alarm"]: fields["step"] for kind, fields in rung if kind == "alarm"}


def test_a_run_that_shortens_its_answers_is_silent_and_one_that_degenerates_rings():
    """SmolLM2 at two rates: 2.6 to 2.0 nats with good sentences, 2.65 to 0.5 with "NNN NNN NNN"."""
    assert set(rung_by(40, entropy=(2.6, 2.0), distinct=(0.84, 0.9))) <= {"truncation"}
    degenerate = rung_by(40, entropy=(2.65, 0.5), distinct=(0.84, 0.4))
    assert degenerate["entropy_decline"] < 35 and degenerate["repetition"] < 40
    assert "entropy_collapse" not in degenerate


@pytest.mark.parametrize("recipe", ["agent_rl", "reasoning_rl", "swe_rl"])
def test_the_recorded_runs_of_the_shipped_models_do_not_decline(recipe):
    found = json.loads((RECIPES / recipe / "results.json").read_text())
    series = list(entropies(found))
    assert series
    for values in series:
        alarms, rung = listened({"entropy_decline": default_rules()["entropy_decline"]})
        for step, value in enumerate(values, 1):
            alarms.see({"training/global_step": step, "rollout/entropy": value})
        assert rung == []


def entropies(node):
    """Every list of entropies in a results file."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "entropy" and isinstance(value, list):
                yield value
            else:
                yield from entropies(value)


def test_an_alarm_rings_once_per_crossing():
    rule = AlarmRule(metric="actor/ppo_kl", threshold=0.2)
    alarms, rung = listened({"policy_kl": rule})
    for record in records(rule, [0.3, 0.3, 0.1, 0.1, 0.3]):
        alarms.see(record)
    assert [kind for kind, _ in rung] == ["alarm", "alarm_over", "alarm"]


def test_silence_rings_once_and_a_step_ends_it():
    alarms, rung = listened({})
    alarms.see({"training/global_step": 1})
    now = alarms._last_record_at
    alarms.tick(now + 29 * 60)
    assert rung == []
    alarms.tick(now + 31 * 60)
    alarms.tick(now + 41 * 60)
    alarms.see({"training/global_step": 2})
    assert [(kind, fields["alarm"]) for kind, fields in rung] == [("alarm", "stall"), ("alarm_over", "stall")]


def test_the_first_step_is_given_three_times_as_long():
    alarms, rung = listened({})
    now = alarms._last_record_at
    alarms.tick(now + 80 * 60)
    assert rung == []
    alarms.tick(now + 100 * 60)
    assert len(rung) == 1


def test_a_rule_on_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match=r"metrics.alarms.rules.mine.*actor/entropi"):
        listened({"mine": AlarmRule(metric="actor/entropi", threshold=1.0)})


def test_a_rule_that_diverges_from_nothing_is_refused():
    with pytest.raises(ValueError, match="against"):
        AlarmRule(metric="critic/rewards/mean", test=AlarmTest.DIVERGE, threshold=0.1)


def test_an_alarm_is_an_event_in_the_file_and_a_line_on_the_console(tmp_path):
    import io

    from rich.console import Console

    shown = io.StringIO()
    console = ConsoleSink(Header(title="t", total_steps=2), Console(file=shown))
    with MetricsBus([console], events=tmp_path / "events.jsonl") as bus:
        alarms = Alarms(AlarmsConfig(), bus.event)
        for step in (1, 2):
            bus.emit(step, {"actor/ppo_kl": Mean(0.5, 1)})
            alarms.see(bus.commit(step))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(e["kind"], e["level"], e["alarm"]) for e in events] == [("alarm", "warning", "policy_kl")]
    assert shown.getvalue().count("[warning] alarm") == 1


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_remembers_and_does_not_ring_again(name):
    """The whole series was seen before the resume: nothing rings, and it is known that it rang."""
    rule = default_rules()[name]
    alarms, rung = listened({name: rule})
    *seen, last = records(rule, CASES[name][0])
    alarms.replay([*seen, last])
    assert alarms.rung == {name}
    alarms.see(last)
    assert [fields for kind, fields in rung if kind == "alarm"] == []


@pytest.mark.parametrize("name", CASES)
def test_an_alarm_rings_at_the_same_record_whether_or_not_the_run_was_resumed(name):
    rule = default_rules()[name]
    alarms, rung = listened({name: rule})
    *seen, last = records(rule, CASES[name][0])
    alarms.replay(seen)
    assert alarms.rung == set()
    alarms.see(last)
    assert [fields["alarm"] for _, fields in rung] == [name] and alarms.rung == {name}
