import gzip
import json
import math

import numpy as np
import pytest

from rlpipe.loop.saved_groups import read_groups, write_groups
from rlpipe.types import DraftStep, Group, Prompt, SpecCounts, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.unit


def test_groups_come_back_exactly_as_they_were(tmp_path):
    full = Trajectory(
        trajectory_id="g7/0",
        group_id="g7",
        instance_id="é",
        token_ids=[5, 6, 7],
        loss_mask=[0, 1, 1],
        rollout_logprobs=[0.0, -1 / 3, -math.pi * 1e-9],
        entropies=[0.0, 0.1 + 0.2, 5e-324],
        versions=[-1, 3, 4],
        top_logprobs=[[], [(6, -0.25), (1, -2.0)], [(7, -0.1)]],
        drafts=[
            DraftStep(
                position=1, tokens=[6, 7], target_probs=[0.5, 0.3], draft_probs=[1.0, 0.2], num_accepted=1
            )
        ],
        routes=np.arange(12, dtype=np.int16).reshape(2, 3, 2),
        prompt_length=1,
        num_turns=2,
        truncated=True,
        reward=1 / 7,
        spec=SpecCounts(drafted=[2, 1], accepted=[1, 0], verify_steps=1, proposed=2),
        info={"exit_reason": "done", "turns": [{"role": "user", "text": "a\nb"}], "retries": 1},
    )
    masked = Trajectory(trajectory_id="g7/1", group_id="g7", instance_id="é", status=TrajectoryStatus.MASKED)
    prompt = Prompt(instance_id="é", group_id="g7", seed=2**48 - 1)
    groups = [(7, Group(prompt=prompt, trajectories=[full, masked], gen_seconds=0.1, env_seconds=1e-7))]
    write_groups(tmp_path / "groups.jsonl.gz", groups)
    assert read_groups(tmp_path / "groups.jsonl.gz") == groups
    (restored,) = [group for _, group in read_groups(tmp_path / "groups.jsonl.gz")]
    assert isinstance(restored.trajectories[0].top_logprobs[1][0], tuple)
    assert restored.trajectories[0].routes.dtype == np.int16  # == leaves them out
    assert np.array_equal(restored.trajectories[0].routes, full.routes)
    assert restored.trajectories[1].routes is None
    assert restored.trajectories[1].status is TrajectoryStatus.MASKED


def test_columns_written_as_lists_by_an_earlier_version_are_read(tmp_path):
    path = tmp_path / "groups.jsonl.gz"
    columns = {
        "token_ids": [5, 6, 7],
        "loss_mask": [0, 1, 1],
        "rollout_logprobs": [0.0, -0.3333333432674408, -0.25],
        "entropies": [0.0, 0.5, 2.0],
        "versions": [-1, 3, 4],
    }
    made = Trajectory(trajectory_id="g7/0", group_id="g7", instance_id="i", reward=1.0, **columns)
    prompt = Prompt(instance_id="i", group_id="g7", seed=1)
    write_groups(path, [(0, Group(prompt=prompt, trajectories=[made]))])
    with gzip.open(path, "rt") as file:
        record = json.loads(file.read())
    assert record["trajectories"][0]["versions"]["dtype"] == "<i4"
    record["trajectories"][0] |= columns
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(record) + "\n")
    ((_, group),) = read_groups(path)
    assert group.trajectories == [made]
    assert {name: getattr(group.trajectories[0], name).dtype for name in columns} == Trajectory.COLUMNS


def test_an_empty_buffer_is_a_file_too(tmp_path):
    write_groups(tmp_path / "groups.jsonl.gz", [])
    assert read_groups(tmp_path / "groups.jsonl.gz") == []
