"""What is said about trajectories equals a count by hand."""

from __future__ import annotations

import math
import random
from itertools import combinations

import numpy as np
import pytest

from rlpipe.metrics.collect import (
    MAX_INFO,
    InfoMetrics,
    clustered_standard_error,
    distinct_tokens,
    pass_rates,
    spec_metrics,
    trajectory_metrics,
    validation_metrics,
)
from rlpipe.metrics.names import declared
from rlpipe.metrics.values import reduce
from rlpipe.types import (
    FinishReason,
    GenerateResult,
    Group,
    Prompt,
    SpecCounts,
    Trajectory,
    TrajectoryStatus,
)

pytestmark = pytest.mark.unit


def played(
    reward: float | None,
    turns: list[list[tuple[float, int]]],
    *,
    instance: str = "i",
    spec: SpecCounts | None = None,
    truncated: bool = False,
    masked: bool = False,
    **info: object,
) -> Trajectory:
    """A trajectory with two prompt tokens; each turn is a list of (entropy, version) and is observed once."""
    trajectory = Trajectory(
        trajectory_id="t", group_id="g", instance_id=instance, reward=reward, truncated=truncated, info=info
    )
    trajectory.append_context([1, 2])
    trajectory.prompt_length = 2
    for turn in turns:
        trajectory.append_sampled(
            GenerateResult(
                request_id="r",
                output_ids=[7] * len(turn),
                logprobs=[-0.5] * len(turn),
                entropies=[entropy for entropy, _ in turn],
                versions=[version for _, version in turn],
                finish_reason=FinishReason.STOP,
                spec=SpecCounts(),
            )
        )
        trajectory.append_context([9])
    trajectory.spec.add(spec or SpecCounts())
    if masked:
        trajectory.status = TrajectoryStatus.MASKED
    return trajectory


def group(*trajectories: Trajectory) -> Group:
    return Group(prompt=Prompt(instance_id="i", group_id="g"), trajectories=list(trajectories))


def read(values: dict) -> dict[str, float | None]:
    for name, value in values.items():
        assert declared(name).kind.accepts(value), name
    return {name: value.value() for name, value in values.items()}


MIXED = [
    group(
        played(
            1.0, [[(0.2, 4), (0.4, 5)]], submitted=True, retries=1, sandbox_seconds=2.0, exit_reason="done"
        ),
        played(
            0.0,
            [[(0.9, 3)], [(0.5, 6)]],
            submitted=False,
            truncated=True,
            retries=0,
            sandbox_seconds=4.0,
            exit_reason="max_turns",
        ),
    ),
    group(
        played(1.0, [[(0.0, 6)]], submitted=True, retries=0, sandbox_seconds=0.0, exit_reason="done"),
        played(
            None,
            [[(50.0, 0)] * 9],
            masked=True,
            retries=3,
            exit_reason="infrastructure",
            sandbox_seconds=90.0,
        ),
    ),
]


def test_trained_trajectories_are_counted_by_hand() -> None:
    got = read(trajectory_metrics(MIXED, trainer_version=6))
    assert got["critic/rewards/mean"] == got["critic/score/mean"] == pytest.approx(2 / 3)
    assert (got["critic/rewards/max"], got["critic/rewards/min"]) == (1.0, 0.0)
    assert got["rollout/entropy"] == pytest.approx((0.2 + 0.4 + 0.9 + 0.5 + 0.0) / 5)  # per token
    assert got["response_length/mean"] == pytest.approx(5 / 3) and got["response_length/max"] == 2
    assert got["prompt_length/mean"] == 2
    assert got["num_turns/mean"] == pytest.approx(4 / 3)
    assert got["training/off_policy/trajectory_staleness/mean"] == pytest.approx((2 + 3 + 0) / 3)
    assert got["training/off_policy/trajectory_staleness/max"] == 3
    assert got["training/off_policy/trajectory_spans/mean"] == pytest.approx((2 + 2 + 1) / 3)
    assert got["env/submit_rate"] == pytest.approx(2 / 3)
    assert got["env/truncated"] == got["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert got["env/solve_all"] == 0.5 and got["env/solve_none"] == 0.0 and got["env/no_signal"] == 0.5
    assert "perf/train_tokens" not in got  # the trainer counts them: tokens with a gradient


def distinct(*turns: list[int]) -> float | None:
    trajectory = Trajectory(trajectory_id="t", group_id="g", instance_id="i", reward=1.0)
    for turn in turns:
        ids = np.array(turn, np.int32)
        blank = [0.0] * len(ids)
        trajectory.append_context([1, 2])
        trajectory.append_sampled(
            GenerateResult(
                request_id="r",
                output_ids=ids,
                logprobs=blank,
                entropies=blank,
                versions=[0] * len(ids),
                finish_reason=FinishReason.STOP,
                spec=SpecCounts(),
            )
        )
    return distinct_tokens([trajectory]).value()


def test_tokens_that_repeat_the_ones_shortly_before_in_their_turn_are_not_distinct() -> None:
    assert distinct([5, 6, 7]) == 1.0
    assert distinct([5, 6, 5, 5]) == 0.5
    assert distinct([5, *range(10, 25), 5]) == 1.0  # 16 tokens apart
    assert distinct([5, *range(10, 24), 5]) == pytest.approx(15 / 16)
    assert distinct([5, 6], [5, 6], [1, 2]) == 1.0  # other turns, and the context, do not count
    assert distinct([]) is None
    assert distinct_tokens([]).value() is None


@pytest.mark.parametrize("length", [512, 4096])
def test_distinct_tokens_do_not_depend_on_the_length_of_a_turn(length) -> None:
    rng = random.Random(length)
    share = distinct([rng.randrange(50) for _ in range(length)])
    assert share == pytest.approx(0.98**15, abs=0.05)


def test_masked_trajectories_are_counted_and_nothing_else_of_them_is() -> None:
    got = read(trajectory_metrics(MIXED, trainer_version=6))
    assert got["env/masked"] == 1 and got["env/retries"] == 4 and got["env/trajectories"] == 3
    assert got["env/exit/infrastructure"] == 0.25 and got["env/exit/done"] == 0.5
    without = [group(*MIXED[0].trajectories), group(MIXED[1].trajectories[0])]
    clean = read(trajectory_metrics(without, trainer_version=6))
    about_the_masked = ("env/masked", "env/retries", "env/exit/", "env/sandbox/")
    for name, value in clean.items():
        if not name.startswith(about_the_masked):
            assert got[name] == value, name


def test_acceptance_comes_from_sums_over_trajectories_of_unequal_length() -> None:
    long = SpecCounts(drafted=[10, 8], accepted=[8, 6], verify_steps=10, proposed=20)
    short = SpecCounts(drafted=[1], accepted=[0], verify_steps=1, proposed=1)
    got = read(
        trajectory_metrics(
            [group(played(1.0, [[(0.1, 1)]], spec=long), played(0.0, [[(0.1, 1)]], spec=short))], 1
        )
    )
    assert got["spec/acceptance_rate"] == pytest.approx(14 / 21)
    assert got["spec/acceptance_length"] == pytest.approx(1 + 14 / 11)  # the mean of both would be 1.7
    assert got["spec/acceptance_rate/depth_1"] == pytest.approx(8 / 11)
    assert got["spec/acceptance_rate/depth_2"] == pytest.approx(6 / 8)


def test_acceptance_agrees_with_the_definitions_in_types() -> None:
    counts = SpecCounts(drafted=[9, 5, 2], accepted=[5, 2, 1], verify_steps=9, proposed=27)
    got = read(spec_metrics(counts))
    assert got["spec/acceptance_rate"] == pytest.approx(counts.acceptance_rate)
    assert got["spec/acceptance_length"] == pytest.approx(counts.acceptance_length)


def test_the_range_of_acceptance_lengths_is_that_of_the_trajectories_that_verified() -> None:
    specs = [
        SpecCounts(drafted=[4], accepted=[a], verify_steps=v, proposed=4) for a, v in ((1, 4), (3, 4), (0, 0))
    ]
    got = read(trajectory_metrics([group(*(played(1.0, [[(0.1, 1)]], spec=spec) for spec in specs))], 1))
    assert (got["spec/acceptance_length/min"], got["spec/acceptance_length/max"]) == (1.25, 1.75)


def test_pass_at_k_is_the_share_of_subsets_of_k_attempts_with_a_solved_one() -> None:
    solved = {"a": [1, 0, 0, 1, 0], "b": [0, 0, 0, 0], "c": [1, 1, 0, 0, 0, 0, 0, 0], "d": [1]}
    rates = pass_rates((name, float(x)) for name, attempts in solved.items() for x in attempts)
    assert list(rates) == [2, 4, 8]
    for k, rate in rates.items():
        subsets = [list(combinations(a, k)) for a in solved.values() if len(a) >= k]
        shares = [sum(map(any, chosen)) / len(chosen) for chosen in subsets]
        assert rate.value() == pytest.approx(sum(shares) / len(shares)), k


def test_validation_reports_pass_at_k_where_prompts_have_several_attempts() -> None:
    rewards = [("a", 1.0), ("a", 0.0), ("b", 0.0), ("b", 0.5)]
    found = read(
        validation_metrics("s", [played(r, [[(0.1, 2)]], instance=i) for i, r in rewards], primary=False)
    )
    assert found["val/s/pass_at_2"] == 0.5 and "val/s/pass_at_4" not in found
    once = validation_metrics("s", [played(1.0, [[(0.1, 2)]], instance=i) for i in "ab"], primary=False)
    assert not [name for name in once if "pass_at" in name]


def test_without_speculation_there_is_no_acceptance() -> None:
    got = read(trajectory_metrics([group(played(1.0, [[(0.1, 1)]]))], 1))
    assert not [name for name in got if name.startswith("spec/")]


def test_no_groups_and_all_masked_groups_are_no_error() -> None:
    assert read(trajectory_metrics([], 1))["critic/rewards/mean"] is None
    got = read(trajectory_metrics([group(played(None, [], masked=True))], 1))
    assert got["env/masked"] == 1 and got["env/solve_none"] is None


def test_steps_reduce_to_the_metrics_of_all_groups_at_once() -> None:
    parts = [trajectory_metrics([g], trainer_version=6) for g in MIXED]
    merged = {name: value.value() for name, value in reduce(parts).items()}
    whole = read(trajectory_metrics(MIXED, trainer_version=6))
    for name, value in whole.items():
        if not name.startswith("env/exit/"):  # absent where a reason did not occur
            assert merged[name] == pytest.approx(value), name


def test_standard_error_of_single_attempts_is_the_textbook_one() -> None:
    rewards = [random.Random(1).random() for _ in range(50)]
    mean = sum(rewards) / 50
    textbook = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 49 / 50)
    got = clustered_standard_error([(str(i), r) for i, r in enumerate(rewards)])
    assert got == pytest.approx(textbook)


def test_repeated_attempts_at_an_instance_are_not_independent_evidence() -> None:
    """Four identical attempts each: the error stays that of the instances, it does not halve."""
    once = [(str(i), float(i % 2)) for i in range(40)]
    assert clustered_standard_error(once * 4) == pytest.approx(clustered_standard_error(once))


def test_standard_error_covers_the_spread_of_repeated_experiments() -> None:
    """n = 400 experiments of 30 instances with 4 correlated attempts; the seed is fixed."""
    draw = random.Random(0)
    means, errors = [], []
    for _ in range(400):
        rewards = []
        for instance in range(30):
            difficulty = draw.betavariate(0.5, 0.5)
            rewards += [(str(instance), float(draw.random() < difficulty)) for _ in range(4)]
        means.append(sum(r for _, r in rewards) / len(rewards))
        errors.append(clustered_standard_error(rewards))
    centre = sum(means) / len(means)
    spread = math.sqrt(sum((m - centre) ** 2 for m in means) / (len(means) - 1))
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.1)  # unclustered: 40% too small


def test_a_single_instance_has_no_standard_error() -> None:
    assert clustered_standard_error([("a", 1.0), ("a", 0.0)]) is None


def test_validation_reports_the_primary_set_twice_and_leaves_masked_ones_out() -> None:
    trajectories = [
        played(1.0, [[(0.1, 2)]], instance="a", submitted=True),
        played(0.0, [[(0.3, 2)]], instance="b", submitted=False),
        played(None, [], instance="c", masked=True),
    ]
    got = read(validation_metrics("known_families", trajectories, primary=True))
    assert got["val/reward"] == got["val/known_families/reward"] == 0.5
    assert got["val/reward_se"] == got["val/known_families/reward_se"] == 0.5
    assert got["val/known_families/masked"] == 1 and got["val/known_families/instances"] == 2
    assert got["val/known_families/entropy"] == pytest.approx(0.2)
    other = validation_metrics("new_families", trajectories, primary=False)
    assert "val/reward" not in other and "val/new_families/reward" in other


def test_a_split_that_cannot_be_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'new families'.*metric name"):
        validation_metrics("new families", [], primary=False)


def test_changes_that_touch_the_grader_are_counted_among_graded_and_among_solved_attempts() -> None:
    graded = [
        played(1.0, [[(0.0, 1)]], changed=True),
        played(1.0, [[(0.0, 1)]], changed=True, tamper="frames"),
        played(0.0, [[(0.0, 1)]], changed=True, tamper="exit tests"),
        played(0.0, [[(0.0, 1)]], changed=False),
        played(0.0, [[(0.0, 1)]]),
    ]
    got = read(trajectory_metrics([group(*graded)], trainer_version=1))
    assert (got["env/tamper"], got["env/tamper_solved"]) == (0.5, 0.5)
    unsolved = read(trajectory_metrics([group(*graded[2:])], trainer_version=1))
    assert unsolved["env/tamper"] == 0.5 and "env/tamper_solved" not in unsolved
    assert not {"env/tamper", "env/tamper_solved"} & set(
        trajectory_metrics([group(graded[4])], trainer_version=1)
    )


def test_numbers_in_info_become_means_over_the_trajectories_that_have_them():
    events = []
    info = InfoMetrics(lambda kind, **fields: events.append((kind, fields)))
    turn = [(1.0, 0)]
    group = [
        played(1.0, [turn], turns_left=3, format=True, note="text", submitted=True, retries=2),
        played(0.0, [turn], turns_left=1, format=False, huge=10**400, **{"a/b c": 0.5}),
        played(None, [turn], masked=True, turns_left=100),
    ]
    got = read(info.training([Group(prompt=Prompt(instance_id="i", group_id="g"), trajectories=group)]))
    assert got == {"env/info/turns_left": 2.0, "env/info/format": 0.5, "env/info/a_b_c": 0.5}
    assert set(read(info.validation("held", group[:1]))) == {
        "val/held/info/turns_left",
        "val/held/info/format",
    }
    assert events == []


def test_names_beyond_the_limit_are_left_out_and_said_once():
    events = []
    info = InfoMetrics(lambda kind, **fields: events.append((kind, fields)))
    many = {f"n{number:03d}": number for number in range(MAX_INFO + 3)}
    first = info.validation("held", [played(1.0, [[(1.0, 0)]], **many)])
    later = info.validation("held", [played(1.0, [[(1.0, 0)]], n001=1, other=2)])
    assert len(first) == MAX_INFO and list(later) == ["val/held/info/n001"]
    [(kind, fields)] = events
    assert kind == "info_names" and fields["name"] == f"n{MAX_INFO:03d}" and fields["limit"] == MAX_INFO
