"""One attempt at a trajectory: its task, its state so far, and why it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from rlpipe.config.user_code import raised_at
from rlpipe.envs.base import AgentFailed, InfrastructureError, StepResult
from rlpipe.envs.contract import observation_text
from rlpipe.metrics.spans import Lane
from rlpipe.rollout.environment_threads import EnvironmentHung
from rlpipe.types import Trajectory, TrajectoryStatus

MAX_TEXT = 2000  # characters of each action and observation that are recorded for display
_MAX_ERROR = 500  # characters of an error message, which may quote text of a model


class ExitReason(StrEnum):
    """Why a trajectory ended."""

    DONE = "done"  # the episode ended it, after a submission or an answer
    TRUNCATED = "truncated"  # the episode ended it because of the episode's own limit
    MAX_TURNS = "max_turns"
    CONTEXT = "context"  # the next turn does not fit into the context
    PROMPT = "prompt"  # masked: not even the first turn fits
    INFRASTRUCTURE = "infrastructure"  # masked
    ERROR = "error"  # masked: the environment raised another exception, or broke its contract
    CLOSED = "closed"  # masked: the collector was closed during it


@dataclass(slots=True, kw_only=True, frozen=True)
class Task:
    """One trajectory to roll out; its attempts may fail and be repeated.

    seed: seed of the sampling; the environment's seed is derived from it. number: index of the attempt among
    its siblings. top_logprobs, record, routes: data that the engine returns in addition to the tokens, see
    `SamplingParams`.
    """

    trajectory_id: str
    group_id: str
    instance_id: str
    seed: int
    number: int
    temperature: float
    top_logprobs: int = 0
    record: bool = False
    routes: bool = False


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt at a task.

    gen_seconds, env_seconds: time spent waiting for engine and environment. sandbox_seconds: time inside the
    environment's calls. cut: whether a turn used up its tokens before the model ended it. turns: texts for
    display. rewards, actions: one for each turn so far. stored: number of tokens of each conversation (in a
    game, of all seats), by session id.
    """

    task: Task
    trajectory: Trajectory
    session_id: str
    lane: Lane
    stored: dict[str, int]
    gen_seconds: float = 0.0
    env_seconds: float = 0.0
    sandbox_seconds: float = 0.0
    engine_failed: bool = False
    cut: bool = False
    turns: list[dict[str, str]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Time a call of the environment, and raise its exceptions as `EnvironmentRaised`."""
        started = time.monotonic()
        try:
            yield
        except InfrastructureError:
            raise
        except BaseException as error:
            raise EnvironmentRaised from error
        finally:
            self.sandbox_seconds += time.monotonic() - started

    def record_turn(self, action: str, step: StepResult) -> None:
        """Record a turn; its texts are for display, each of limited length."""
        observation = observation_text(step.observation)[:MAX_TEXT]
        self.turns.append({"action": action[:MAX_TEXT], "observation": observation})
        self.rewards.append(step.reward or 0.0)
        self.actions.append(action)
        self.trajectory.info |= step.info

    def mask(self, reason: ExitReason, error: BaseException) -> None:
        """Mask the trajectory: remove its reward, and record the reason."""
        trajectory = self.trajectory
        trajectory.status = TrajectoryStatus.MASKED
        trajectory.reward, trajectory.turn_rewards = None, []
        trajectory.info |= {"exit_reason": reason.value} | _describe(reason, error)


class Masked(Exception):
    """The trajectory is masked, because another attempt would not help."""

    def __init__(self, reason: ExitReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EnvironmentRaised(Exception):
    """Carries an exception of the environment, as `__cause__`, out of its thread.

    SystemExit, StopIteration and CancelledError would mean something else to the event loop.
    """


def _describe(reason: ExitReason, error: BaseException) -> dict[str, str]:
    """Return the failure in one line, and the innermost line of user code."""
    text = str(error) if reason is not ExitReason.ERROR else f"{type(error).__name__}: {error}"
    if isinstance(error, (AgentFailed, EnvironmentHung)):
        return {"error": text[:_MAX_ERROR], "place": error.place}
    return {"error": text[:_MAX_ERROR], "place": raised_at(error)}
