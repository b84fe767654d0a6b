"""Games that the policy plays on all sides: whose turn it is, what each side learns from, and failures."""

import asyncio
import re
import time

import numpy as np
import pytest

from rlpipe.config.env import EnvConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.envs.base import InfrastructureError, StepResult
from rlpipe.envs.mixture import MixtureSuite
from rlpipe.envs.rehearsal import rehearse
from rlpipe.envs.seats import Seats
from rlpipe.rollout.collector import Collector
from rlpipe.types import FinishReason, GenerateResult, Prompt, SpecCounts, TrajectoryStatus

pytestmark = pytest.mark.unit


class Chat:
    """One letter, one token."""

    stop_token_ids = (0,)

    def initial(self, messages, tools=None):
        return [1, *map(ord, messages[-1]["content"])]

    def observation(self, text):
        return [{"role": "user", "content": text}]

    def continuation(self, messages, turn_ids):
        return [2, *map(ord, messages[0]["content"])]

    def decode(self, ids):
        return "".join(map(chr, ids))


class LetterEngine:
    """Says "x" after anything."""

    async def generate(self, request):
        await asyncio.sleep(0.001)
        one, spec = [0.0], SpecCounts(drafted=[], accepted=[], verify_steps=1, proposed=0)
        result = {"logprobs": one, "entropies": one, "versions": [0], "finish_reason": FinishReason.STOP}
        return GenerateResult(request_id=request.request_id, output_ids=[ord("x")], spec=spec, **result)

    def abort(self, request_ids=None):
        """Nothing to abort."""

    def end_session(self, session_id):
        """Nothing is kept."""


class Race:
    """Players move in turn, `length` moves in all; who moves last has won. A text says what was moved."""

    def __init__(self, length, fails=None):
        self.length, self.fails, self.moves = length, fails, []
        self.player, self.text, self.done = 0, "go", False

    def move(self, action):
        self.moves.append((self.player, action))
        if self.fails and len(self.moves) == 2:
            raise self.fails
        self.done = len(self.moves) == self.length
        self.player, self.text = (self.player + 1) % 2, f"{len(self.moves)}"

    def result(self, player):
        return StepResult(done=True, reward=1.0 if self.moves[-1][0] == player else -1.0, info={"n": player})


class Races:
    """A suite of races. fails: what the second move raises, in each game in turn."""

    def __init__(self, length, *fails, max_turns=9):
        self.length, self.fails, self.max_turns, self.games = length, list(fails), max_turns, []

    def splits(self):
        return ["held_out"]

    def instance_ids(self, split):
        return [f"{split}:{n}" for n in range(4)]

    def players(self, instance_id):
        return 2

    def episode(self, instance_id):
        self.games.append(Race(self.length, self.fails.pop(0) if self.fails else None))
        return Seats(self.games[-1], 2, lambda text: [{"role": "user", "content": text}])


def collect(suite, attempts=2, **settings):
    async def run():
        rollout = RolloutConfig(max_context=90, max_new_tokens=5)
        env = EnvConfig(**({"retries": 1} | settings))
        parts = {"engine": LetterEngine(), "suite": suite, "chat": Chat(), "rollout": rollout, "env": env}
        one = Collector(**parts)
        try:
            group = await one.collect(Prompt(instance_id="train:0", group_id="g"), attempts)
            return group.trajectories
        finally:
            await one.close()

    return asyncio.run(asyncio.wait_for(run(), 20))


def read(trajectory):
    """What a side read and wrote; its own tokens in capitals."""
    pairs = zip(trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), strict=True)
    return "".join(chr(t).upper() if sampled else chr(t) for t, sampled in pairs if t > 2)


def test_each_side_has_its_own_trajectory_and_reward_and_sees_the_others_moves():
    suite = Races(5)
    one, other = collect(suite)
    assert suite.games[0].moves == [(0, "x"), (1, "x"), (0, "x"), (1, "x"), (0, "x")]
    assert (read(one), read(other)) == ("goX2X4X", "1X3X")
    assert (one.reward, other.reward) == (1.0, -1.0) and (one.side, other.side) == (0, 1)
    assert one.turn_rewards == [0.0, 0.0, 1.0] and other.turn_rewards == [0.0, -1.0]
    assert (one.info["n"], other.info["n"]) == (0, 1) and other.info["exit_reason"] == "done"
    assert not one.truncated and not other.truncated


def test_siblings_pair_up_and_are_compared_with_those_of_their_side():
    group = collect(Races(4), attempts=6)
    assert [t.side for t in group] == [0, 1] * 3
    assert [t.reward for t in group] == [-1.0, 1.0] * 3


def test_a_game_that_fails_of_infrastructure_is_repeated_for_both_sides():
    suite = Races(4, InfrastructureError("no board"))
    one, other = collect(suite)
    assert len(suite.games) == 2 and (one.reward, other.reward) == (-1.0, 1.0)
    assert one.info["retries"] == other.info["retries"] == 1
    assert read(one) == "goX2X" and read(other) == "1X3X"


@pytest.mark.parametrize(
    "failures, reason",
    [([InfrastructureError("no board")] * 2, "infrastructure"), ([ValueError("a bug")], "error")],
)
def test_a_game_that_cannot_be_played_masks_both_sides(failures, reason):
    for trajectory in collect(Races(4, *failures)):
        assert trajectory.status is TrajectoryStatus.MASKED and trajectory.reward is None
        assert trajectory.info["exit_reason"] == reason and str(failures[0]) in trajectory.info["error"]


def test_a_move_that_hangs_is_masked_for_both_sides_and_named_with_its_line():
    class Stuck(Race):
        def move(self, action):
            super().move(action)
            if len(self.moves) == 2:
                time.sleep(0.5)

    class StuckRaces(Races):
        def episode(self, instance_id):
            return Seats(Stuck(9), 2, lambda text: [{"role": "user", "content": text}])

    for trajectory in collect(StuckRaces(9), step_timeout_s=0.1, retries=0):
        assert trajectory.info["exit_reason"] == "infrastructure"
        error = trajectory.info["error"]
        assert "did not return within env.step_timeout_s=0.1" in error
        assert re.search(r"test_games\.py:\d+ `time\.sleep", error), error


def test_a_limit_of_one_side_ends_the_game_for_both_without_a_winner():
    one, other = collect(Races(9, max_turns=2))
    assert (one.reward, other.reward) == (0.0, 0.0) and one.truncated and other.truncated
    assert one.info["exit_reason"] == "max_turns" and one.num_turns == 2
    assert other.info["exit_reason"] in ("truncated", "max_turns")


def test_a_side_without_a_turn_has_its_reward_and_nothing_to_train_on():
    one, other = collect(Races(1))
    assert (one.reward, other.reward) == (1.0, -1.0)
    assert other.num_turns == 0 and not np.any(other.loss_mask) and other.status is TrajectoryStatus.COMPLETE


def test_a_member_of_a_mixture_plays_its_games_within_its_own_limit():
    class Alone:
        max_turns = 9

        def splits(self):
            return ["held_out"]

        def instance_ids(self, split):
            return [split]

        def episode(self, instance_id):
            raise AssertionError("another member")

    suite = MixtureSuite({"race": (0.5, Races(99, max_turns=3)), "alone": (0.5, Alone())})
    assert suite.players("race/train:0") == 2 and suite.players("alone/train") == 1

    class OfTheRace(MixtureSuite):
        def episode(self, instance_id, seed=0, attempt=0):
            return super().episode(f"race/{instance_id}", seed, attempt)

        def players(self, instance_id):
            return 2

    suite.__class__ = OfTheRace
    one, other = collect(suite)
    assert one.num_turns == 3 and one.reward == other.reward == 0.0


def test_a_rehearsal_plays_games_to_their_end_and_names_the_line_that_raises():
    suite = Races(4)
    assert rehearse(suite, "race", episodes=2).steps == 4 * 4
    assert all(game.done for game in suite.games) and len(suite.games) == 4
    with pytest.raises(ValueError, match=r"test_games\.py:\d+: .* raised ValueError: a bug"):
        rehearse(Races(4, ValueError("a bug")), "race", episodes=1)
