"""The file of rollouts: nothing is sampled twice, nothing of another model is taken."""

import json

import numpy as np
import pytest

from rlpipe.adapt import rollouts
from rlpipe.adapt.rollouts import backbone_digest, complete_rollouts, origin, read, write
from rlpipe.config.adapt import AdaptConfig
from rlpipe.config.env import EnvConfig, ToolsConfig
from rlpipe.config.paths import resolve
from rlpipe.config.run import Config
from rlpipe.models.checkpoint import MTP_PREFIX, read_weights, write_checkpoint
from rlpipe.types import Group, TrajectoryStatus
from tests.helpers.trajectories import make_trajectory

pytestmark = pytest.mark.unit


class Suite:
    def instance_ids(self, split):
        return [f"{split}{i}" for i in range(9)]


@pytest.fixture
def played(monkeypatch):
    """Stands in for the engine: prompts end in reverse order; every fifth trajectory is masked."""
    asked = []

    def collect(config, suite, prompts, *, on_group, stopped, on_event):
        asked.append([prompt.group_id for prompt in prompts])
        for prompt in reversed(prompts):
            if stopped():
                return
            rng = np.random.default_rng(prompt.seed % 1000)
            group = [make_trajectory(rng, name=f"{prompt.group_id}/{i}") for i in range(2)]
            if int(prompt.group_id[1:]) % 5 == 4:
                group[0].status = TrajectoryStatus.MASKED
            on_group(Group(prompt=prompt, trajectories=group))

    monkeypatch.setattr(rollouts, "collect", collect)
    return asked


def config(prompts=6, **changes):
    made = Config(adapt=AdaptConfig(prompts=prompts, samples=2))
    for name, value in changes.items():
        setattr(made.rollout, name, value)
    return made


def names(trajectories):
    return [t.trajectory_id for t in trajectories]


def test_rollouts_are_sampled_once_and_come_back_in_prompt_order(tmp_path, played):
    file = tmp_path / "r.jsonl"
    first = complete_rollouts(config(), Suite(), file, stopped=lambda: False, on_event=print)
    assert names(first) == sorted(names(first)) and len(first) == 11  # one was masked
    assert complete_rollouts(config(), Suite(), file, stopped=lambda: False, on_event=print) == first
    assert complete_rollouts(config(8), Suite(), file, stopped=lambda: False, on_event=print)[:11] == first
    assert [len(batch) for batch in played] == [6, 2]


def test_a_prompt_cut_short_is_played_again(tmp_path, played):
    file = tmp_path / "r.jsonl"
    whole = complete_rollouts(config(), Suite(), file, stopped=lambda: False, on_event=print)
    text = file.read_text()
    file.write_text(text[: len(text) - 40])  # in the middle of the last line: prompt 0
    assert complete_rollouts(config(), Suite(), file, stopped=lambda: False, on_event=print) == whole
    assert played[1] == ["g000000"]
    assert sorted(file.read_text().splitlines()) == sorted(text.splitlines())


def test_after_a_stop_nothing_more_is_played(tmp_path, played):
    calls = iter([False, False, True])
    complete_rollouts(config(), Suite(), tmp_path / "r.jsonl", stopped=lambda: next(calls), on_event=print)
    complete_rollouts(config(), Suite(), tmp_path / "r.jsonl", stopped=lambda: False, on_event=print)
    assert [len(batch) for batch in played] == [6, 4]


def test_rollouts_of_something_else_are_refused(tmp_path, played):
    file = tmp_path / "r.jsonl"
    complete_rollouts(config(), Suite(), file, stopped=lambda: False, on_event=print)
    with pytest.raises(ValueError, match=r"temperature differ.*delete the file"):
        complete_rollouts(config(temperature=0.5), Suite(), file, stopped=lambda: False, on_event=print)


@pytest.mark.parametrize(
    ("env", "setting"),
    [
        ({"suite": "user:first"}, "suite"),
        ({"suite": "user:suite", "options": {"tasks": ["max"]}}, "options"),
        (
            {"suite": "user:suite", "options": {"tasks": ["chat"]}, "system_prompt": "Be brief."},
            "system_prompt",
        ),
    ],
)
def test_rollouts_of_another_suite_or_of_other_options_are_refused(tmp_path, played, env, setting):
    file = tmp_path / "r.jsonl"
    before = config()
    before.env = EnvConfig(suite="user:suite", options={"tasks": ["chat"]})
    complete_rollouts(before, Suite(), file, stopped=lambda: False, on_event=print)

    after = config()
    after.env = EnvConfig(**env)
    with pytest.raises(ValueError, match=rf"env\.{setting}"):
        complete_rollouts(after, Suite(), file, stopped=lambda: False, on_event=print)
    assert len(played) == 1


def test_held_out_sets_and_threads_do_not_decide_rollouts():
    same = config()
    same.env = EnvConfig(threads=7, held_out_files=["other.jsonl"], tools=ToolsConfig(max_calls=1))
    assert origin(same) == origin(config())


def test_a_file_that_does_not_record_all_is_refused_until_its_first_line_is_replaced(tmp_path, played):
    file = tmp_path / "r.jsonl"
    first = complete_rollouts(config(), Suite(), file, stopped=lambda: False, on_event=print)
    header, *lines = file.read_text().splitlines()
    earlier = {name: value for name, value in json.loads(header).items() if not name.startswith("env.")}
    file.write_text("\n".join([json.dumps(earlier), *lines]) + "\n")
    with pytest.raises(ValueError, match=r"env\.suite") as refused:
        complete_rollouts(config(), Suite(), file, stopped=lambda: False, on_event=print)

    file.write_text("\n".join([str(refused.value).splitlines()[-1], *lines]) + "\n")
    assert complete_rollouts(config(), Suite(), file, stopped=lambda: False, on_event=print) == first
    assert len(played) == 1


def test_a_trajectory_survives_the_file():
    trajectory = make_trajectory(np.random.default_rng(0), turns=(4, 3))
    line = write(3, trajectory)
    again = read(line)
    assert write(3, again) == line
    assert (again.token_ids.tolist(), again.loss_mask.tolist()) == (
        trajectory.token_ids.tolist(),
        trajectory.loss_mask.tolist(),
    )
    assert again.rollout_logprobs.tolist() == pytest.approx(trajectory.rollout_logprobs.tolist(), abs=1e-6)


def test_rollouts_belong_to_the_backbone_not_to_its_draft(tmp_path):
    tiny = resolve("shipped:models/tiny")
    weights = read_weights(tiny)
    digests = [backbone_digest(tiny)]
    for name in (MTP_PREFIX + "final_layernorm.weight", "model.norm.weight"):
        changed = weights | {name: weights[name] + 1e-3}
        write_checkpoint(tmp_path / name, changed, tiny)
        digests.append(backbone_digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]
