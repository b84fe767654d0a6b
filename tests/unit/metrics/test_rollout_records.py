"""Recorded rollouts: the format, its bounds, and that it says what the trajectory said."""

import pytest

from rlpipe.metrics.rollouts import Recorder, RolloutFiles, read_rollouts, rollout_record, turn_pieces
from rlpipe.types import DraftStep, FinishReason, GenerateResult, SpecCounts, Trajectory
from tests.helpers.recorded_runs import recorder
from tests.helpers.trajectories import make_groups

pytestmark = pytest.mark.unit


def turn(*tokens, drafts=(), version=0):
    return GenerateResult(
        request_id="r",
        output_ids=list(tokens),
        logprobs=[-0.12345] * len(tokens),
        entropies=[0.5] * len(tokens),
        versions=[version] * len(tokens),
        finish_reason=FinishReason.STOP,
        spec=SpecCounts(),
        drafts=list(drafts),
    )


def step(position, tokens, kept):
    ones = [1.0] * len(tokens)
    return DraftStep(position=position, tokens=tokens, target_probs=ones, draft_probs=ones, num_accepted=kept)


def two_turns():
    """Prompt of 3, a turn whose second draft was rejected, tool output of 2, a turn cut by its stop token."""
    t = Trajectory(trajectory_id="g/0", group_id="g", instance_id="i", reward=1.0, prompt_length=3)
    t.append_context([1, 2, 3])
    t.append_sampled(turn(10, 11, 12, 13, drafts=[step(1, [11, 99], 1), step(3, [13, 98], 1)]))
    t.append_context([4, 5])
    t.append_sampled(turn(20, 21, drafts=[step(1, [21, 22], 2)], version=1))
    t.info["turns"] = [
        {"role": "system", "text": "be good"},
        {"role": "user", "text": "do it"},
        {"action": "ls", "observation": "a b"},
        {"action": "submit", "observation": ""},
    ]
    return t


def test_tokens_carry_the_depth_at_which_they_were_accepted():
    record = rollout_record(two_turns(), step=3, trainer_version=2)
    assert record["accepted"] == [-1, -1, -1, 0, 1, 0, 1, -1, -1, 0, 1]
    assert [d[0] for d in record["drafts"]] == [4, 6, 10]
    assert record["tokens"][4] == record["drafts"][0][2][0] == 11
    assert record["policy_versions"] == [[-1, 3], [0, 4], [-1, 2], [1, 2]]
    assert record["rollout_logprobs"][3] == -0.1235


def test_turns_know_their_tokens():
    pieces = turn_pieces(two_turns())
    spans = [(piece["role"], piece["span"]) for piece in pieces]
    assert spans == [
        ("system", [0, 3]),
        ("user", [0, 3]),
        ("assistant", [3, 7]),
        ("tool", [7, 9]),
        ("assistant", [9, 11]),
    ]


def test_without_recorded_drafts_nothing_is_claimed():
    record = rollout_record(make_groups()[0].trajectories[0], step=1, trainer_version=0)
    assert record["accepted"] is None and record["drafts"] is None


def test_a_bounded_number_is_written_one_of_each_group(tmp_path):
    files = RolloutFiles(tmp_path, 2, recorder())
    for number in (1, 2, 12):
        files.write(number, make_groups(groups=3), number - 1)
    records = list(read_rollouts(tmp_path))
    assert [(r["step"], r["group_id"]) for r in records] == [(s, "g") for s in (1, 1, 2, 2, 12, 12)]
    assert [r["step"] for r in read_rollouts(tmp_path, last=1)] == [12, 12]
    assert records[0]["siblings"] == [t.reward for t in make_groups(groups=3)[0].trajectories[1:]]
    files.remove_after(2)
    assert {r["step"] for r in read_rollouts(tmp_path)} == {1, 2}
    RolloutFiles(tmp_path / "none", 0, recorder()).write(1, make_groups(), 0)
    assert not (tmp_path / "none").exists()


def test_a_turn_in_two_parts_keeps_its_drafts_in_place():
    from rlpipe.rollout.turn import joined

    whole = joined(turn(10, 11, drafts=[step(1, [11], 1)]), turn(12, 13, drafts=[step(1, [13], 1)]))
    assert [d.position for d in whole.drafts] == [1, 3]


def test_a_disk_that_refuses_is_reported_once_and_ends_nothing(tmp_path):
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    said = []
    files = RolloutFiles(tmp_path, 1, Recorder(lambda kind, **fields: said.append(kind)))
    files.write(1, make_groups(), 0)
    files.write(2, make_groups(), 1)
    assert said == ["recording_off"]
