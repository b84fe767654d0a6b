"""One attempt of an agent: its requests, and the exact tokens of the conversations that they form.

    request -> plan: which recorded turn does it continue? -> generate -> record -> reply

A turn is recorded with the ids that the engine sampled, and never encoded again. A request continues a
recorded turn if its messages begin with the recorded messages, and if the chat template's rendering begins
with the recorded text; then only the text after it is encoded. Any other request (an edited or compacted
history, a retry, a parallel request, a template that drops earlier thinking) begins a new segment of the
trajectory; recorded tokens that it repeats are its context. `drift` counts the requests that contain turns
but do not continue the last one.

Invariants: a segment has exactly the tokens of its last request's prompt and turn; every sampled token counts
as sampled in exactly one segment; at most one request continues a turn. A request that ends early (its client
disconnected) records nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlpipe.config.env import ToolParser
from rlpipe.envs.base import AgentAddress
from rlpipe.envs.tools.parsers import MalformedCall, ParsedTurn, parse_turn
from rlpipe.rollout.agents import AgentAttempt
from rlpipe.rollout.collector import gather_or_cancel
from rlpipe.rollout.turn import Turn, joined, shortened
from rlpipe.serve.requests import ApiError, Call, ChatRequest, Message, Reply
from rlpipe.types import FinishReason, GenerateResult, Trajectory

_STOP_SLICE = 32  # tokens generated between two searches for stop texts
MAX_AT_ONCE = 64  # concurrent requests of one attempt
_SHOWN = 300  # characters of a failure that an answer shows


@dataclass(slots=True, kw_only=True)
class _Recorded:
    """A generated turn: the location of its tokens, and the conversation up to its end.

    segment, length: the turn ends at token `length` of `segment`. messages: messages up to the turn's end, as
    the model read and wrote them (None: the client sent ids). text: text of all tokens, without the turn's
    stop token. continued: whether a request continues the turn.
    """

    segment: int
    length: int
    messages: list[Message] | None
    text: str
    continued: bool = False


@dataclass(slots=True, kw_only=True)
class _Plan:
    """The input from which a request generates.

    prompt: ids of all tokens before the turn. after: the recorded turn that the request continues or repeats,
    if any. extends: whether the segment of that turn is extended. messages, text: see `_Recorded`. keys: keys
    of the first 0, 1, 2, ... messages. segment: index of the segment that gets the turn.
    """

    prompt: np.ndarray
    after: _Recorded | None
    extends: bool
    messages: list[Message] | None
    text: str
    keys: list[str]
    segment: int


class Session:
    """Implements `rlpipe.rollout.agents.AgentSession`.

    parser: parses tool calls. on_close: called when no further request is served.
    """

    def __init__(
        self,
        attempt: AgentAttempt,
        parser: ToolParser,
        address: AgentAddress,
        *,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_close = on_close
        self.address, self.limit, self.cut = address, "", False
        self.texts, self.turns = [], []
        self.failure: BaseException | None = None
        self._attempt, self._chat, self._parser = attempt, attempt.chat, parser
        self._segments: dict[int, Trajectory] = {}
        self._segment_turns: dict[int, list[dict[str, str]]] = defaultdict(list)
        self._opened = 0  # segments that have a number; an abandoned segment stays empty
        self._by_key: dict[str, list[_Recorded]] = defaultdict(list)
        self._turns: list[_Recorded] = []
        self._seen: Counter[str] = Counter()  # number of requests by prompt
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._counts: Counter[str] = Counter(requests=0, drift=0)
        self._generated = 0
        self._checked_tools: set[str] = set()

    @property
    def max_context(self) -> int:
        """Limit of one conversation in tokens."""
        return self._attempt.max_context

    # ---- requests ----

    async def chat(self, request: ChatRequest) -> list[Reply]:
        """Generate the turns of a request. Raises ApiError."""
        if not request.messages:
            raise ApiError(400, "messages is empty: send one message or more.")
        if request.messages[-1]["role"] == "assistant":
            raise ApiError(400, "the last message is the assistant's: the model writes the next one itself.")

        self._counts["overridden"] += bool(request.overridden)
        with self._admitted(request.n):
            return await gather_or_cancel(self._chat_turn(request) for _ in range(request.n))

    async def tokens(
        self, ids: Sequence[int], *, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Reply:
        """Generate one turn after token ids. Raises ApiError."""
        with self._admitted(1):
            plan = self._plan_tokens(np.asarray(ids, np.int32))
            request = ChatRequest(messages=[], max_tokens=max_tokens)
            result = await self._generate(plan, request, (*self._chat.stop_token_ids, *stop_token_ids))
            self._record(plan, result, self._chat.decode(result.output_ids.tolist()))
            return self._reply(plan, result, ParsedTurn(calls=(), content=self.texts[-1]), [], request)

    async def close(self) -> None:
        """Refuse further requests, end running ones, and write all recorded data to the trajectory."""
        if self._closed:
            return

        self._closed = True
        self._on_close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

        trajectory = self._attempt.trajectory
        for number in range(self._opened):
            self._attempt.end_session(self._session_id(number))
            if number in self._segments:
                trajectory.append_segment(self._segments[number])
                self.turns += self._segment_turns[number]

        trajectory.info |= dict(self._counts)
        trajectory.info["segments"] = len(self._segments)

    @contextmanager
    def _admitted(self, turns: int) -> Iterator[None]:
        """Count the turns of a request, and make `close` end it. Raises ApiError if a limit is exceeded."""
        if self._closed:
            raise ApiError(401, "the attempt of this key has ended.", "session_ended")
        if self.failure is not None:
            raise ApiError(503, f"the engine failed: {str(self.failure)[:_SHOWN]}", "engine_failed")
        if len(self._running) >= MAX_AT_ONCE:
            raise ApiError(429, f"{MAX_AT_ONCE} requests of this attempt run already: wait for one.", "busy")
        if self._counts["requests"] + turns > self._attempt.max_turns:
            self.limit = "max_turns"
            limit = f"env.max_turns={self._attempt.max_turns}"
            raise ApiError(400, f"the attempt has used up its turns: {limit}.", "max_turns")

        self._counts["requests"] += turns
        task = asyncio.current_task()
        assert task is not None, "a request runs in a task"
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    async def _chat_turn(self, request: ChatRequest) -> Reply:
        """Generate, record and parse one turn. Raises ApiError."""
        plan = self._plan(request)
        result = await self._generate(plan, request, self._chat.stop_token_ids)
        raw = self._chat.decode(result.output_ids.tolist())
        parsed, calls = self._parsed(raw, request)

        # The client will send the message back in this form.
        reply: Message = {"role": "assistant", "content": parsed.content}
        if calls:
            reply["tool_calls"] = [
                {"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in calls
            ]
        self._record(plan, result, raw, _key(plan.keys[-1], reply))
        return self._reply(plan, result, parsed, calls, request)

    def _parsed(self, raw: str, request: ChatRequest) -> tuple[ParsedTurn, list[Call]]:
        """Return a turn as the client gets it, cut at a stop text, and its tool calls."""
        if stops := [at for stop in request.stop if (at := raw.find(stop)) >= 0]:
            raw = raw[: min(stops)]

        plain = ParsedTurn(calls=(), content=raw)
        if not request.tools:
            return plain, []

        try:
            parsed = parse_turn(raw, self._parser)
        except MalformedCall:
            # The client gets the malformed text, as from any server.
            self._counts["malformed_calls"] += 1
            return plain, []

        number = len(self.texts)
        calls = [
            Call(id=f"call_{number}_{index}", name=call.name, arguments=json.dumps(call.arguments))
            for index, call in enumerate(parsed.calls)
        ]
        return (parsed, calls) if calls else (plain, [])

    # ---- which turn does a request continue? ----

    def _plan(self, request: ChatRequest) -> _Plan:
        """Plan a request: find the recorded turn that it continues, and claim it. Raises ApiError."""
        messages, tools = self._chat.harmless(request.messages), self._chat.harmless(request.tools)
        keys = _keys(request.messages, tools)
        text = self._rendered(messages, tools)

        # Find the longest prefix of the messages that ends with a recorded turn.
        known = next((k for k in range(len(keys) - 2, 0, -1) if keys[k] in self._by_key), 0)
        plan = None
        if known:
            turns = self._by_key[keys[known]]
            turn = next((turn for turn in turns if not turn.continued), turns[0])
            plan = self._continued(turn, messages, tools, keys=keys, text=text)

        # A client that did not change the history continues the assistant's last turn.
        spoken = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
        if spoken and (plan is None or known < spoken[-1]):
            self._counts["drift"] += 1
            self._counts["drift_template"] += known >= spoken[-1]

        if plan is None:
            ids = np.asarray(self._chat.encode(text), np.int32)
            plan = self._planned(ids, None, messages=messages, text=text, keys=keys)
        return plan

    def _continued(
        self,
        turn: _Recorded,
        messages: list[Message],
        tools: list[dict[str, Any]],
        *,
        keys: list[str],
        text: str,
    ) -> _Plan | None:
        """Return the plan that continues a turn; None if the template does not render the recorded text.

        messages, text: the conversation as the client sends it, and its rendered text. The template may
        render the client's version of the recorded turn differently (its calls), but the text after the turn
        must be equal.
        """
        if turn.messages is None:
            return None

        recorded = [*turn.messages, *messages[len(turn.messages) :]]
        rendered = text if recorded == messages else self._rendered(recorded, tools)
        ids = self._chat.following(rendered, before=turn.text, last_id=int(self._ids_of(turn)[-1]))
        if ids is None or not text.endswith(rendered[len(turn.text) :]):
            return None

        prompt = np.concatenate((self._ids_of(turn), np.asarray(ids, np.int32)))
        return self._planned(prompt, turn, messages=recorded, text=rendered, keys=keys)

    def _plan_tokens(self, ids: np.ndarray) -> _Plan:
        """Plan a request of token ids: find the longest recorded prefix. Raises ApiError."""
        before = [
            t for t in self._turns if t.length < len(ids) and np.array_equal(self._ids_of(t), ids[: t.length])
        ]
        after = max(before, key=lambda turn: (turn.length, not turn.continued), default=None)
        new = ids[after.length if after else 0 :]
        if new.max() >= self._chat.vocab:
            raise ApiError(400, f"token_ids: {new.max()} is not a token of this model ({self._chat.vocab}).")
        return self._planned(ids, after, messages=None, text="", keys=[""])

    def _planned(
        self,
        prompt: np.ndarray,
        after: _Recorded | None,
        *,
        messages: list[Message] | None,
        text: str,
        keys: list[str],
    ) -> _Plan:
        """Check the length of a prompt, and claim the turn before it. Raises ApiError."""
        limit = self._attempt.max_context
        if len(prompt) >= limit:
            self.limit = "context"
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
                f"{len(prompt)} tokens (rollout.max_context).",
                "context_length_exceeded",
            )

        # If another request has continued the turn, it is only context here: a new segment begins.
        extends = after is not None and not after.continued
        if after is not None and extends:
            after.continued = True
            segment = after.segment
        else:
            segment, self._opened = self._opened, self._opened + 1

        return _Plan(
            prompt=prompt,
            after=after,
            extends=extends,
            messages=messages,
            text=text,
            keys=keys,
            segment=segment,
        )

    def _rendered(self, messages: list[Message], tools: list[dict[str, Any]]) -> str:
        """Return a conversation as the template writes it. Raises ApiError if the template refuses it."""
        try:
            if tools and (names := json.dumps(tools)) not in self._checked_tools:
                self._chat.check_tools(tools)
                self._checked_tools.add(names)
            text = self._chat.rendered(messages, tools)
            text.encode()  # half a surrogate pair, in any field, is not valid text
            return text
        except Exception as error:  # templates raise errors of jinja and, if a field is missing, of Python
            reason = f"{type(error).__name__}: {str(error)[:_SHOWN]}"
            raise ApiError(400, f"the model's chat template refuses this conversation: {reason}") from error

    def _ids_of(self, turn: _Recorded) -> np.ndarray:
        return self._segments[turn.segment].token_ids[: turn.length]

    def _session_id(self, segment: int) -> str:
        return f"{self._attempt.session_id}.{segment}"

    # ---- generating and recording ----

    async def _generate(
        self, plan: _Plan, request: ChatRequest, stop_token_ids: Sequence[int]
    ) -> GenerateResult:
        """Generate the turn of a plan. If the engine fails, release the claim and raise ApiError."""
        attempt, prompt = self._attempt, plan.prompt
        budget = min(attempt.max_new_tokens, attempt.max_context - len(prompt), request.max_tokens or 1 << 30)

        # Alternatives for one prompt have different seeds, which do not depend on the order of requests.
        name = hashlib.blake2b(prompt.tobytes(), digest_size=8).hexdigest()
        self._seen[name] += 1
        turn = Turn(
            key=f"{name}.{self._seen[name]}",
            prompt=prompt,
            budget=budget,
            session_id=self._session_id(plan.segment),
            stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
            top_logprobs=max(attempt.top_logprobs, request.top_logprobs),
        )

        try:
            if request.stop:
                return await self._generate_until(turn, request.stop)
            return await attempt.generate(turn)
        except asyncio.CancelledError:
            self._counts["abandoned"] += not self._closed
            self._give_back(plan)
            raise
        except Exception as error:
            self.failure = error
            self._give_back(plan)
            raise ApiError(503, f"the engine failed: {str(error)[:_SHOWN]}", "engine_failed") from error

    async def _generate_until(self, turn: Turn, stops: Sequence[str]) -> GenerateResult:
        """Generate a turn in slices, up to the token that completes a stop text."""
        result: GenerateResult | None = None
        while True:
            done = 0 if result is None else len(result.output_ids)
            prompt = turn.prompt if result is None else np.concatenate((turn.prompt, result.output_ids))
            budget = min(_STOP_SLICE, turn.budget - done)
            part = await self._attempt.generate(
                replace(turn, key=f"{turn.key}.{done}", prompt=prompt, budget=budget)
            )
            result = part if result is None else joined(result, part)

            if end := self._end_at(result.output_ids.tolist(), stops, done):
                result = shortened(result, end)
                result.finish_reason = FinishReason.STOP
                return result
            if result.finish_reason is not FinishReason.LENGTH or len(result.output_ids) >= turn.budget:
                return result

    def _end_at(self, ids: list[int], stops: Sequence[str], start: int) -> int:
        """Return the number of tokens that complete a stop text; 0 if none is complete."""
        if not any(stop in self._chat.decode(ids) for stop in stops):
            return 0
        return next(
            end
            for end in range(start + 1, len(ids) + 1)
            if any(stop in self._chat.decode(ids[:end]) for stop in stops)
        )

    def _give_back(self, plan: _Plan) -> None:
        """Release a plan's claim, so that another request can continue the turn."""
        if plan.after is not None and plan.extends:
            plan.after.continued = False

    def _record(self, plan: _Plan, result: GenerateResult, raw: str, key: str = "") -> None:
        """Append a turn to the segment of its plan. raw: its text. key: key of all messages."""
        attempt, trajectory = self._attempt, self._attempt.trajectory
        segment = self._segments.get(plan.segment)
        if segment is None:
            segment = Trajectory(
                trajectory_id=trajectory.trajectory_id,
                group_id=trajectory.group_id,
                instance_id=trajectory.instance_id,
                prompt_length=len(plan.prompt),
            )
            self._segments[plan.segment] = segment

        # Append the tokens between the last turn and this one.
        context = plan.prompt[len(segment.token_ids) :]
        segment.append_context(context)
        self._segment_turns[plan.segment] += [*self._new_messages(plan, context), {"action": raw}]

        # Do not record alternatives that only the client requested.
        top = result.top_logprobs and [each[: attempt.top_logprobs] for each in result.top_logprobs]
        segment.append_sampled(replace(result, top_logprobs=top if attempt.top_logprobs else None))
        self.cut |= result.finish_reason is FinishReason.LENGTH

        # A later request finds the turn by its key (as clients see it), and compares the text (as the model
        # wrote it).
        messages = None if plan.messages is None else [*plan.messages, {"role": "assistant", "content": raw}]
        turn = _Recorded(
            segment=plan.segment, length=len(segment.token_ids), messages=messages, text=plan.text + raw
        )
        self._turns.append(turn)
        self.texts.append(raw)
        if key:
            self._by_key[key].append(turn)

    def _new_messages(self, plan: _Plan, context: np.ndarray) -> list[dict[str, str]]:
        """Return role and text of the messages that a plan adds to its segment. context: their tokens."""
        if plan.messages is None:  # the client sent ids, so the roles are not known
            return [{"role": "tokens", "text": self._chat.decode(context.tolist())}]

        before = plan.after.messages if plan.after is not None and plan.extends else None
        new = plan.messages[len(before or []) :]
        return [{"role": message["role"], "text": _text(message)} for message in new]

    def _reply(
        self, plan: _Plan, result: GenerateResult, parsed: ParsedTurn, calls: list[Call], request: ChatRequest
    ) -> Reply:
        """Return the reply in the common form of all dialects."""
        ids = result.output_ids.tolist()
        top = [
            [(self._chat.token_texts([token])[0], p) for token, p in each[: request.top_logprobs]]
            for each in (result.top_logprobs or [])
        ]
        finish = (
            "length" if result.finish_reason is FinishReason.LENGTH else "tool_calls" if calls else "stop"
        )
        return Reply(
            content=parsed.content,
            calls=calls,
            finish=finish,
            ids=result.output_ids,
            logprobs=result.logprobs,
            texts=self._chat.token_texts(ids),
            top=top or [[] for _ in ids],
            prompt_tokens=len(plan.prompt),
            cached_tokens=plan.after.length if plan.after else 0,
        )


def _text(message: Message) -> str:
    """Return the content of a message and its tool calls as one text."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join([message["content"], *calls] if message["content"] else calls)


def _keys(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[str]:
    """Return keys of the first 0, 1, 2, ... messages; equal keys mean equal conversations."""
    keys = [_key("", {"tools": tools})]
    for message in messages:
        keys.append(_key(keys[-1], message))
    return keys


def _key(before: str, message: Message) -> str:
    """Return the key of a conversation plus one message; ids of calls, made by the server, do not count."""
    if message.get("tool_calls"):
        message = {**message, "tool_calls": [call["function"] for call in message["tool_calls"]]}
    text = json.dumps([before, message], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
