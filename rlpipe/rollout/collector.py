"""Plays prompts: engine and environment take turns until an episode ends.

    collect(prompt) -> group_size trajectories at once, each: generate -> step -> append -> generate ...

| a trajectory waits for      | woken by                                                       |
| engine.generate             | the engine's own batch                                         |
| a step of its episode       | one of `env.threads` threads (environments block)              |

Owns the order of tokens in a trajectory, its seeds, retries and limits. A failure of the environment's
infrastructure replays the whole trajectory with the same seeds; when retries are used up it is MASKED.
Whatever else an environment raises, or answers that is not what it should, masks the trajectory at once:
nothing but a failure of the engine leaves `collect` as an exception. An aborted turn is continued from what
exists, so aborting never loses tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlpipe.envs.base import Episode, InfrastructureError, StepResult, Suite, suite_tools
from rlpipe.envs.contract import messages_of, step_of
from rlpipe.metrics.spans import Lane, SpanLog
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.engine import Engine
from rlpipe.rollout.turn import joined, next_route, stream_seed
from rlpipe.types import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Group,
    Prompt,
    SamplingParams,
    Trajectory,
    TrajectoryStatus,
)

if TYPE_CHECKING:
    from rlpipe.config.env import EnvConfig
    from rlpipe.config.rollout import RolloutConfig

T = TypeVar("T")
_SHOWN_CHARS = 2000  # of each action and observation that is kept for people to read
_SHOWN_ERROR = 500  # characters of a message, which may hold what a model wrote
_FRUITLESS_ABORTS = 100


class ExitReason(StrEnum):
    """Why a trajectory ended."""

    DONE = "done"  # the episode ended it: submitted, answered
    MAX_TURNS = "max_turns"
    CONTEXT = "context"  # the next turn does not fit into the context
    PROMPT = "prompt"  # masked: not even the first turn fits
    INFRASTRUCTURE = "infrastructure"  # masked
    ERROR = "error"  # masked: the environment raised something else, or answered what it must not
    CLOSED = "closed"  # masked: the collector was closed meanwhile


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """One trajectory in the making. gen_seconds, env_seconds: waited for engine and environment.

    top_logprobs, record, routes: what the engine returns besides the tokens, see `SamplingParams`.
    """

    trajectory: Trajectory
    session_id: str
    seed: int
    temperature: float
    lane: Lane
    top_logprobs: int = 0
    record: bool = False
    routes: bool = False
    gen_seconds: float = 0.0
    env_seconds: float = 0.0
    sandbox_seconds: float = 0.0
    engine_failed: bool = False
    turns: list[dict[str, str]] = field(default_factory=list)


class _Unplayable(Exception):
    """The trajectory is masked, and trying again is of no use."""

    def __init__(self, reason: ExitReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Raised(Exception):
    """Carries what the environment raised, as `__cause__`, out of its thread.

    SystemExit, StopIteration and CancelledError would mean something else to the event loop.
    """


_CLOSED = (ExitReason.CLOSED, "the collector was closed")


class Collector:
    """Plays any number of groups at once from one event loop.

    rollout: `temperature`, `max_new_tokens` of a turn, `max_context` of a trajectory in tokens,
        `concurrent_groups`, and `max_running`, which bounds the trajectories of an evaluation.
    env: `threads` and `retries`. Turns are limited by the suite.
    top_logprobs: how many the engine returns with each token of `collect`; `evaluate` asks for none.
    record_drafts: keep the verify steps and the text of every token of each group's first attempt.
    spans: gets "generate" and "env" of every turn, a lane for each trajectory that is being played.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        suite: Suite,
        chat: ChatFormat,
        rollout: RolloutConfig,
        env: EnvConfig,
        top_logprobs: int = 0,
        record_drafts: bool = False,
        spans: SpanLog | None = None,
    ) -> None:
        self._engine, self._suite, self._chat = engine, suite, chat
        self._tools = suite_tools(suite)
        if self._tools:
            chat.check_tools(self._tools)
        self._rollout, self._env, self._top_logprobs = rollout, env, top_logprobs
        self._record_drafts = record_drafts
        self._spans = spans or SpanLog("rollout 0")
        self._threads = ThreadPoolExecutor(env.threads, thread_name_prefix="env")
        self._groups = asyncio.Semaphore(rollout.concurrent_groups) if rollout.concurrent_groups else None
        self._playing: set[asyncio.Future[None]] = set()
        self._sessions = count()  # a prompt may be played again before the engine has ended its first play
        self._closing = False

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        """Play the siblings of one prompt; returns when all have ended.

        gen_seconds and env_seconds of the group are means over its trajectories.
        """
        async with self._groups or contextlib.nullcontext():
            attempts = await gather_or_cancel(
                self._play(
                    Trajectory(
                        trajectory_id=trajectory_id,
                        group_id=prompt.group_id,
                        instance_id=prompt.instance_id,
                    ),
                    seed=stream_seed(prompt.seed, index),
                    temperature=self._rollout.temperature,
                    top_logprobs=self._top_logprobs,
                    record=self._record_drafts and index == 0,
                    routes=self._rollout.replay_routes,
                )
                for index, trajectory_id in enumerate(prompt.trajectory_ids(group_size))
            )
        return Group(
            prompt=prompt,
            trajectories=[attempt.trajectory for attempt in attempts],
            gen_seconds=sum(attempt.gen_seconds for attempt in attempts) / group_size,
            env_seconds=sum(attempt.env_seconds for attempt in attempts) / group_size,
        )

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        """Play each instance `samples` times, in order, at most `rollout.max_running` at once.

        Seeds depend on instance and sample alone, so two evaluations of one policy are equal.
        """
        room = asyncio.Semaphore(self._rollout.max_running)

        async def one(instance_id: str, sample: int) -> Trajectory:
            async with room:
                trajectory = Trajectory(
                    trajectory_id=f"eval/{instance_id}/{sample}",
                    group_id=f"eval/{instance_id}",
                    instance_id=instance_id,
                )
                seed = stream_seed("eval", instance_id, sample)
                return (await self._play(trajectory, seed, temperature)).trajectory

        return await gather_or_cancel(one(name, sample) for name in instance_ids for sample in range(samples))

    def play_on(self, engine: Engine) -> None:
        """Ask another engine from here on; turns that the one before ends with ABORT are continued there."""
        self._engine = engine

    async def close(self) -> None:
        """End running trajectories as masked, wait for them, and free the threads."""
        self._closing = True
        self._engine.abort()
        await asyncio.gather(*self._playing)
        await asyncio.to_thread(self._threads.shutdown)

    async def _play(self, blank: Trajectory, seed: int, temperature: float, **returned: Any) -> _Attempt:
        """One trajectory with its retries, in a lane of its own; returned: see `_Attempt`."""
        with self._spans.lane() as lane:
            return await self._play_in(lane, blank, seed, temperature, **returned)

    async def _play_in(
        self,
        lane: Lane,
        blank: Trajectory,
        seed: int,
        temperature: float,
        **returned: Any,
    ) -> _Attempt:
        for retry in range(self._env.retries + 1):
            failed: BaseException | None = None
            attempt = _Attempt(
                trajectory=Trajectory(
                    trajectory_id=blank.trajectory_id,
                    group_id=blank.group_id,
                    instance_id=blank.instance_id,
                ),
                session_id=f"{blank.trajectory_id}#{next(self._sessions)}.{retry}",
                seed=seed,
                temperature=temperature,
                lane=lane,
                **returned,
            )
            playing = asyncio.get_running_loop().create_future()
            self._playing.add(playing)
            try:
                await self._play_once(attempt)
                break
            except InfrastructureError as failure:
                reason, failed = ExitReason.INFRASTRUCTURE, failure
            except _Unplayable as failure:
                reason, failed = failure.reason, failure
                break
            except Exception as failure:
                if attempt.engine_failed:
                    raise
                reason, failed = ExitReason.ERROR, failure.__cause__ or failure
                break
            finally:
                self._engine.end_session(attempt.session_id)
                self._playing.discard(playing)
                playing.set_result(None)
        if failed is not None:
            attempt.trajectory.status = TrajectoryStatus.MASKED
            attempt.trajectory.reward = None
            attempt.trajectory.info |= {"exit_reason": reason.value} | _described(reason, failed)
        attempt.trajectory.info |= {
            "submitted": bool(attempt.trajectory.info.get("submitted", False)),
            "retries": retry,
            "sandbox_seconds": attempt.sandbox_seconds,
            "turns": attempt.turns,
        }
        if attempt.record:
            attempt.trajectory.info["token_texts"] = self._chat.pieces(attempt.trajectory.token_ids.tolist())
        return attempt

    async def _play_once(self, attempt: _Attempt) -> None:
        """Play to the end. Raises InfrastructureError, _Unplayable, and whatever an environment makes."""
        if self._closing:
            raise _Unplayable(*_CLOSED)
        episode = await self._blocking(attempt, self._suite.episode, attempt.trajectory.instance_id)
        try:
            result, reason = await self._take_turns(attempt, episode)
        finally:
            await asyncio.shield(self._blocking(attempt, episode.close))
        trajectory = attempt.trajectory
        trajectory.reward = result.reward
        trajectory.truncated = reason is not ExitReason.DONE
        trajectory.info |= result.info | {"exit_reason": reason.value}

    async def _take_turns(self, attempt: _Attempt, episode: Episode) -> tuple[StepResult, ExitReason]:
        """Generate and step until the episode is done, or turns or context are used up."""
        trajectory, chat = attempt.trajectory, self._chat
        opening = messages_of(await self._blocking(attempt, episode.messages))
        attempt.turns += [{"role": m["role"], "text": m["content"][:_SHOWN_CHARS]} for m in opening]
        context = chat.initial(opening, self._tools)
        trajectory.prompt_length = len(context)
        room = self._rollout.max_context
        if len(context) >= room:
            message = f"the prompt has {len(context)} tokens: raise rollout.max_context={room}"
            raise _Unplayable(ExitReason.PROMPT, message)
        for turn in range(self._suite.max_turns):
            if len(trajectory.token_ids) + len(context) >= room:
                return step_of(await self._blocking(attempt, episode.finish), last=True), ExitReason.CONTEXT
            trajectory.append_context(context)
            with attempt.lane.span("generate", trajectory=trajectory.trajectory_id, turn=turn):
                generated = await self._generate(attempt, turn)
            trajectory.append_sampled(generated)
            turn_ids = generated.output_ids.tolist()
            action = chat.decode(turn_ids)
            step = step_of(await self._blocking(attempt, episode.step, action))
            _record_turn(attempt, action, step)
            if step.done:
                return step, ExitReason.DONE
            context = chat.continuation(chat.observation(step.observation), turn_ids)
        return step_of(await self._blocking(attempt, episode.finish), last=True), ExitReason.MAX_TURNS

    async def _generate(self, attempt: _Attempt, turn: int) -> GenerateResult:
        """One whole turn; what an abort interrupts is continued, with a seed of its own for each part."""
        length = len(attempt.trajectory.token_ids)
        budget = min(self._rollout.max_new_tokens, self._rollout.max_context - length)
        whole: GenerateResult | None = None
        fruitless = 0
        started = time.monotonic()
        while whole is None or whole.finish_reason is FinishReason.ABORT:
            if self._closing:
                raise _Unplayable(*_CLOSED)
            part = await self._request(attempt, turn, whole, budget)
            fruitless = 0 if len(part.output_ids) else fruitless + 1
            if fruitless == _FRUITLESS_ABORTS:
                raise InfrastructureError(f"the engine aborted a turn {fruitless} times without a token")
            whole = part if whole is None else joined(whole, part)
            if whole.finish_reason is FinishReason.ABORT and len(whole.output_ids) >= budget:
                whole.finish_reason = FinishReason.LENGTH
        attempt.gen_seconds += time.monotonic() - started
        return whole

    async def _request(
        self, attempt: _Attempt, turn: int, whole: GenerateResult | None, budget: int
    ) -> GenerateResult:
        """What is left of a turn. whole: what there is of it."""
        prompt = attempt.trajectory.token_ids
        done = 0 if whole is None else len(whole.output_ids)
        if whole is not None:
            prompt = np.concatenate((prompt, whole.output_ids))
        start = len(prompt)
        request = GenerateRequest(
            request_id=f"{attempt.session_id}/{turn}/{start}",
            prompt_ids=prompt,
            sampling=SamplingParams(
                temperature=attempt.temperature,
                max_new_tokens=budget - done,
                stop_token_ids=() if self._rollout.ignore_eos else self._chat.stop_token_ids,
                seed=stream_seed(attempt.seed, turn, start),
                top_logprobs=attempt.top_logprobs,
                record_drafts=attempt.record,
                routes=attempt.routes,
                routes_from=next_route(attempt.trajectory.routes, whole),
            ),
            session_id=attempt.session_id,
        )
        try:
            return await self._engine.generate(request)
        except asyncio.CancelledError:
            self._engine.abort([request.request_id])
            raise
        except Exception:
            attempt.engine_failed = True
            raise

    async def _blocking(self, attempt: _Attempt, function: Callable[..., T], *args: Any) -> T:
        """Call the environment in one of our threads."""

        def timed() -> T:
            started = time.monotonic()
            try:
                return function(*args)
            except InfrastructureError:
                raise
            except BaseException as error:
                raise _Raised from error
            finally:
                attempt.sandbox_seconds += time.monotonic() - started

        started = time.monotonic()
        try:
            with attempt.lane.span("env"):
                return await asyncio.get_running_loop().run_in_executor(self._threads, timed)
        finally:
            attempt.env_seconds += time.monotonic() - started


def _described(reason: ExitReason, failed: BaseException) -> dict[str, str]:
    """What failed, in one line, and where: the innermost line of the traceback."""
    text = str(failed) if reason is not ExitReason.ERROR else f"{type(failed).__name__}: {failed}"
    frames = traceback.extract_tb(failed.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return {"error": text[:_SHOWN_ERROR], "place": place}


def _record_turn(attempt: _Attempt, action: str, step: StepResult) -> None:
    """Keep what people read; `turns` is bounded by the turn limit, each text by a length."""
    observation = step.observation[:_SHOWN_CHARS]
    attempt.turns.append({"action": action[:_SHOWN_CHARS], "observation": observation})
    attempt.trajectory.info |= step.info


async def gather_or_cancel(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Run all at once; the first failure cancels the others and is raised as itself."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
