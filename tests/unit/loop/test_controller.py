"""The loop against a scripted cluster: order, staleness, stop, resume."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from rlpipe.config.draft import DraftTrain
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.run import Config, RunSettings, ValConfig
from rlpipe.diagnosis.acceptance_split import of_run
from rlpipe.loop.checkpoints import CheckpointStore
from rlpipe.loop.controller import Controller
from rlpipe.loop.ledger import Ledger
from rlpipe.loop.prompts import PromptStream
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.jsonl import MetricsFile
from rlpipe.metrics.prometheus import PrometheusSink
from rlpipe.metrics.runs import load_run
from rlpipe.metrics.tensorboard import TensorBoardSink
from rlpipe.metrics.values import Last, Mean, Ratio
from rlpipe.types import Group, Trajectory
from tests.helpers.recorded_runs import distributions, tables_of
from tests.helpers.tensorboard_file import read_events

pytestmark = pytest.mark.unit


class ScriptedCluster:
    """Groups finish after a number of event-loop turns; tokens carry the version served at their start."""

    def __init__(self, delays=lambda index: 0):
        self.delays = delays
        self.served = 0
        self.batches: list[list[str]] = []
        self.staleness: list[int] = []
        self.published: list[int] = []
        self.frozen_at: list[int] = []
        self.on_step = lambda: None

    async def collect(self, prompt, group_size):
        version = self.served
        for _ in range(self.delays(int(prompt.group_id[1:]))):
            await asyncio.sleep(0)
        members = [
            Trajectory(
                trajectory_id=f"{prompt.group_id}/{k}",
                group_id=prompt.group_id,
                instance_id=prompt.instance_id,
                token_ids=[1, 2],
                loss_mask=[0, 1],
                rollout_logprobs=[0.0, -1.0],
                entropies=[0.0, 1.0],
                versions=[-1, version],
                num_turns=1,
                reward=float(k % 2),
            )
            for k in range(group_size)
        ]
        return Group(prompt=prompt, trajectories=members)

    async def evaluate(self, instance_ids, samples, temperature):
        return []

    async def train_step(self, groups):
        self.batches.append([g.prompt.group_id for g in groups])
        self.staleness += [
            len(self.batches) - 1 + self.first - t.oldest_version for g in groups for t in g.trajectories
        ]
        self.on_step()
        await asyncio.sleep(0)
        return {}

    first = 0

    async def publish_weights(self, version):
        async def send():
            self.served = version
            self.published.append(version)
            return {}

        return send

    async def save(self, directory):
        trained = str(self.first + len(self.batches))

        async def write():
            (directory / "weights").write_text(trained)

        return write

    async def load(self, directory):
        self.first = int((directory / "weights").read_text())

    async def rollout_metrics(self):
        return {}

    async def probe(self, trajectories):
        return []

    async def freeze_draft(self):
        self.frozen_at.append(len(self.batches) + self.first)


def controller(tmp_path, cluster, *, steps=6, max_staleness=1, save_every=0, **pipeline):
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    config = Config(
        run=RunSettings(dir=str(tmp_path), steps=steps, save_every=save_every),
        pipeline=PipelineConfig(prompts_per_step=3, group_size=2, max_staleness=max_staleness, **pipeline),
        val=ValConfig(every=0),
    )
    return Controller(
        config=config,
        run_dir=tmp_path,
        cluster=cluster,
        prompts=PromptStream([f"i{n}" for n in range(100)], seed=0),
        held_out={},
        bus=MetricsBus([], events=tmp_path / "events.jsonl"),
        ledger=Ledger(tmp_path / "ledger.sqlite"),
        checkpoints=CheckpointStore(tmp_path / "checkpoints", keep=2),
    )


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_group_is_trained_once_in_order_and_never_staler_than_allowed(tmp_path, max_staleness):
    cluster = ScriptedCluster(delays=lambda index: (index * 7) % 11)
    run = controller(tmp_path, cluster, max_staleness=max_staleness)
    asyncio.run(run.run())
    trained = [name for batch in cluster.batches for name in batch]
    assert trained == [f"g{n:06d}" for n in range(18)]
    assert max(cluster.staleness) <= max_staleness
    assert max_staleness == 0 or max(cluster.staleness) > 0, "rollout never ran ahead: the loop is not async"
    assert cluster.published == list(range(1, 7))
    assert run.ledger.counts() == {"trained": 18}
    assert run.checkpoints.steps() == [6]


class SlowTransport(ScriptedCluster):
    """Weights are copied at once, and arrive when `arrives` of their version says so; notes the order.

    `weights` is what the trainer changes in place in each step.
    """

    def __init__(self, arrives):
        super().__init__()
        self.arrives, self.order, self.weights, self.received = arrives, [], [0], {}

    async def train_step(self, groups):
        self.weights[0] += 1
        self.order.append(f"train {self.weights[0]}")
        return await super().train_step(groups)

    async def publish_weights(self, version):
        send, copied = await super().publish_weights(version), list(self.weights)
        self.order.append(f"copy {version}")

        async def slowly():
            await self.arrives(self, version)
            self.received[version] = copied
            self.order.append(f"arrive {version}")
            return await send() | {"weights/bytes": Last(version)}

        return slowly


async def after_the_next_step(cluster, version):
    async with asyncio.timeout(10):
        while len(cluster.batches) + cluster.first < min(version + 1, 6):
            await asyncio.sleep(0)


@pytest.mark.parametrize("stale", ["wait", "drop"])
def test_a_step_trains_while_the_weights_of_the_step_before_travel(tmp_path, stale):
    """Each version arrives only when the next step has trained, and is what the step before had left."""
    cluster = SlowTransport(after_the_next_step)
    run = controller(tmp_path, cluster, max_staleness=2, stale=stale)
    records, commit = [], run.bus.commit
    run.bus.commit = lambda step: records.append(commit(step)) or records[-1]
    asyncio.run(run.run())
    versions = range(1, 7)
    expected = ["train 1", *(e for n in versions for e in (f"copy {n}", f"train {n + 1}", f"arrive {n}"))]
    expected.remove("train 7")
    assert cluster.order == expected
    assert cluster.received == {n: [n] for n in versions}, "a version was changed by the step after it"
    assert max(cluster.staleness) <= 2 and cluster.published == list(versions)

    # A version is reported in the step in which it arrives, the last two in the last one.
    assert all("timing_s/wait_weights" in record for record in records[1:])
    assert [record.get("weights/bytes") for record in records[1:]] == [None, 1, 2, 3, 4, 6]


def test_without_staleness_a_step_waits_for_the_weights_it_generates_with(tmp_path):
    async def later(cluster, version):
        await asyncio.sleep(0.001)

    cluster = SlowTransport(later)
    asyncio.run(controller(tmp_path, cluster, max_staleness=0).run())
    assert cluster.order == [f"{what} {n}" for n in range(1, 7) for what in ("train", "copy", "arrive")]
    assert set(cluster.staleness) == {0}


def test_weights_that_do_not_arrive_end_the_run_before_the_next_ones_leave_and_lose_nothing(tmp_path):
    async def breaks_at_3(cluster, version):
        await after_the_next_step(cluster, version)
        if version == 3:
            raise RuntimeError("the network is gone")

    first = SlowTransport(breaks_at_3)
    broken = controller(tmp_path, first, save_every=1)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(broken.run())
    assert caught.group_contains(RuntimeError, match="the network is gone")
    assert first.published == [1, 2] and "copy 4" not in first.order
    broken.ledger.close()

    second = ScriptedCluster()
    resumed = controller(tmp_path, second, save_every=1)
    asyncio.run(resumed.run())
    saved = second.first
    trained = [name for batch in first.batches[:saved] + second.batches for name in batch]
    assert saved >= 2 and trained == [f"g{n:06d}" for n in range(18)]
    assert resumed.ledger.counts() == {"trained": 18}


def test_a_stop_request_finishes_the_step_and_leaves_a_checkpoint_that_resumes(tmp_path):
    first = ScriptedCluster()
    run = controller(tmp_path, first)
    first.on_step = lambda: len(first.batches) == 2 and run.request_stop()
    asyncio.run(run.run())
    assert len(first.batches) == 2 and run.checkpoints.steps() == [2]
    assert run.ledger.counts()["trained"] == 6
    run.ledger.close()

    second = ScriptedCluster()
    second.served = 2
    resumed = controller(tmp_path, second)
    asyncio.run(resumed.run())
    trained = [name for batch in first.batches + second.batches for name in batch]
    assert trained == [f"g{n:06d}" for n in range(18)]
    assert resumed.ledger.counts() == {"trained": 18}
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert "resumed" in kinds


def test_an_error_while_collecting_ends_the_run_instead_of_hanging_it(tmp_path):
    cluster = ScriptedCluster()

    async def broken(prompt, group_size):
        raise RuntimeError("engine died")

    cluster.collect = broken
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(asyncio.wait_for(controller(tmp_path, cluster).run(), 5))
    assert caught.group_contains(RuntimeError, match="engine died")


def test_a_full_disk_loses_the_readable_trajectories_and_not_the_run(tmp_path):
    """/dev/full answers every write with ENOSPC."""
    (tmp_path / "trajectories.jsonl").symlink_to("/dev/full")
    play = controller(tmp_path, ScriptedCluster(), steps=2)
    asyncio.run(play.run())
    play.bus.close()
    events = (tmp_path / "events.jsonl").read_text()
    assert play.version == 2 and events.count('"kind": "disk_full"') == 1


def events(tmp_path, kind):
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_a_checkpoint_that_cannot_be_written_is_said_and_the_run_goes_on(tmp_path):
    cluster = ScriptedCluster()
    written = cluster.save

    async def full_at_first(directory):
        (directory / "weights").write_text("half")
        if len(cluster.batches) < 4:
            raise OSError(28, "No space left on device")
        return await written(directory)

    cluster.save = full_at_first
    run = controller(tmp_path, cluster, save_every=1)
    asyncio.run(run.run())
    run.bus.close()
    assert len(cluster.batches) == 6 and run.checkpoints.steps() == [5, 6]
    failed = events(tmp_path, "checkpoint_failed")
    assert [event["step"] for event in failed] == [1, 2, 3] and "No space" in failed[0]["error"]
    assert {event["newest"] for event in failed} == {None}


def test_steps_go_on_while_a_checkpoint_is_written_and_only_one_is_written_at_a_time(tmp_path):
    """Each write takes as long as two further steps, where there are any."""
    cluster = ScriptedCluster()
    copied = cluster.save
    writing, overlapped, steps_meanwhile = [], [], []

    async def slow(directory):
        write = await copied(directory)
        begun = len(cluster.batches)

        async def slowly():
            overlapped.extend(writing)
            writing.append(directory.name)
            async with asyncio.timeout(60):
                while len(cluster.batches) < min(begun + 2, 6):
                    await asyncio.sleep(0.001)
            steps_meanwhile.append(len(cluster.batches) - begun)
            await write()
            writing.remove(directory.name)

        return slowly

    cluster.save = slow
    run = controller(tmp_path, cluster, save_every=3)
    asyncio.run(run.run())
    run.bus.close()
    assert overlapped == [] and run.checkpoints.steps() == [3, 6]
    assert steps_meanwhile[0] >= 2 and steps_meanwhile[1] == 0
    assert (tmp_path / "checkpoints" / "step_3" / "weights").read_text() == "3", "not of this moment"
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [3, 6]


def test_checkpoints_can_be_written_before_the_next_step(tmp_path):
    cluster = ScriptedCluster()
    copied, steps_meanwhile = cluster.save, []

    async def slow(directory):
        write = await copied(directory)

        async def slowly():
            begun = len(cluster.batches)
            await asyncio.sleep(0.05)
            steps_meanwhile.append(len(cluster.batches) - begun)
            await write()

        return slowly

    cluster.save = slow
    run = controller(tmp_path, cluster, save_every=2)
    run.config.run.save_async = False
    asyncio.run(run.run())
    assert steps_meanwhile == [0, 0, 0]


def test_what_fails_behind_the_steps_leaves_the_checkpoint_before(tmp_path):
    cluster = ScriptedCluster()
    copied = cluster.save

    async def full_at_step_4(directory):
        write = await copied(directory)

        async def fail():
            (directory / "half").write_text("half")
            await asyncio.sleep(0)
            raise OSError(28, "No space left on device")

        return fail if directory.name == "step_4.tmp" else write

    cluster.save = full_at_step_4
    run = controller(tmp_path, cluster, save_every=2)
    asyncio.run(run.run())
    run.bus.close()
    (failed,) = events(tmp_path, "checkpoint_failed")
    assert (failed["step"], failed["newest"]) == (4, 2) and "No space" in failed["error"]
    assert len(cluster.batches) == 6 and run.checkpoints.steps() == [2, 6]
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize(
    ("save_every", "after"), [(0, "begins anew: there is none before it"), (4, "continues after step 4")]
)
def test_a_run_whose_last_checkpoint_cannot_be_written_does_not_end_as_done(tmp_path, save_every, after):
    cluster = ScriptedCluster()
    save = cluster.save

    async def full_at_step_6(directory):
        if directory.name == "step_6.tmp":
            raise OSError(28, "No space left on device")
        return await save(directory)

    cluster.save = full_at_step_6
    with pytest.raises(
        RuntimeError, match=f"checkpoint of step 6 could not be written.*run again, it {after}"
    ):
        asyncio.run(controller(tmp_path, cluster, save_every=save_every).run())


def test_a_checkpoint_that_the_trainer_cannot_load_is_passed_over(tmp_path):
    first = controller(tmp_path, ScriptedCluster(), steps=4, save_every=1)
    asyncio.run(first.run())
    first.ledger.close()
    assert first.checkpoints.steps() == [3, 4]
    cluster = ScriptedCluster()
    cluster.served = 3

    async def load(directory):
        if directory.name == "step_4":
            raise RuntimeError("invalid tensor\nand more")
        cluster.first = 3

    cluster.load = load
    run = controller(tmp_path, cluster, steps=5)
    asyncio.run(run.run())
    run.bus.close()
    assert [name for batch in cluster.batches for name in batch] == [f"g{n:06d}" for n in range(9, 15)]
    (told,) = events(tmp_path, "checkpoint_corrupt")
    assert (told["step"], told["reason"]) == (4, "RuntimeError: invalid tensor")
    assert (tmp_path / "checkpoints" / "step_4.corrupt").is_dir()
    assert run.ledger.violations(ended=True) == []


def test_when_no_checkpoint_can_be_loaded_the_run_stops_and_moves_none(tmp_path):
    asyncio.run(controller(tmp_path, ScriptedCluster(), steps=2, save_every=1).run())
    cluster = ScriptedCluster()

    async def load(directory):
        raise ConnectionError("the trainer is dead")

    cluster.load = load
    run = controller(tmp_path, cluster, steps=3)
    with pytest.raises(RuntimeError, match="step 2: ConnectionError: the trainer is dead"):
        asyncio.run(run.run())
    assert run.checkpoints.steps() == [1, 2]


def test_finished_groups_that_were_not_trained_survive_a_stop(tmp_path):
    """Their tokens are trained as they are; playing them again would give them the version of the resume."""
    first = ScriptedCluster()
    run = controller(tmp_path, first, max_staleness=2)

    def stop_late():
        if len(first.batches) == 2:
            run.request_stop()

    first.on_step = stop_late
    asyncio.run(run.run())
    waiting = run.ledger.counts()["complete"]
    assert waiting >= 3
    run.ledger.close()
    second = ScriptedCluster()
    second.served = 2
    resumed = controller(tmp_path, second, max_staleness=2)
    asyncio.run(resumed.run())
    versions = dict(resumed.ledger._db.execute("SELECT trajectory_id, oldest_version FROM trajectories"))
    assert versions["g000006/0"] < 2 and max(second.staleness) <= 2
    assert resumed.ledger.violations(ended=True) == []


def test_a_draft_that_training_harms_is_trained_no_more_nor_by_a_resumed_run(tmp_path):
    """Its acceptance on held-out contexts, as the trainer tells it, falls at steps 3 and 4."""
    name = "probe/held_out/acceptance_length/rejection"
    lengths = {1: 3.0, 2: 3.1, 3: 2.7, 4: 2.7, 5: 2.7, 6: 2.7}

    class Probed(ScriptedCluster):
        async def train_step(self, groups):
            await super().train_step(groups)
            step = len(self.batches) + self.first
            return {name: Mean(lengths[step], 1)}

    def play(cluster, steps, train):
        run = controller(tmp_path, cluster, steps=steps, save_every=1)
        run.config.draft.train = train
        run.bus = MetricsBus([MetricsFile(tmp_path / "metrics.jsonl")], events=tmp_path / "events.jsonl")
        run.__post_init__()
        asyncio.run(run.run())
        run.bus.close()
        return cluster

    assert play(Probed(), 5, DraftTrain.ONLINE).frozen_at == [4]
    assert play(Probed(), 6, DraftTrain.ONLINE).frozen_at == [5]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "draft_frozen"] == [4, 5]
    assert [e["step"] for e in events if e.get("alarm") == "draft_harmed"] == [4]


def test_a_frozen_draft_is_not_frozen_again(tmp_path):
    name = "probe/held_out/acceptance_length/rejection"

    class Probed(ScriptedCluster):
        async def train_step(self, groups):
            await super().train_step(groups)
            return {name: Mean(4.0 - len(self.batches), 1)}

    cluster = Probed()
    asyncio.run(controller(tmp_path, cluster).run())
    assert cluster.frozen_at == []


class DraftingCluster(ScriptedCluster):
    """Engines whose acceptance falls with the steps, and a probe of contexts whose draft goes stale."""

    async def collect(self, prompt, group_size):
        group = await super().collect(prompt, group_size)
        noise = 0.1 * np.random.default_rng(self.served).standard_normal(3)
        longer = {  # three sampled tokens, the least that a probe takes
            "token_ids": [1, 2, 3, 4],
            "loss_mask": [0, 1, 1, 1],
            "versions": [-1, *3 * [self.served]],
            "rollout_logprobs": [0.0, -1.0, -1.0, -1.0],
            "entropies": [0.0, *(1.0 + noise)],
        }
        return Group(prompt=prompt, trajectories=[replace(t, **longer) for t in group.trajectories])

    async def rollout_metrics(self):
        steps = len(self.batches) + self.first
        kept = 90 - steps + (7 * steps) % 5
        rates = {"": Ratio(2 * kept, 200), "/depth_1": Ratio(kept, 100)}
        return {f"spec/acceptance_rate{depth}": rate for depth, rate in rates.items()}

    async def probe(self, trajectories):
        rng, lost = np.random.default_rng(5), 0.01 * (len(self.batches) + self.first)
        tables = [
            tables_of(p := distributions(rng, 6, 1), p, np.zeros((6, 1), dtype=int), t.trajectory_id)
            for t in trajectories
        ]
        for table in tables:
            table.values["rejection"] = 0.9 - 0.1 * table.values["target_entropy"] - lost
        return tables


def test_the_split_of_acceptance_is_the_same_in_every_sink_and_in_the_report(tmp_path):
    scraped = {}
    for steps in (18, 24):  # the second continues the first
        prometheus = PrometheusSink("127.0.0.1", 0)
        loop = controller(tmp_path, DraftingCluster(), steps=steps, save_every=3)
        boards = TensorBoardSink(tmp_path / f"tensorboard_{steps}")
        sinks = [MetricsFile(tmp_path / "metrics.jsonl"), boards, prometheus]
        loop.bus = MetricsBus(sinks, events=tmp_path / "events.jsonl")
        asyncio.run(loop.run())
        loop.bus.close()
        scraped = {name: value for name, value in prometheus._values.items() if "acceptance_split" in name}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = {r["training/global_step"]: r for r in map(json.loads, lines)}
    tags = {
        (v.tag, e.step): v.simple_value
        for e in read_events(tmp_path / "tensorboard_24")
        for v in e.summary.value
    }
    (tmp_path / "config.yaml").write_text("run: {steps: 18}\n")
    splits = of_run(load_run(tmp_path))
    names = [name for name in records[24] if name.startswith("acceptance_split/")]
    assert "acceptance_split/mismatch/depth_1/high" in names and len(names) >= 24
    assert not [n for n in records[8] if "acceptance_split" in n] and "acceptance_split/total" in records[9]
    for step in range(19, 25):
        for depth, suffix in ((0, ""), (1, "/depth_1")):
            for part, interval in splits.at(depth, step).parts.items():
                name = f"acceptance_split/{part}{suffix}"
                for tag, value in ((name, interval.value), (f"{name}/low", interval.low)):
                    assert records[step][tag] == pytest.approx(value, abs=1e-9), (step, tag)
                    assert tags[tag, step] == pytest.approx(value, abs=1e-6), (step, tag)
    assert scraped == {name: records[24][name] for name in names}
