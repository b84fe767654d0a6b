import random

import pytest

from rlpipe.loop.selection import SelectionMeter
from rlpipe.metrics.names import declared
from rlpipe.types import Group, Prompt, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.unit


def group(lengths, rewards):
    members = [
        Trajectory(
            trajectory_id=f"g/{n}", group_id="g", instance_id="i", loss_mask=[1] * length, reward=reward
        )
        for n, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    return Group(prompt=Prompt(instance_id="i", group_id="g"), trajectories=members)


def fed(is_trained, *, count=300):
    """A meter that saw groups of random lengths, of which `is_trained(length)` says which are trained on."""
    luck, events = random.Random(0), []
    meter = SelectionMeter(lambda kind, **fields: events.append((kind, fields)))
    for _ in range(count):
        length = luck.randint(1, 100)
        one = group([length, length], [luck.random(), luck.random()])
        if is_trained(length, luck):
            meter.trained(one)
        else:
            meter.lost(one, one.trajectories)
            meter.dropped("stale")
    return meter, events


def test_dropping_long_trajectories_is_measured_and_said_once():
    meter, events = fed(lambda length, luck: length <= 70)
    values = {name: value.value() for name, value in meter.metrics(unfinished=5, oldest=2).items()}
    # uniform on 1..100 cut at 70: the mean falls by 15 of a standard deviation of 28.9
    assert values["selection/length_shift"] == pytest.approx(-15 / 28.9, abs=0.12)
    assert abs(values["selection/reward_shift"]) < 0.1
    assert values["selection/trained_share"] == pytest.approx(0.7, abs=0.06)
    assert values["selection/prompts_dropped"] == values["selection/dropped/stale"] > 60
    assert (values["selection/prompts_unfinished"], values["selection/oldest_prompt"]) == (5, 2)
    meter.metrics(unfinished=0, oldest=0)
    assert [(kind, fields["quantity"]) for kind, fields in events] == [("selection_bias", "length")]


def test_dropping_at_random_is_no_bias():
    meter, events = fed(lambda length, luck: luck.random() < 0.7)
    meter.metrics(unfinished=0, oldest=0)
    assert events == []


def test_hard_prompts_show_even_where_their_attempts_are_of_usual_length():
    events = []
    meter = SelectionMeter(lambda kind, **fields: events.append(fields["quantity"]))
    for n in range(100):
        one = group([10, 10], [0.0, 0.2] if n % 2 else [0.8, 1.0])
        if n % 2:
            meter.lost(one, one.trajectories)
        else:
            meter.trained(one)
    values = meter.metrics(unfinished=0, oldest=0)
    assert values["selection/difficulty_shift"].value() == pytest.approx(-1.0)
    assert values["selection/length_shift"].value() == 0.0
    assert events == ["reward", "difficulty"]


def test_masked_trajectories_do_not_enter_and_every_name_is_declared():
    meter, _ = fed(lambda length, luck: True, count=1)
    one = group([5, 5], [1.0, None])
    one.trajectories[1].status = TrajectoryStatus.MASKED
    meter.trained(one)
    meter.dropped("every trajectory masked")
    values = meter.metrics(unfinished=0, oldest=0)
    assert values["selection/trained_share"].denominator == 3
    assert all(declared(name).kind.accepts(value) for name, value in values.items())
