"""The probe: which contexts, when, what is written, and that its figures mean what they say."""

import asyncio
import itertools

import numpy as np
import pytest

from rlpipe.config.probe import ProbeConfig
from rlpipe.config.run import Config, RunSettings
from rlpipe.config.spec import SpecConfig
from rlpipe.diagnosis.monitor import Monitor
from rlpipe.diagnosis.probe import (
    Probe,
    ProbeTable,
    predicted_lengths,
    read_probes,
    staleness_metrics,
    table_metrics,
    verified,
    within,
)
from rlpipe.drafts.tables import guesses_of, lookup_table
from rlpipe.metrics.names import declared
from rlpipe.types import TrajectoryStatus
from tests.helpers.recorded_runs import distributions, recorded_trajectory, recorder, tables_of, verify
from tests.helpers.trajectories import make_groups

pytestmark = pytest.mark.unit
RULES = ("rejection", "target_only")


def recorder_event(kind, **fields):
    """Nothing may fail."""
    assert kind != "recording_off", fields


def enumerated_length(p, q, rule):
    """1 + sum_j Pr(num_accepted >= j) for one chain with independent depths: alphas multiply."""
    best = q.argmax(-1)
    alpha = np.minimum(p, q).sum(-1) if rule == "rejection" else np.take_along_axis(p, best[:, None], 1)[:, 0]
    return 1 + np.cumprod(alpha).sum()


@pytest.mark.parametrize("rule", RULES)
def test_the_predicted_length_is_exact_in_expectation_over_the_targets_tokens(rule):
    rng = np.random.default_rng(0)
    p, q = (distributions(rng, 1, 3, vocab=3) for _ in range(2))
    total = 0.0
    for tokens in itertools.product(range(3), repeat=3):
        weight = np.prod([p[0, k, token] for k, token in enumerate(tokens)])
        table = tables_of(p, q, np.array([tokens]))
        total += weight * predicted_lengths([table])[rule][0]
    assert total == pytest.approx(enumerated_length(p[0], q[0], rule), abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_without_staleness_the_engine_keeps_what_the_newest_version_would(rule):
    rng = np.random.default_rng(1)
    p, q = distributions(rng, 4000, 3), distributions(rng, 4000, 3)
    tokens, steps = verify(rng, p, q, rule)
    tables = [tables_of(p, q, tokens)]
    lines = verified(tables, {"t": steps}, rule)
    assert len(lines) == sum(min(s.num_accepted + 1, 3) for s in steps)
    lines = lines[lines[:, 1] == 1]
    gap = (lines[:, 2] - lines[:, 3]).mean()
    error = np.sqrt((lines[:, 3] * (1 - lines[:, 3])).sum()) / len(lines)
    assert abs(gap) < 4 * error
    assert staleness_metrics(lines)["probe/staleness"].value() == pytest.approx(gap)


def test_a_version_that_moved_since_shows_as_staleness():
    rng = np.random.default_rng(2)
    p = distributions(rng, 4000, 3)
    stale = 0.5 * p + 0.5 * distributions(rng, 4000, 3)  # the draft that the engine had
    tokens, steps = verify(rng, p, stale, "rejection")
    lines = verified([tables_of(p, p, tokens)], {"t": steps}, "rejection")
    loss = 1 - np.minimum(p, stale).sum(-1)[:, 0].mean()
    assert lines[lines[:, 1] == 1][:, 3].mean() == pytest.approx(1.0)
    assert staleness_metrics(lines)["probe/staleness"].value() == pytest.approx(-loss, abs=0.03)


def test_every_metric_is_declared_and_means_leave_out_what_lies_behind_a_turn():
    rng = np.random.default_rng(3)
    p, q = distributions(rng, 3, 2), distributions(rng, 3, 2)
    table = tables_of(p, q, np.zeros((3, 2), dtype=int))
    for column in table.values.values():
        column[2, 1] = np.nan
    found = table_metrics([table], "probe/fixed")
    for name, value in found.items():
        assert declared(name).kind.accepts(value)
    assert found["probe/fixed/rejection/depth_1"].count == 3
    overlap = np.minimum(p, q).sum(-1)[:2, 1].mean()
    assert found["probe/fixed/rejection/depth_2"].value() == pytest.approx(overlap)
    assert found["probe/fixed/acceptance_length/rejection"].count == 2


def test_contexts_are_bounded_and_come_from_different_prompts_first(tmp_path):
    groups = make_groups(groups=3, siblings=2)
    groups[0].trajectories[0].status = TrajectoryStatus.MASKED
    asked, metrics = measure(make_probe(tmp_path, contexts=40), 1, groups)
    assert [t.trajectory_id for t in asked][:2] == ["g1t0", "g2t0"]
    assert metrics["timing_s/probe"].value() >= 0
    assert sum(t.response_length for t in asked) <= 40


def test_the_set_stays_the_same_for_the_run_and_for_one_that_is_resumed(tmp_path):
    first, _ = measure(make_probe(tmp_path, contexts=20), 1, make_groups(seed=0))
    probe = make_probe(tmp_path, contexts=20)
    second, _ = measure(probe, 11, make_groups(seed=5))
    assert [t.token_ids.tolist() for t in second] == [t.token_ids.tolist() for t in first]
    assert [t.loss_mask.tolist() for t in second] == [t.loss_mask.tolist() for t in first]
    assert [head["step"] for head, _ in read_probes(tmp_path)] == [1, 11]
    probe.remove_after(5)
    assert [head["step"] for head, _ in read_probes(tmp_path)] == [1]
    probe.remove_after(0)
    third, _ = measure(probe, 1, make_groups(seed=5))
    assert third[0].token_ids.tolist() != first[0].token_ids.tolist()


@pytest.mark.parametrize("mode", ["rejection", "block", "target_only"])
@pytest.mark.parametrize("drafter", [{"drafter": "eagle3", "draft_path": "draft"}, {"drafter": "suffix"}, {}])
def test_every_drafter_is_probed_where_acceptance_is_a_probability(tmp_path, drafter, mode):
    """Staleness by the rule that verifies: looked-up drafts are certain in every mode."""
    config = Config(spec=SpecConfig(mode=mode, **drafter))
    rule = Monitor(config, tmp_path, recorder_event)._rule
    assert config.probes_draft
    assert rule == ("target_only" if "suffix" in drafter.values() else {"block": None}.get(mode, mode))
    config.rollout.temperature = 0.0
    assert not config.probes_draft


def test_the_split_of_a_run_with_looked_up_drafts_has_every_part(tmp_path):
    """Fixed contexts are read by the newest weights, and the split tells their change from entropy's."""
    config = Config(spec=SpecConfig(drafter="suffix", gamma=2), run=RunSettings(steps=18))
    config.metrics.probe.every = 3
    monitor, rng = Monitor(config, tmp_path, recorder_event), np.random.default_rng(0)
    drop = 0.0

    async def read(trajectories):
        """The target's entropy and its probability of the guess, which falls by `drop`."""
        tables = []
        for number, trajectory in enumerate(trajectories):
            positions, guesses = guesses_of(
                trajectory, lambda tokens, count, spec: tokens[-count:], config.spec
            )
            entropies = 0.5 + np.random.default_rng(number).random(int(trajectory.loss_mask[1:].sum()))
            logprobs = np.log(0.9 - 0.3 * entropies[:, None] - drop) * np.ones((1, 2))
            table = lookup_table(trajectory, positions, guesses, entropies=entropies, logprobs=logprobs)
            tables.append(ProbeTable(trajectory_id=str(number), positions=table[0], values=table[1]))
        return tables

    for step in range(18):
        groups = make_groups(groups=4, siblings=2, seed=step)
        metrics = asyncio.run(monitor.before_update(step, groups, read))
        assert ("probe/fixed/rejection/depth_1" in metrics) is (step % 3 == 0 or step == 17)
        drop = 0.1 if step > 8 else 0.0
        entropy = 1.0 + 0.02 * rng.standard_normal()
        noise = 0.002 * rng.standard_normal()
        record = {
            "training/global_step": step + 1,
            "rollout/entropy": entropy,
            "spec/acceptance_rate": 0.9 - 0.3 * entropy - drop + noise,
        }
        split = {name: value.value() for name, value in monitor.split(record).items()}
    parts = ("total", "entropy", "mismatch", "contexts")
    assert {f"acceptance_split/{part}" for part in parts} <= split.keys()
    assert split["acceptance_split/mismatch"] == pytest.approx(-0.1, abs=0.01)
    assert split["acceptance_split/mismatch/high"] < 0


def test_what_is_written_is_what_is_read(tmp_path):
    measure(make_probe(tmp_path, contexts=20), 1, make_groups())
    [(head, tables)] = read_probes(tmp_path)
    assert head["fixed"] == len(tables) and head["version"] == 0
    again = ProbeTable.from_json(tables[0].to_json())
    np.testing.assert_array_equal(again.values["rejection"], tables[0].values["rejection"])
    assert np.isnan(tables[0].values["rejection"][-1, -1])


@pytest.mark.parametrize(
    ("every", "steps"), [(4, [1, 5, 9, 10]), (1, list(range(1, 11))), (0, []), (100, [1, 10])]
)
def test_probes_are_due_at_the_first_every_nth_and_last_step(tmp_path, every, steps):
    probe = Probe(ProbeConfig(every=every), tmp_path, last_step=10, recorder=recorder())
    assert [step for step in range(1, 11) if probe.due(step)] == steps


def test_three_trajectories_are_kept_even_if_they_are_too_long():
    some = [t for t in make_groups()[0].trajectories if t.response_length > 1]
    assert within(some, 2) == some[:3]
    assert len(some) > 3


def make_probe(directory, **config):
    return Probe(ProbeConfig(**config), directory, last_step=10, recorder=recorder())


def measure(probe, step, groups):
    """Probe with a trainer that says the same of every context; returns what it was asked about."""
    asked = []

    async def read(trajectories):
        asked.extend(trajectories)
        tables = []
        for t in trajectories:
            p = np.full((t.response_length, 2, 3), 1 / 3)
            table = tables_of(p, p, np.zeros(p.shape[:2], dtype=int), t.trajectory_id)
            for column in table.values.values():
                column[-1, -1] = np.nan
            tables.append(table)
        return tables

    metrics = asyncio.run(
        probe.measure(step, groups, visited=[], version=step - 1, read=read, rule="rejection")
    )
    return asked, metrics


def test_recorded_rollouts_are_read_besides_and_judged(tmp_path):
    rng = np.random.default_rng(4)
    p, q = distributions(rng, 30, 3), distributions(rng, 30, 3)
    tokens, steps = verify(rng, p, q, "rejection")
    visited = recorded_trajectory(steps, 3)

    async def read(trajectories):
        return [
            tables_of(p, q, tokens, t.trajectory_id) if t is visited else tables_of(p, q, tokens, "other")
            for t in trajectories
        ]

    probe = make_probe(tmp_path, contexts=200)
    found = asyncio.run(
        probe.measure(1, make_groups(), visited=[visited], version=0, read=read, rule="rejection")
    )
    kept = sum(s.num_accepted > 0 for s in steps) / len(steps)
    assert found["probe/visited/observed_rate"].value() == pytest.approx(kept)


def test_a_draft_trained_online_is_read_on_contexts_that_are_held_out(tmp_path):
    probe = make_probe(tmp_path, contexts=20)
    held_out = within([t for g in make_groups(seed=8) for t in g.trajectories], 20)
    probe.hold_out(held_out, 0)
    probe.hold_out(make_groups(seed=9)[0].trajectories, 20)  # a later validation: the set stays
    asked, metrics = measure(probe, 1, make_groups(seed=0))
    fixed = len(read_probes(tmp_path)[0][1])
    assert [t.token_ids.tolist() for t in asked[fixed:]] == [t.token_ids.tolist() for t in held_out]
    assert metrics["probe/held_out/acceptance_length/rejection"].count == sum(
        t.response_length - 1 for t in held_out
    )
    resumed, _ = measure(make_probe(tmp_path, contexts=20), 6, make_groups(seed=1))
    assert [t.token_ids.tolist() for t in resumed] == [t.token_ids.tolist() for t in asked]
