"""Requests that leave together: one POST, answers of their own, and nobody ends for another."""

import asyncio
import json

import pytest

from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.weights.protocols import ServerError, ServerUnreachable
from tests.helpers.http_server import serving

pytestmark = pytest.mark.unit


def body(rid, top=0, **sampling):
    return {"rid": rid, "input_ids": [1, 2], "sampling_params": sampling, "priority": 0} | (
        {"top_logprobs_num": top} if top else {}
    )


def part(rid, finished=True, **more):
    reason = {"type": "length"} if finished else None
    told = {"output_ids": [7], "meta_info": {"id": rid, "finish_reason": reason}} | more
    return f"data: {json.dumps(told)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def talk(conversation, answer, timeout=20.0):
    """Run `conversation(client, posts)`; `answer(body, post)` gives the parts of a generation's answer."""
    posts, aborted = [], []

    async def handler(path, content):
        asked = json.loads(content)
        if path == "/abort_request":
            aborted.append(asked["rid"])
            return 200, b""
        posts.append(asked)
        given = answer(asked, len(posts))
        return given if isinstance(given, tuple) else (200, given)

    async def run():
        async with serving(handler) as served:
            client = SglangClient(served.url, timeout=timeout)
            try:
                return await conversation(client), served.connections
            finally:
                await client.close()

    result, connections = asyncio.run(run())
    return result, posts, aborted, connections


async def all_of(asked, finished=True):
    rids = asked["rid"] if isinstance(asked["rid"], list) else [asked["rid"]]
    for rid in reversed(rids):
        yield part(rid)
    yield DONE


def together(client, *bodies):
    return asyncio.gather(*(client.generate(one) for one in bodies), return_exceptions=True)


def test_requests_of_one_moment_are_one_post_and_each_gets_its_answer():
    bodies = [body(f"{n:x}", max_new_tokens=n) for n in range(5)]
    results, posts, _, connections = talk(
        lambda client: together(client, *bodies), lambda asked, _: all_of(asked)
    )
    assert [result["meta_info"]["id"] for result in results] == [one["rid"] for one in bodies]
    (post,) = posts
    assert post["rid"] == list("01234") and post["input_ids"] == [[1, 2]] * 5 and post["stream"] is True
    assert [one["max_new_tokens"] for one in post["sampling_params"]] == list(range(5))
    assert connections == 1


def test_requests_of_other_kinds_leave_apart_and_one_alone_looks_as_it_is():
    _, posts, _, _ = talk(
        lambda client: together(client, body("a"), body("b", top=20), body("c", top=20)),
        lambda asked, _: all_of(asked),
    )
    assert posts[0]["rid"] == "a" and posts[0]["input_ids"] == [1, 2]
    assert posts[1]["rid"] == ["b", "c"] and posts[1]["top_logprobs_num"] == 20


def test_turns_one_after_another_use_one_connection():
    async def conversation(client):
        return [await client.generate(body(f"{n}")) for n in range(4)]

    _, posts, _, connections = talk(conversation, lambda asked, _: all_of(asked))
    assert len(posts) == 4 and connections == 1


def test_of_a_growing_answer_only_the_last_part_is_read():
    async def growing(asked):
        for rid in asked["rid"]:
            text = part(rid, finished=False)
            yield text[: len(text) // 2]  # parts of HTTP are not those of the answer
            yield text[len(text) // 2 :]
        for rid in asked["rid"]:
            yield part(rid, output_ids=[7, 8])
        yield DONE

    results, *_ = talk(lambda client: together(client, body("a"), body("b")), lambda asked, _: growing(asked))
    assert [result["output_ids"] for result in results] == [[7, 8], [7, 8]]


def test_one_whose_caller_leaves_is_aborted_and_its_sibling_goes_on():
    gone = asyncio.Event()

    async def patient(asked):
        await gone.wait()
        yield part("b")
        yield DONE

    async def conversation(client):
        leaving, staying = (asyncio.ensure_future(client.generate(body(rid))) for rid in "ab")
        while not client._batches._running or client._batches._waiting:
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        while not aborted_there:
            await asyncio.sleep(0.01)
        gone.set()
        return await staying

    aborted_there = []

    async def handler(path, content):
        asked = json.loads(content)
        if path == "/abort_request":
            aborted_there.append(asked["rid"])
            return 200, b""
        return 200, patient(asked)

    async def run():
        async with serving(handler) as served:
            client = SglangClient(served.url, timeout=20)
            try:
                return await conversation(client)
            finally:
                await client.close()

    assert asyncio.run(run())["meta_info"]["id"] == "b" and aborted_there == ["a"]


@pytest.mark.parametrize("inside", [False, True])
def test_one_that_is_refused_fails_alone(inside):
    """A refusal of the whole POST, or an error in its answer: each is asked alone then."""

    async def error():
        yield b'data: {"error": {"message": "too long"}}\n\n'

    def answer(asked, _):
        rids = asked["rid"] if isinstance(asked["rid"], list) else [asked["rid"]]
        if "b" in rids:
            return error() if inside else (400, b"too long")
        return all_of(asked)

    results, posts, _, _ = talk(lambda client: together(client, *(body(rid) for rid in "abc")), answer)
    assert [isinstance(result, ServerError) for result in results] == [False, True, False]
    assert "too long" in str(results[1]) and not isinstance(results[1], ServerUnreachable)
    assert [post["rid"] for post in posts] == [["a", "b", "c"], "a", "b", "c"]


def test_a_server_that_breaks_off_is_unreachable_for_those_without_an_answer():
    async def half(asked):
        yield part("a")
        raise ConnectionError

    results, *_ = talk(lambda client: together(client, body("a"), body("b")), lambda asked, _: half(asked))
    assert results[0]["meta_info"]["id"] == "a" and isinstance(results[1], ServerUnreachable)


def test_one_that_is_silent_while_its_sibling_streams_is_given_up_alone():
    async def one_sided(asked):
        for _ in range(12):
            yield part("a", finished=False)
            await asyncio.sleep(0.1)
        yield part("a")
        yield DONE

    results, _, aborted, _ = talk(
        lambda client: together(client, body("a"), body("b")), lambda asked, _: one_sided(asked), timeout=0.4
    )
    assert results[0]["meta_info"]["id"] == "a" and isinstance(results[1], ServerUnreachable)
    assert aborted == ["b"]


def test_a_client_that_is_closed_ends_what_waits():
    async def never(asked):
        await asyncio.Event().wait()
        yield b""

    async def conversation(client):
        waiting = asyncio.ensure_future(client.generate(body("a")))
        while not client._batches._running:
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ServerUnreachable):
            await waiting
        with pytest.raises(ServerUnreachable, match="replaced"):
            await client.generate(body("b"))

    talk(conversation, lambda asked, _: never(asked))


def test_a_stream_yields_events_until_done_and_errors_are_raised():
    async def counted(asked):
        yield b'data: {"n": 1}\n\ndata: {"n": 2}\n\n' + DONE + b'data: {"n": 3}\n\n'

    async def conversation(client):
        return [event["n"] async for event in client.stream({})]

    assert talk(conversation, lambda asked, _: counted(asked))[0] == [1, 2]
    with pytest.raises(ServerError, match="answered 400: no"):
        talk(conversation, lambda asked, _: (400, b"no"))


def test_a_kept_connection_that_the_server_ended_is_replaced():
    async def run():
        async def handler(path, content):
            return 200, all_of(json.loads(content))

        async with serving(handler) as served:
            client = SglangClient(served.url, timeout=20)
            try:
                await client.generate(body("a"))
                for writer in list(served.open):
                    writer.close()
                    await writer.wait_closed()
                return await client.generate(body("b")), served.connections
            finally:
                await client.close()

    answer, connections = asyncio.run(run())
    assert answer["meta_info"]["id"] == "b" and connections == 2
