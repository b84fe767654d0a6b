"""The endpoint as other people's clients see it, and what malformed, large and slow requests get."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import anthropic
import httpx
import openai
import pytest

from rlpipe.config.env import ToolParser
from rlpipe.rollout.chat import ChatFormat
from rlpipe.serve import messages
from rlpipe.serve import server as server_module
from rlpipe.serve.server import AgentServer
from tests.helpers.agents import CALL, TOOL, Sampler, assert_recorded, attempt_at, templates, tokenizer_for

pytestmark = pytest.mark.unit
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model():
    tokenizer = tokenizer_for(templates()["qwen2_5"])
    return ChatFormat(tokenizer), len(tokenizer)


class Served:
    """An attempt that is served, with what its model writes."""

    def __init__(self, session, sampler, trajectory):
        self.session, self.sampler, self.trajectory = session, sampler, trajectory
        self.root, self.key = session.address.root_url, session.address.api_key
        self.url = f"{self.root}/v1"

    def openai(self, **options):
        """The client of OpenAI."""
        return openai.AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0, **options)

    def http(self, **options):
        """A plain client with the key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=self.root, headers=headers, timeout=10, **options)


def served(model, use, texts=(), **limits):
    """Run `use(served)` against a server; return what it returns, and the attempt."""

    @asynccontextmanager
    async def serving():
        chat, vocab = model
        sampler = Sampler(chat, vocab)
        sampler.texts = list(texts)
        endpoint = AgentServer("127.0.0.1", ToolParser.HERMES)
        attempt = attempt_at(chat, sampler, **({"max_turns": 32, "max_context": 2048} | limits))
        session = await endpoint.open(attempt)
        try:
            yield Served(session, sampler, attempt.trajectory)
        finally:
            await session.close()
            await endpoint.close()

    async def run():
        async with serving() as one:
            return await use(one), one

    returned, one = asyncio.run(run())
    assert_recorded(one.trajectory, one.sampler.sampled)
    return returned, one


def test_the_openai_client_streams_calls_tools_and_continues_its_own_answers(model):
    async def use(one):
        client, messages = one.openai(), list(HELLO)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="any",
                messages=messages,
                tools=[TOOL],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        (call,) = [c for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or []]
        called = {"id": call.id, "type": "function", "function": call.function.model_dump()}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": call.id, "content": "page a"},
        ]
        answer = await client.chat.completions.create(
            model="any", messages=messages, tools=[TOOL], logprobs=True, top_logprobs=1
        )
        return chunks, answer

    (chunks, answer), one = served(model, use, [CALL, "done"])
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(one.sampler.sampled[0][1].output_ids)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("done", "stop")
    logprobs = [each.logprob for each in answer.choices[0].logprobs.content]
    assert logprobs == one.sampler.sampled[1][1].logprobs.tolist()
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 1
    assert (one.trajectory.info["segments"], one.trajectory.info["drift"]) == (1, 0)
    assert one.trajectory.top_logprobs is None  # only the client asked for them


def test_the_openai_clients_responses_continue_their_items(model):
    async def use(one):
        client = one.openai()
        tools = [{"type": "function", **TOOL["function"]}]
        items = [{"role": "user", "content": "hello"}]
        first = await client.responses.create(model="any", instructions="Be brief.", input=items, tools=tools)
        (call,) = [item for item in first.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "page a"})
        async with client.responses.stream(
            model="any", instructions="Be brief.", input=items, tools=tools
        ) as stream:
            kinds = [event.type async for event in stream]
            last = await stream.get_final_response()
        return first, kinds, last

    (first, kinds, last), one = served(model, use, [f"I read. {CALL}", "done"])
    assert [item.type for item in first.output] == ["message", "function_call"]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert last.output_text == "done"
    assert (one.trajectory.info["segments"], one.trajectory.info["drift"]) == (1, 0)


def test_the_anthropic_client_streams_calls_tools_and_continues_its_own_answers(model):
    async def use(one):
        client = anthropic.AsyncAnthropic(base_url=one.root, api_key=one.key, max_retries=0)
        function = TOOL["function"]
        tools = [{"name": "read", "description": "Reads.", "input_schema": function["parameters"]}]
        options = {"model": "any", "max_tokens": 32, "system": "Be brief.", "tools": tools}
        messages = list(HELLO)
        async with client.messages.stream(messages=messages, **options) as stream:
            first = await stream.get_final_message()
        call = first.content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "page a"}
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        last = await client.messages.create(messages=messages, **options)
        with pytest.raises(anthropic.BadRequestError) as error:
            await client.messages.create(messages=[], **options)
        return first, last, error.value

    (first, last, error), one = served(model, use, [f"I read. {CALL}", "done"])
    assert (first.stop_reason, first.content[-1].input) == ("tool_use", {"page": "a"})
    assert (last.stop_reason, last.content[0].text) == ("end_turn", "done")
    assert error.body["error"]["type"] == "invalid_request_error"
    assert (one.trajectory.info["segments"], one.trajectory.info["drift"]) == (1, 0)


def test_the_client_of_renderers_gets_the_sampled_ids_and_logprobs(model):
    """`renderers.client.generate` is how verifiers' train client asks for tokens."""
    from renderers import DefaultRenderer, DefaultRendererConfig
    from renderers.client import generate

    tokenizer = tokenizer_for(templates()["qwen2_5"])

    async def use(one):
        return await generate(
            client=one.openai(),
            renderer=DefaultRenderer(tokenizer, DefaultRendererConfig()),
            model="policy",
            messages=[],
            prompt_ids=[5, 6, 7],
            sampling_params={"max_tokens": 16},
        )

    reply, one = served(model, use, ["fine"])
    ((turn, result),) = one.sampler.sampled
    assert turn.budget == 16 and turn.prompt.tolist() == [5, 6, 7]
    assert reply["completion_ids"] == result.output_ids.tolist()
    assert reply["completion_logprobs"] == result.logprobs.tolist()


BAD = {
    "not JSON": (b"{", 400, "malformed"),
    "a list": (b"[]", 400, "malformed"),
    "deep": (b"[" * 100_000, 400, "malformed"),
    "no messages": (b"{}", 400, "invalid_request"),
    "a role": (b'{"messages": [{"role": "king", "content": "x"}]}', 400, "invalid_request"),
    "not a number": (b'{"messages": [], "temperature": NaN}', 400, "malformed"),
    "a number beyond a float": (b'{"messages": [], "temperature": 1e999}', 400, "malformed"),
    "a deep schema": (
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f", '
        + b'"parameters": '
        + b'{"a": ' * 600
        + b"{}"
        + b"}" * 600
        + b"}}]}",
        400,
        "malformed",
    ),
    "half a surrogate in a call": (
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\ud800"}'}}],
                    },
                    {"role": "tool", "content": "x"},
                ]
            }
        ).encode(),
        400,
        "invalid_request",
    ),
    "a stream that is no flag": (
        b'{"messages": [{"role": "user", "content": "x"}], "stream": "no"}',
        400,
        "invalid_request",
    ),
    "half a surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_request"),
    "an image": (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        400,
        "invalid_request",
    ),
    "its own turn last": (b'{"messages": [{"role": "assistant", "content": "x"}]}', 400, "invalid_request"),
    "n": (b'{"messages": [{"role": "user", "content": "x"}], "n": true}', 400, "invalid_request"),
    "a schema": (
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}',
        400,
        "invalid_request",
    ),
    "a forced tool": (
        b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}',
        400,
        "invalid_request",
    ),
    "too many tokens": (
        json.dumps({"messages": [{"role": "user", "content": "word " * 3000}]}).encode(),
        400,
        "context_length_exceeded",
    ),
    "too large": (b" " * (server_module.MAX_BODY + 1), 413, "http"),
}


def test_every_bad_request_has_an_answer_that_says_what_is_wrong(model):
    async def use(one):
        async with one.http() as client:
            answers = {}
            for name, (body, _, _) in BAD.items():
                reply = await client.post("/v1/chat/completions", content=body)
                answers[name] = reply.status_code, reply.json()["error"]["code"]
            return answers

    answers, one = served(model, use)
    assert answers == {name: (status, code) for name, (_, status, code) in BAD.items()}
    assert one.trajectory.num_turns == 0


def test_ids_that_are_no_tokens_are_refused_before_they_reach_the_engine(model):
    async def use(one):
        async with one.http() as client:
            path = "/inference/v1/generate"
            return [
                (await client.post(path, json={"token_ids": ids})).status_code
                for ids in ([5, 6], [5, model[1]], [5, model[1] - 1])
            ]

    statuses, one = served(model, use, ["fine", "fine"])
    assert statuses == [200, 400, 200] and len(one.sampler.sampled) == 2


def test_a_path_that_takes_another_method_says_which(model):
    async def use(one):
        async with one.http() as client:
            reply = await client.get("/v1/chat/completions")
            return reply.status_code, reply.headers["Allow"]

    assert served(model, use)[0] == (405, "POST")


def test_calls_beside_results_without_a_text_stay_in_an_anthropic_conversation():
    block = {"type": "tool_use", "id": "a", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "b", "content": "page"}
    body = {"max_tokens": 1, "messages": [{"role": "assistant", "content": [block, result]}]}
    assert [message["role"] for message in messages.request_of(body).messages] == ["tool", "assistant"]


def test_a_key_opens_its_attempt_only_while_it_runs(model):
    async def use(one):
        body = {"messages": HELLO}
        async with httpx.AsyncClient(base_url=one.root) as client:
            statuses = [(await client.get("/health")).status_code]
            for headers in ({}, {"Authorization": "Bearer guess"}, {"x-api-key": one.key}):
                reply = await client.post("/v1/chat/completions", json=body, headers=headers)
                statuses.append(reply.status_code)
            statuses.append(
                (await client.get(f"/session/{one.key}/v1/models")).json()["data"][0]["max_model_len"]
            )
            await one.session.close()
            reply = await client.post(f"/session/{one.key}/v1/chat/completions", json=body)
            return [*statuses, reply.status_code]

    statuses, _ = served(model, use, ["fine"])
    assert statuses == [200, 401, 401, 200, 2048, 401]


def test_a_body_that_does_not_arrive_is_given_up(model, monkeypatch):
    monkeypatch.setattr(server_module, "READ_S", 0.05)

    async def use(one):
        async def slowly():
            yield b"{"
            await asyncio.sleep(0.5)
            yield b"}"

        async with one.http() as client:
            return (await client.post("/v1/chat/completions", content=slowly())).status_code

    assert served(model, use)[0] == 408


def test_a_client_that_leaves_ends_its_request(model):
    async def use(one):
        one.sampler.hold = asyncio.Event()
        async with one.http() as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json={"messages": HELLO}, timeout=0.2)
        for _ in range(100):
            if one.session._counts["abandoned"]:
                break
            await asyncio.sleep(0.01)
        one.sampler.hold = None
        return one.session._counts["abandoned"]

    abandoned, one = served(model, use)
    assert abandoned == 1 and one.trajectory.num_turns == 0


def test_a_stream_is_alive_while_its_turn_is_generated_and_says_when_it_fails(model, monkeypatch):
    monkeypatch.setattr(server_module, "_PING_S", 0.02)

    async def use(one):
        one.sampler.hold = asyncio.Event()
        lines = []
        one.sampler.result = lambda turn: 1 / 0
        body = {"messages": HELLO, "stream": True}
        async with one.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                lines.append(line)
                if len(lines) == 3:
                    one.sampler.hold.set()
        return lines

    lines, _ = served(model, use)
    assert lines[0] == ": generating"
    assert "event: error" in lines and "engine_failed" in lines[lines.index("event: error") + 1]


def test_settings_that_the_run_decides_are_named_and_counted(model):
    async def use(one):
        async with one.http() as client:
            body = {"messages": HELLO, "temperature": 0.2, "top_p": 1, "seed": 3}
            return (await client.post("/v1/chat/completions", json=body)).headers["x-rlpipe-overridden"]

    named, one = served(model, use, ["fine"])
    assert named == "temperature,seed" and one.trajectory.info["overridden"] == 1
