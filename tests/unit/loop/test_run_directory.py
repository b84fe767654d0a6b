"""A run directory belongs to one process, and a run that is continued stays the experiment it was."""

import json
import os
import subprocess
import sys
from copy import deepcopy

import pytest
from omegaconf import OmegaConf

from rlpipe.config.run import Config, Resume
from rlpipe.loop.run_directory import held, keep_settings, settings_changed

pytestmark = pytest.mark.unit


DEFAULTS = OmegaConf.structured(Config)


def composed(**overrides):
    config = deepcopy(DEFAULTS)
    for name, value in overrides.items():
        OmegaConf.update(config, name.replace("__", "."), value)
    return OmegaConf.to_yaml(config)


@pytest.fixture
def run_dir(tmp_path):
    keep_settings(tmp_path, composed())
    return tmp_path


def test_a_second_process_is_refused_and_told_who_works_there(tmp_path):
    source = "import sys; from pathlib import Path; from rlpipe.loop.run_directory import held\n"
    second = [sys.executable, "-c", source + f"with held(Path({str(tmp_path)!r})): pass"]
    with held(tmp_path):
        result = subprocess.run(second, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"is in use by process {os.getpid()} on " in result.stderr and "choose another" in result.stderr
    assert subprocess.run(second).returncode == 0  # it was given back


def test_a_process_that_was_killed_holds_nothing(tmp_path):
    killed = (
        "import os; from pathlib import Path; from rlpipe.loop.run_directory import held\n"
        f"with held(Path({str(tmp_path)!r})): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -9
    assert json.loads((tmp_path / "lock").read_text())["pid"]
    with held(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("recipe", "agent_rl", "recipe:  -> agent_rl"),
        ("run__seed", 1, "run.seed: 0 -> 1"),
        ("model__path", "other", "model.path: shipped:models/tiny -> other"),
        ("trainer__lr", 0.5, "trainer.lr: 1e-05 -> 0.5"),
        ("algo__advantage", "rloo", "algo.advantage: grpo -> rloo"),
        ("env__tools__names", ["search"], "env.tools.names"),
    ],
)
def test_another_experiment_is_refused_unless_it_is_wanted(run_dir, setting, value, shown):
    other = composed(**{setting: value})
    with pytest.raises(ValueError, match=r"run\.resume=anyway") as refusal:
        settings_changed(run_dir, other, step=4, resume=Resume.AUTO)
    assert shown in str(refusal.value) and "step 4" in str(refusal.value)
    (changed,) = settings_changed(run_dir, other, step=4, resume=Resume.ANYWAY)
    assert changed == setting.replace("__", ".")
    assert settings_changed(run_dir, other, step=None, resume=Resume.AUTO) == {}  # no checkpoint: it begins


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("run__steps", 99),
        ("run__dir", "elsewhere"),
        ("val__every", 3),
        ("cluster__hang_s", 60.0),
        ("rollout__sglang__health_timeout", 9.0),
        ("trainer__dp", 2),
        ("metrics__rollouts_per_step", 0),
    ],
)
def test_how_far_where_and_what_is_watched_may_change(run_dir, setting, value):
    assert settings_changed(run_dir, composed(**{setting: value}), step=4, resume=Resume.AUTO) == {}


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("spec__gamma", 4, "3 -> 4"),
        ("spec__mode", "target_only", "rejection -> target_only"),
        ("spec__adaptive", True, "False -> True"),
        ("spec__draft_vocab", "checkpoint", " -> checkpoint"),
        ("draft__depths", 4, "3 -> 4"),
    ],
)
def test_what_drafts_losslessly_may_change_and_is_reported(run_dir, setting, value, shown):
    name = setting.replace("__", ".")
    changed = settings_changed(run_dir, composed(**{setting: value}), step=4, resume=Resume.AUTO)
    assert changed == {name: shown}
    with pytest.raises(ValueError, match=r"run\.seed: 0 -> 1") as refusal:
        settings_changed(run_dir, composed(run__seed=1, **{setting: value}), step=4, resume=Resume.AUTO)
    assert name not in str(refusal.value)  # it may stay


def test_depths_and_gamma_of_an_adaptation_are_its_experiment(tmp_path):
    keep_settings(tmp_path, composed(task="mtp_adapt"))
    for change in ({"draft__depths": 4}, {"spec__gamma": 4}):
        with pytest.raises(ValueError, match="3 -> 4"):
            settings_changed(tmp_path, composed(task="mtp_adapt", **change), step=4, resume=Resume.AUTO)


def test_another_drafter_is_another_experiment(run_dir):
    other = composed(spec__drafter="eagle3", spec__draft_path="draft")
    with pytest.raises(ValueError, match=r"spec\.drafter: mtp -> eagle3"):
        settings_changed(run_dir, other, step=4, resume=Resume.AUTO)


def test_more_steps_are_another_experiment_where_the_learning_rate_ends_with_them(tmp_path):
    keep_settings(tmp_path, composed(trainer__lr_schedule="cosine"))
    with pytest.raises(ValueError, match=r"run\.steps: 40 -> 99"):
        settings_changed(
            tmp_path, composed(trainer__lr_schedule="cosine", run__steps=99), step=4, resume=Resume.AUTO
        )


@pytest.mark.parametrize("damage", ["missing", "broken", "empty"])
def test_a_run_without_its_config_is_compared_with_the_last_one_kept_and_refused_without_any(run_dir, damage):
    def break_(file):
        file.unlink() if damage == "missing" else file.write_text("a: [" if damage == "broken" else "")

    break_(run_dir / "config.yaml")
    assert settings_changed(run_dir, composed(), step=3, resume=Resume.AUTO) == {}
    with pytest.raises(ValueError, match=r"run\.seed: 0 -> 1"):
        settings_changed(run_dir, composed(run__seed=1), step=3, resume=Resume.AUTO)

    break_(run_dir / "configs" / "0.yaml")
    with pytest.raises(
        ValueError, match=r"neither config\.yaml nor configs/ there can be read.*resume=anyway"
    ):
        settings_changed(run_dir, composed(), step=3, resume=Resume.AUTO)
    assert settings_changed(run_dir, composed(), step=3, resume=Resume.ANYWAY) == {}
    assert settings_changed(run_dir, composed(), step=None, resume=Resume.AUTO) == {}


def test_settings_of_another_version_are_no_difference(run_dir):
    older = "\n".join(line for line in composed().splitlines() if "interval" not in line)
    (run_dir / "config.yaml").write_text(older + "\nwarm: 1\n")
    assert settings_changed(run_dir, composed(), step=4, resume=Resume.AUTO) == {}


def test_a_run_of_before_a_section_was_renamed_continues_with_the_same_values_alone(run_dir):
    old = composed().replace("\ndraft:\n", "\nmtp:\n")
    assert "\nmtp:\n" in old
    (run_dir / "config.yaml").write_text(old)
    assert settings_changed(run_dir, composed(), step=4, resume=Resume.AUTO) == {}
    with pytest.raises(ValueError, match=r"draft\.lr: 0\.0001 -> 0\.5"):
        settings_changed(run_dir, composed(draft__lr=0.5), step=4, resume=Resume.AUTO)


def test_every_configuration_is_kept(run_dir):
    keep_settings(run_dir, composed(run__steps=99))
    first, second = sorted((run_dir / "configs").iterdir())
    assert "steps: 40" in first.read_text() and "steps: 99" in second.read_text()
    assert (run_dir / "config.yaml").read_text() == second.read_text()


@pytest.mark.parametrize(("setting", "value"), [("rank", 16), ("rank", 0), ("targets", "MLP")])
def test_adapters_of_another_shape_are_refused_whatever_is_wanted(run_dir, setting, value):
    keep_settings(run_dir, composed(trainer__lora__rank=8))
    other = composed(**{"trainer__lora__rank": 8, f"trainer__lora__{setting}": value})
    for resume in (Resume.AUTO, Resume.ANYWAY):
        with pytest.raises(ValueError, match=rf"trainer\.lora\.{setting}: .* -> ") as refusal:
            settings_changed(run_dir, other, step=4, resume=resume)
        assert f"model.path={run_dir}/checkpoints/step_4/hf and another run.dir" in str(refusal.value)
    assert settings_changed(
        run_dir, composed(trainer__lora__rank=8, trainer__lora__alpha=4.0), step=4, resume=Resume.ANYWAY
    )
