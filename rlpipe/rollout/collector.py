"""Rolls out prompts: engine and environment alternate until an episode ends.

    collect(prompt) -> group_size trajectories at once, each: generate -> step -> append -> generate ...

| a trajectory waits for      | woken by                                                       |
| engine.generate             | the engine's own batch                                         |
| a step of its episode       | one of `env.threads` threads (environments block); `async def` |
|                             | steps run in one event loop on a separate thread               |
| an agent (`run_agent`)      | the agent's return; until then it calls the endpoint           |

Owns the order of tokens in a trajectory, its seeds, retries and limits. After a failure of the environment's
infrastructure, such as a call that hangs (`environment_threads`), the full trajectory is repeated with the
same seeds; after the last retry it is MASKED. The seats of a game (`envs.base.Game`) run concurrently, each
with its own trajectory; if one fails, all are repeated or masked. Any other exception of an environment, or
an answer that breaks its contract, masks the trajectory without a retry. Only a failure of the engine leaves
`collect` as an exception. An aborted turn is continued from its last token, so aborting never loses tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, TypeVar

from rlpipe.envs.base import (
    AgentEpisode,
    Episode,
    GroupMember,
    InfrastructureError,
    StepResult,
    Suite,
    close_episode,
    finish_episode,
    num_players,
    seats_of,
    start_episode,
    suite_tools,
)
from rlpipe.envs.contract import (
    group_rewards,
    messages_of,
    recorded_info,
    step_of,
)
from rlpipe.envs.user_loop import retrieve
from rlpipe.metrics.spans import Lane, SpanLog
from rlpipe.rollout.agents import AgentAttempt, AgentEndpoint
from rlpipe.rollout.attempt import MAX_TEXT, Attempt, EnvironmentRaised, ExitReason, Masked, Task
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.engine import Engine
from rlpipe.rollout.environment_threads import EnvironmentHung, EnvironmentThreads
from rlpipe.rollout.kv_budget import KvBudget
from rlpipe.rollout.turn import Turn, stream_seed
from rlpipe.rollout.turn_generator import TurnGenerator
from rlpipe.types import (
    FinishReason,
    Group,
    Prompt,
    RunStopped,
    Trajectory,
    TrajectoryStatus,
)

if TYPE_CHECKING:
    from rlpipe.config.env import EnvConfig
    from rlpipe.config.rollout import RolloutConfig

T = TypeVar("T")
_CLOSE_S = 3.0  # limit for closing an episode that hangs or was abandoned, and for all episodes at the end


class Collector:
    """Rolls out any number of groups concurrently in one event loop.

    rollout: the settings `temperature`, `max_new_tokens` of a turn, `max_context` of a trajectory in tokens,
        `concurrent_groups`, and `max_running`, the limit of concurrent trajectories in an evaluation.
    env: the settings `threads`, `step_timeout_s` and `retries`. The suite limits the number of turns.
    top_logprobs: how many the engine returns with each token in `collect`; `evaluate` requests none.
    record_drafts: record the verify steps and the text of every token of each group's first trajectory.
    spans: records "generate" and "env" of every turn, with a lane for each running trajectory.
    agents: serves the attempts of episodes of type `AgentEpisode`; needed only by suites with such episodes.
    kv_budget: delays attempts while the engine has no capacity for their keys and values; None: start all at
        once.
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
        agents: AgentEndpoint | None = None,
        kv_budget: KvBudget | None = None,
    ) -> None:
        self._agents = agents
        self._kv_budget = kv_budget or KvBudget(rows=0, tokens=0)
        self._suite, self._chat = suite, chat
        self._turns = TurnGenerator(engine, ignore_eos=rollout.ignore_eos)
        self._tools = suite_tools(suite)
        if self._tools:
            chat.check_tools(self._tools)
        self._rollout, self._env, self._top_logprobs = rollout, env, top_logprobs
        self._record_drafts = record_drafts
        self._spans = spans or SpanLog("rollout 0")
        self._threads = EnvironmentThreads(env.threads, env.step_timeout_s)
        self._groups = asyncio.Semaphore(rollout.concurrent_groups) if rollout.concurrent_groups else None
        self._running: set[asyncio.Future[None]] = set()
        # Numbers sessions, as a prompt may be rolled out again before the engine has ended its first session.
        self._sessions = count()

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        """Roll out the siblings of one prompt, and return when all have ended.

        gen_seconds and env_seconds of the group are means over its trajectories.
        """
        async with self._groups or contextlib.nullcontext():
            attempts = await self._roll_out_siblings(
                [
                    Task(
                        trajectory_id=trajectory_id,
                        group_id=prompt.group_id,
                        instance_id=prompt.instance_id,
                        seed=stream_seed(prompt.seed, index),
                        number=index,
                        temperature=self._rollout.temperature,
                        top_logprobs=self._top_logprobs,
                        record=self._record_drafts and index == 0,
                        routes=self._rollout.replay_routes,
                    )
                    for index, trajectory_id in enumerate(prompt.trajectory_ids(group_size))
                ]
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
        """Roll out each instance `samples` times, in order, at most `rollout.max_running` concurrently.

        Seeds depend only on instance and sample, so two evaluations of one policy are equal.
        """
        capacity = asyncio.Semaphore(self._rollout.max_running)

        async def roll_out(instance_id: str) -> list[Trajectory]:
            tasks = [
                Task(
                    trajectory_id=f"eval/{instance_id}/{sample}",
                    group_id=f"eval/{instance_id}",
                    instance_id=instance_id,
                    seed=stream_seed("eval", instance_id, sample),
                    number=sample,
                    temperature=temperature,
                )
                for sample in range(samples)
            ]
            attempts = await self._roll_out_siblings(tasks, capacity)
            return [attempt.trajectory for attempt in attempts]

        return list(chain.from_iterable(await gather_or_cancel(map(roll_out, instance_ids))))

    async def _roll_out_siblings(
        self, tasks: Sequence[Task], capacity: asyncio.Semaphore | None = None
    ) -> list[Attempt]:
        """Roll out all attempts at an instance; the seats of a game are rolled out together.

        capacity: limits concurrent games.
        """
        players = num_players(self._suite, tasks[0].instance_id)
        games = [tasks[first : first + players] for first in range(0, len(tasks), players)]

        async def roll_out(game: Sequence[Task]) -> list[Attempt]:
            async with capacity or contextlib.nullcontext(), self._kv_budget.admit(len(game)) as admitted:
                return await self._roll_out(game, admitted.tokens)

        attempts = list(chain.from_iterable(await gather_or_cancel(map(roll_out, games))))
        await self._score_group(attempts)
        return attempts

    async def _score_group(self, attempts: Sequence[Attempt]) -> None:
        """Replace the rewards of siblings by the result of `suite.score_group`, if the suite has it.

        The change of a reward is added to the reward of the last turn. A failure masks all siblings.
        """
        score = getattr(self._suite, "score_group", None)
        finished = [a for a in attempts if a.trajectory.status is TrajectoryStatus.COMPLETE]
        if score is None or not finished:
            return

        with self._spans.lane() as lane, self._in_flight():
            finished[0].lane = lane  # the attempt's own lane has ended
            try:
                scored = await self._group_rewards(score, finished)
            except InfrastructureError as failure:
                reason, error = ExitReason.INFRASTRUCTURE, failure
            except Masked as failure:
                reason, error = failure.reason, failure
            except Exception as failure:
                reason, error = ExitReason.ERROR, failure.__cause__ or failure
            else:
                for attempt, (reward, info) in zip(finished, scored, strict=True):
                    trajectory = attempt.trajectory
                    trajectory.info = info
                    trajectory.turn_rewards[-1] += reward - (trajectory.reward or 0.0)
                    trajectory.reward = reward
                return

        for attempt in finished:
            attempt.mask(reason, error)

    async def _group_rewards(
        self, score: Callable[..., Any], finished: Sequence[Attempt]
    ) -> list[tuple[float, dict[str, Any]]]:
        """Call `score_group`, with retries if infrastructure fails; return (reward, info) of each."""
        members = [
            GroupMember(
                text=(a.actions or [""])[-1],
                turns=a.actions,
                reward=a.trajectory.reward or 0.0,
                info=dict(a.trajectory.info),
            )
            for a in finished
        ]
        for retry in range(self._env.retries + 1):
            self._turns.check_open()
            try:
                first = finished[0]
                returned = await self._call(first, "score_group", score, first.task.instance_id, members)
                rewards = group_rewards(returned, len(finished))
                infos = [recorded_info("score_group()", member.info, cuts=True) for member in members]
                return list(zip(rewards, infos, strict=True))
            except InfrastructureError:
                if retry == self._env.retries:
                    raise
        raise AssertionError("the last failure was raised")

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        """Make `close` wait for calls in this context, so that no thread runs after the pool shuts down."""
        ended = asyncio.get_running_loop().create_future()
        self._running.add(ended)
        try:
            yield
        finally:
            self._running.discard(ended)
            ended.set_result(None)

    def activity(self) -> str:
        """Return a text on what the trajectories wait for; "" when none is running."""
        waits = [f"{self._turns.running} turns generate"] if self._turns.running else []
        if waiting := self._kv_budget.waiting:
            waits.append(f"{waiting} attempts wait until the engine can store their keys and values")
        if busiest := self._threads.busiest():
            work, seconds = busiest
            waits.append(f"the environment's {work} since {seconds:.0f} s")
        return ", ".join(waits)

    def use_engine(self, engine: Engine) -> None:
        """Send turns to another engine from now on.

        Turns that the previous engine ends with ABORT are continued there.
        """
        self._turns.engine = engine

    async def close(self) -> None:
        """End running trajectories as masked, wait for them, and free the threads.

        It does not wait for an environment that hangs.
        """
        self._turns.close()
        if self._running:
            await asyncio.wait(list(self._running), timeout=_CLOSE_S)
        await self._threads.close(_CLOSE_S)

    async def _roll_out(self, tasks: Sequence[Task], stored: dict[str, int]) -> list[Attempt]:
        """Roll out the trajectories of one episode, with retries, each in a new lane of the spans.

        stored: the tokens of each conversation are added to it, by session id.
        """
        with contextlib.ExitStack() as opened:
            lanes = [opened.enter_context(self._spans.lane()) for _ in tasks]
            return await self._roll_out_in(lanes, tasks, stored)

    async def _roll_out_in(
        self, lanes: Sequence[Lane], tasks: Sequence[Task], stored: dict[str, int]
    ) -> list[Attempt]:
        """Run the episode, with retries while infrastructure fails, and return the last attempts."""
        for retry in range(self._env.retries + 1):
            error: BaseException | None = None
            stored.clear()
            attempts = [
                self._new_attempt(lane, task, retry, stored) for lane, task in zip(lanes, tasks, strict=True)
            ]
            with self._in_flight():
                try:
                    await self._attempt(attempts)
                    break
                except InfrastructureError as failure:
                    reason, error = ExitReason.INFRASTRUCTURE, failure
                except Masked as failure:
                    reason, error = failure.reason, failure
                    break
                except RunStopped:
                    raise
                except Exception as failure:
                    if any(attempt.engine_failed for attempt in attempts):
                        raise
                    reason, error = ExitReason.ERROR, failure.__cause__ or failure
                    break
                finally:
                    for attempt in attempts:
                        self._turns.engine.end_session(attempt.session_id)

        for attempt in attempts:
            # A failed trajectory stays in its group, masked, so that a group is always complete.
            if error is not None:
                attempt.mask(reason, error)
            self._record(attempt, retry)
        return attempts

    def _new_attempt(self, lane: Lane, task: Task, retry: int, stored: dict[str, int]) -> Attempt:
        trajectory = Trajectory(
            trajectory_id=task.trajectory_id, group_id=task.group_id, instance_id=task.instance_id
        )
        session_id = f"{task.trajectory_id}#{next(self._sessions)}.{retry}"
        return Attempt(task=task, trajectory=trajectory, session_id=session_id, lane=lane, stored=stored)

    def _record(self, attempt: Attempt, retries: int) -> None:
        """Write the data that every attempt records into the trajectory's info."""
        trajectory = attempt.trajectory
        trajectory.info |= {
            "submitted": bool(trajectory.info.get("submitted", False)),
            "retries": retries,
            "sandbox_seconds": attempt.sandbox_seconds,
            "turns": attempt.turns,
        }
        if attempt.task.record:
            trajectory.info["token_texts"] = self._chat.token_texts(trajectory.token_ids.tolist())

    async def _attempt(self, attempts: Sequence[Attempt]) -> None:
        """Run an episode to its end: one attempt, or one for each of its seats.

        Raises:
            InfrastructureError: trying again may help.
            Masked: trying again will not help.
            EnvironmentRaised: with the environment's exception as its cause.
        """
        self._turns.check_open()

        first, limit = attempts[0], None
        task = first.task
        start = partial(start_episode, seed=stream_seed(task.seed, "env"), attempt=task.number)
        episode = await self._call(first, "episode", start, self._suite, task.instance_id)
        seats = seats_of(episode)
        try:
            if len(seats) != len(attempts):
                message = f"an episode with {len(seats)} seats for {len(attempts)} attempts at one game"
                raise Masked(ExitReason.ERROR, message)
            ends = await gather_or_cancel(map(self._run_seat, attempts, seats))
        except (EnvironmentHung, asyncio.CancelledError):
            limit = _CLOSE_S
            raise
        finally:
            await self._close_episode(first, episode, limit)

        for side, (attempt, (result, reason)) in enumerate(zip(attempts, ends, strict=True)):
            trajectory = attempt.trajectory
            trajectory.side = side
            trajectory.turn_rewards, trajectory.reward = attempt.rewards, sum(attempt.rewards)
            # An episode may end normally although its last answer was cut off.
            trajectory.truncated = attempt.cut or result.truncated or reason is not ExitReason.DONE
            trajectory.info |= result.info | {"exit_reason": reason.value}

    async def _run_seat(self, attempt: Attempt, episode: Any) -> tuple[StepResult, ExitReason]:
        if isinstance(episode, AgentEpisode):
            return await self._run_agent(attempt, episode)
        return await self._take_turns(attempt, episode)

    async def _close_episode(self, attempt: Attempt, episode: Any, limit: float | None) -> None:
        """Free the sandbox. limit: seconds to wait if the attempt has already failed; None: no limit.

        A cancelled attempt frees its sandbox too: the call continues, but nothing waits for it.
        """
        closing = asyncio.ensure_future(self._call(attempt, "close", close_episode, episode))
        closing.add_done_callback(retrieve)
        await asyncio.wait({closing}, timeout=limit)
        if limit is None:
            await closing

    async def _take_turns(self, attempt: Attempt, episode: Episode) -> tuple[StepResult, ExitReason]:
        """Generate and step until the episode is done or a limit (turns, context) is reached."""
        trajectory, chat = attempt.trajectory, self._chat
        said = await self._call(attempt, "messages", episode.messages)
        if isinstance(said, StepResult):  # the episode ended before its first turn
            over = step_of(said, last=True)
            attempt.rewards.append(over.reward or 0.0)
            return over, ExitReason.DONE

        opening = messages_of(said)
        attempt.turns += [{"role": m["role"], "text": m["content"][:MAX_TEXT]} for m in opening]

        context = chat.initial(opening, self._tools)
        trajectory.prompt_length = len(context)
        max_context = self._rollout.max_context
        if len(context) >= max_context:
            message = f"the prompt has {len(context)} tokens: raise rollout.max_context={max_context}"
            raise Masked(ExitReason.PROMPT, message)

        for turn in range(self._suite.max_turns):
            # If an observation leaves no token to generate, the episode ends and is graded as it is.
            if len(trajectory.token_ids) + len(context) >= max_context:
                return await self._finish(attempt, episode), ExitReason.CONTEXT
            trajectory.append_context(context)
            with attempt.lane.span("generate", trajectory=trajectory.trajectory_id, turn=turn):
                generated = await self._turns.generate(attempt, self._next_turn(attempt, turn))
            trajectory.append_sampled(generated)
            attempt.cut |= generated.finish_reason is FinishReason.LENGTH

            turn_ids = generated.output_ids.tolist()
            action = chat.decode(turn_ids)
            step = step_of(await self._call(attempt, "step", episode.step, action))
            attempt.record_turn(action, step)
            if step.done:
                return step, ExitReason.TRUNCATED if step.truncated else ExitReason.DONE

            context = chat.continuation(chat.observation(step.observation), turn_ids)
        return await self._finish(attempt, episode), ExitReason.MAX_TURNS

    async def _finish(self, attempt: Attempt, episode: Episode) -> StepResult:
        """End an episode that is not done; add the reward that it returns to the last turn's."""
        result = step_of(await self._call(attempt, "finish", finish_episode, episode), last=True)
        if attempt.rewards:
            attempt.rewards[-1] += result.reward or 0.0
        else:
            attempt.rewards.append(result.reward or 0.0)
        return result

    async def _run_agent(self, attempt: Attempt, episode: AgentEpisode) -> tuple[StepResult, ExitReason]:
        """Run an agent until it returns, and grade its answer.

        If an agent fails after a request was refused because of a limit, the limit counts as the cause, and
        the agent's work is graded.
        """
        assert self._agents is not None, "suites with agents need an endpoint"
        session = await self._agents.open(
            AgentAttempt(
                trajectory=attempt.trajectory,
                session_id=attempt.session_id,
                chat=self._chat,
                generate=partial(self._turns.generate, attempt),
                end_session=lambda name: self._turns.engine.end_session(name),
                max_turns=self._suite.max_turns,
                max_context=self._rollout.max_context,
                max_new_tokens=self._rollout.max_new_tokens,
                top_logprobs=attempt.task.top_logprobs,
            )
        )
        answer: str | None = None
        try:
            answer = await self._call(attempt, "run_agent", episode.run_agent, session.address)
        except EnvironmentRaised:
            if not session.limit and session.failure is None:
                raise
        finally:
            await session.close()
            attempt.turns = [{key: text[:MAX_TEXT] for key, text in turn.items()} for turn in session.turns]

        attempt.cut |= session.cut
        if session.failure is not None:
            raise session.failure
        if not session.texts and not session.limit:
            raise Masked(ExitReason.ERROR, "the agent returned without a request to the model")

        answer = answer if answer is not None else (session.texts or [""])[-1]
        step = step_of(await self._call(attempt, "step", episode.step, answer), last=True)
        attempt.actions = [answer]
        attempt.rewards = [0.0] * max(attempt.trajectory.num_turns - 1, 0) + [step.reward or 0.0]
        return step, ExitReason(session.limit or "done")

    def _next_turn(self, attempt: Attempt, number: int) -> Turn:
        """Return the turn that continues an episode's trajectory."""
        trajectory = attempt.trajectory
        return Turn(
            key=number,
            prompt=trajectory.token_ids,
            budget=min(self._rollout.max_new_tokens, self._rollout.max_context - len(trajectory.token_ids)),
            session_id=attempt.session_id,
            stop_token_ids=self._chat.stop_token_ids,
            top_logprobs=attempt.task.top_logprobs,
            routes=trajectory.routes,
        )

    async def _call(self, attempt: Attempt, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the environment in one of the collector's threads, and return its result.

        The result of an `async def` is awaited in the loop for user code, without a thread.
        """

        def timed() -> Any:
            with attempt.measured():
                return function(*args)

        async def awaited(awaitable: Awaitable[Any]) -> Any:
            with attempt.measured():
                return await awaitable

        started = time.monotonic()
        try:
            with attempt.lane.span("env"):
                returned = await self._threads.call(timed, name)
                if inspect.isawaitable(returned):
                    returned = await self._threads.result_of(awaited(returned), name)
                return returned
        finally:
            attempt.env_seconds += time.monotonic() - started


async def gather_or_cancel(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Run all concurrently; the first failure cancels the others and is raised unchanged."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()

        # Wait for the cancelled tasks, so that none is still running when the error is raised.
        await asyncio.gather(*tasks, return_exceptions=True)
