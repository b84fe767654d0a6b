"""Dumps of batches: what is written is read back, and what does not fit a run is refused by name."""

import json
import shutil
from dataclasses import replace

import pytest

from rlpipe.config.algo import AlgoConfig, Correction
from rlpipe.config.injection import InjectionConfig
from rlpipe.config.paths import resolve
from rlpipe.config.pipeline import PipelineConfig, Stale
from rlpipe.config.run import Config, ModelConfig, RunSettings, Task, for_run_mode
from rlpipe.config.run_mode import RunMode
from rlpipe.loop.dump import Dump, DumpedPrompts
from rlpipe.preflight.settings import check_run_mode
from tests.helpers.trajectories import make_groups

pytestmark = pytest.mark.unit


def settings(tmp_path, *, steps=2, **own):
    return Config(
        run=RunSettings(dir=str(tmp_path / "run"), steps=steps),
        pipeline=PipelineConfig(prompts_per_step=2, group_size=3),
        **own,
    )


def batches(steps):
    return [make_groups(seed=step, groups=2, siblings=3) for step in range(steps)]


def made(tmp_path, config=None, steps=2):
    dump = Dump.create(tmp_path / "dump", config or settings(tmp_path), 0)
    for number, groups in enumerate(batches(steps), 1):
        dump.write(number, groups)
    return dump


def test_groups_come_back_as_they_were_in_the_order_of_training(tmp_path):
    made(tmp_path).trained(2, {"actor/pg_loss": 0.1 + 0.2})
    dump = Dump.open(tmp_path / "dump", settings(tmp_path))
    expected = [group for groups in batches(2) for group in groups]
    assert [dump.group(n) for n in range(4)] == expected
    prompts = DumpedPrompts(dump)
    assert [prompts[n].group_id for n in range(4)] == [group.prompt.group_id for group in expected]
    assert prompts[3].trajectory_ids(99) == [t.trajectory_id for t in expected[3].trajectories]
    assert dump.metrics(1) is None and dump.metrics(2) == {"actor/pg_loss": 0.1 + 0.2}


def test_a_step_that_was_not_written_whole_does_not_count(tmp_path):
    dump = made(tmp_path, steps=3)
    assert dump.steps() == 3
    (tmp_path / "dump" / "step_000002.json").unlink()
    assert dump.steps() == 1


def test_a_run_that_goes_on_forgets_what_it_will_write_again(tmp_path):
    made(tmp_path, steps=3)
    longer = settings(tmp_path, steps=9)
    assert Dump.create(tmp_path / "dump", longer, 1).steps() == 1
    assert sorted(f.name for f in (tmp_path / "dump").glob("step_*")) == [
        "step_000001.json",
        "step_000001.jsonl.gz",
    ]


def test_the_dump_of_another_run_is_not_written_over(tmp_path):
    made(tmp_path)
    other = settings(tmp_path)
    other.run.dir = str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"the dump of another run \(it differs in run\)"):
        Dump.create(tmp_path / "dump", other, 0)
    assert Dump.open(tmp_path / "dump", settings(tmp_path)).steps() == 2


def test_a_folder_without_a_dump_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no dump .*run\.half=rollout"):
        Dump.open(tmp_path, settings(tmp_path))


@pytest.mark.parametrize(
    ("file", "what"), [("tokenizer.json", "another tokenizer"), ("model.safetensors", "another model")]
)
def test_the_dump_of_another_model_is_refused(tmp_path, file, what):
    made(tmp_path)
    model = tmp_path / "model"
    shutil.copytree(resolve("shipped:models/tiny"), model)
    with (model / file).open("ab") as opened:
        opened.write(b" ")
    config = settings(tmp_path, model=ModelConfig(path=str(model)))
    with pytest.raises(ValueError, match=rf"{what} than model\.path=.*{file}"):
        Dump.open(tmp_path / "dump", config)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"pipeline": PipelineConfig(prompts_per_step=2, group_size=4)}, "set pipeline.group_size=3"),
        ({"pipeline": PipelineConfig(prompts_per_step=3, group_size=3)}, "set pipeline.prompts_per_step=2"),
        ({"algo": AlgoConfig(correction=Correction.OBRS)}, "holds 0 candidates for each token"),
    ],
)
def test_sizes_that_do_not_fit_are_said_with_the_remedy(tmp_path, own, message):
    made(tmp_path)
    with pytest.raises(ValueError, match=message):
        Dump.open(tmp_path / "dump", replace(settings(tmp_path), **own))


def test_more_steps_than_the_dump_holds_are_refused(tmp_path):
    made(tmp_path)
    with pytest.raises(ValueError, match=r"holds 2 steps: set run\.steps=2 or less, not 3"):
        Dump.open(tmp_path / "dump", settings(tmp_path, steps=3))


def test_a_dump_of_another_format_is_refused_and_one_of_the_format_before_is_read(tmp_path):
    made(tmp_path)
    file = tmp_path / "dump" / "dump.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 1}))
    assert Dump.open(tmp_path / "dump", settings(tmp_path)).steps() == 2
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 0}))
    with pytest.raises(ValueError, match="has format 0, this version reads 1 and 2"):
        Dump.open(tmp_path / "dump", settings(tmp_path))


def test_settings_of_the_trainer_that_changed_are_named(tmp_path):
    dump = made(tmp_path)
    config = settings(tmp_path)
    assert dump.settings_changed(config) == []
    config.trainer.lr *= 2
    config.run.seed = 5
    assert dump.settings_changed(config) == ["run.seed", "trainer.lr"]


def test_half_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"run\.dump is empty"):
        RunSettings(half=RunMode.TRAIN)
    stale = Config(run=RunSettings(half=RunMode.ROLLOUT), pipeline=PipelineConfig(stale=Stale.DROP))
    with pytest.raises(ValueError, match=r"pipeline\.stale=wait"):
        check_run_mode(stale)
    with pytest.raises(ValueError, match="task=rl"):
        check_run_mode(Config(task=Task.MTP_ADAPT, run=RunSettings(half=RunMode.ROLLOUT)))


def test_a_half_does_without_what_needs_the_other():
    selecting = PipelineConfig(stale=Stale.DROP, oversample=1.5, filter_equal_rewards=True)
    injected = InjectionConfig(slow_env_share=0.5, slow_env_seconds=1)
    train = for_run_mode(
        Config(run=RunSettings(half=RunMode.TRAIN, dump="d"), pipeline=selecting, injection=injected)
    )
    assert (train.pipeline.stale, train.pipeline.oversample, train.val.every) == (Stale.WAIT, 1, 0)
    assert not train.pipeline.filter_equal_rewards and not train.injection.active()
    rollout = for_run_mode(Config(run=RunSettings(half=RunMode.ROLLOUT), injection=injected))
    assert rollout.metrics.probe.every == rollout.val.every == 0 and rollout.injection.active()
    both = Config(pipeline=selecting)
    assert for_run_mode(both) is both
