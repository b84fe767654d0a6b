import pytest

from rlpipe.pipeline.ledger import Ledger
from rlpipe.types import Group, Prompt, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.unit


def group(index: int, *, masked: bool = False) -> Group:
    name = f"g{index}"
    status = TrajectoryStatus.MASKED if masked else TrajectoryStatus.COMPLETE
    members = [
        Trajectory(trajectory_id=f"{name}/{k}", group_id=name, instance_id="i", status=status)
        for k in range(2)
    ]
    return Group(prompt=Prompt(instance_id="i", group_id=name), trajectories=members)


def test_each_prompt_ends_once_and_is_counted_by_state(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    groups = [group(0), group(1, masked=True), group(2), group(3)]
    for index, g in enumerate(groups):
        ledger.admitted(index, g.prompt, version=0)
    for g in groups[:3]:
        ledger.completed(g)
    ledger.trained(groups[:2], step=1)
    assert ledger.counts() == {"trained": 1, "dropped": 1, "complete": 1, "admitted": 1}
    assert ledger.drop_unfinished("run ended") == 2
    assert ledger.counts() == {"trained": 1, "dropped": 3}


def test_training_a_prompt_twice_is_refused_and_changes_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ready, done = group(0), group(1)
    for index, g in enumerate((ready, done)):
        ledger.admitted(index, g.prompt, version=0)
        ledger.completed(g)
    ledger.trained([done], step=1)
    with pytest.raises(AssertionError, match="g1 is not 'complete'"):
        ledger.trained([ready, done], step=2)
    assert ledger.counts() == {"trained": 1, "complete": 1}


def test_rewind_forgets_later_prompts_so_that_they_can_be_admitted_again(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for index in range(4):
        ledger.admitted(index, group(index).prompt, version=0)
        ledger.completed(group(index))
    ledger.trained([group(0), group(1)], step=1)
    ledger.rewind(2)
    assert ledger.counts() == {"trained": 2}
    ledger.admitted(2, group(2).prompt, version=1)
    ledger.completed(group(2))
