"""Turns against a server that is a function: continuing, streaming, aborting, counting."""

import asyncio
import json

import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.rollout.sglang.turns import Turns
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams, SpecCounts
from tests.helpers.http_server import serving

pytestmark = pytest.mark.unit
END = 1  # the model's own end token, at which the server always stops


def request(name="r", prompt=(5, 6), **sampling):
    return GenerateRequest(
        request_id=name, prompt_ids=list(prompt), sampling=SamplingParams(**{"max_new_tokens": 4} | sampling)
    )


def answer(ids, kind="length", **meta):
    common = {
        "finish_reason": {"type": kind} if kind else None,
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
        "weight_version": "2",
        "weight_versions": [{"version": "2", "start": 0, "end": len(ids)}],
        "cached_tokens": 1,
    }
    return {"output_ids": list(ids), "meta_info": common | meta}


def conversation(talk, answers, max_context=64):
    """Run `talk(turns, client)`; the server gives `answers` in order. Also returns what was sent."""
    sent = []

    async def handler(path, content):
        sent.append((path, json.loads(content)))
        if path != "/generate":
            return 200, b""
        given = answers.pop(0)  # one answer, or several that grow
        lines = [f"data: {json.dumps(one)}\n\n" for one in ([given] if isinstance(given, dict) else given)]
        return 200, ("".join(lines) + "data: [DONE]\n\n").encode()

    async def run():
        async with serving(handler) as served:
            client = SglangClient(served.url, timeout=5)
            turns = Turns(RolloutConfig(max_context=max_context), SpecConfig(), vocab=100)
            try:
                return await talk(turns, client), turns.stats()
            finally:
                await client.close()

    result, stats = asyncio.run(run())
    return result, stats, sent


def play(asked, answers, stream=False, done=None, **options):
    async def talk(turns, client):
        return [part async for part in turns.run(client, asked, stream=stream, done=done)]

    return conversation(talk, answers, **options)


def test_a_turn_the_server_ended_at_its_own_end_token_goes_on_from_there():
    answers = [answer([7, END], "stop"), answer([8, 9], "stop")]
    (result,), stats, sent = play(request(stop_token_ids=(9,)), answers)
    assert result.output_ids.tolist() == [7, END, 8, 9] and result.finish_reason is FinishReason.STOP
    second = sent[1][1]
    assert second["input_ids"] == [5, 6, 7, END] and second["sampling_params"]["max_new_tokens"] == 2
    assert second["rid"] != sent[0][1]["rid"]
    assert stats.generated_tokens == 4 and stats.prefill_tokens == 1 + 3 and stats.running == 0


def test_an_end_token_on_the_last_place_is_the_length():
    (result,), _, sent = play(request(stop_token_ids=(9,), max_new_tokens=2), [answer([7, END], "stop")])
    assert result.finish_reason is FinishReason.LENGTH and len(sent) == 1


def test_an_end_token_that_was_asked_for_ends_the_turn():
    (result,), _, _ = play(request(stop_token_ids=(END,)), [answer([7, END], "stop")])
    assert result.finish_reason is FinishReason.STOP and result.output_ids.tolist() == [7, END]


def test_a_stream_grows_through_the_parts_of_a_turn():
    first = [answer([7], None), answer([7, END], "stop")]
    second = [answer([8], None), answer([8, 9], "stop")]
    parts, _, _ = play(request(stop_token_ids=(9,)), [first, second], stream=True)
    assert [part.output_ids.tolist() for part in parts] == [[7], [7, END, 8], [7, END, 8, 9]]
    assert [part.finish_reason.value for part in parts] == ["abort", "abort", "stop"]
    assert all(part.versions.tolist() == [2] * len(part.output_ids) for part in parts)


def test_a_turn_stays_inside_the_context():
    _, _, sent = play(request(prompt=range(10, 16), max_new_tokens=50), [answer([7, 8])], max_context=8)
    assert sent[0][1]["sampling_params"]["max_new_tokens"] == 2


def test_a_prompt_that_fills_the_context_gives_no_token():
    (result,), _, sent = play(request(prompt=range(10, 18)), [], max_context=8)
    assert result.output_ids.tolist() == [] and result.finish_reason is FinishReason.LENGTH and not sent


def test_a_part_the_server_aborted_is_not_continued():
    (result,), _, sent = play(request(stop_token_ids=(9,)), [answer([7], "abort")])
    assert result.finish_reason is FinishReason.ABORT and len(sent) == 1


def broken_off(ids, version=1):
    """What a stream gave before its server was lost."""
    return GenerateResult(
        request_id="r",
        output_ids=list(ids),
        logprobs=[-2.0] * len(ids),
        entropies=[2.0] * len(ids),
        versions=[version] * len(ids),
        finish_reason=FinishReason.ABORT,
        spec=SpecCounts(),
    )


def test_a_turn_whose_server_was_lost_goes_on_where_its_stream_broke_off():
    done = broken_off([7, 8])
    (result,), _, sent = play(request(), [answer([9, 10])], done=done)
    assert sent[0][1]["input_ids"] == [5, 6, 7, 8] and sent[0][1]["sampling_params"]["max_new_tokens"] == 2
    assert result.output_ids.tolist() == [7, 8, 9, 10] and result.versions.tolist() == [1, 1, 2, 2]
    assert (
        result.logprobs.tolist() == [-2.0, -2.0, -1.0, -1.0] and result.finish_reason is FinishReason.LENGTH
    )


@pytest.mark.parametrize(
    ("ids", "reason"), [([7, 9], FinishReason.STOP), ([7, 8, 7, 8], FinishReason.LENGTH)]
)
def test_a_stream_that_lost_only_its_last_word_is_a_whole_turn(ids, reason):
    (result,), _, sent = play(request(stop_token_ids=(9,)), [], done=broken_off(ids))
    assert result.output_ids.tolist() == ids and result.finish_reason is reason and not sent


def test_aborting_uses_the_servers_id_of_the_running_request_alone():
    async def talk(turns, client):
        async with turns._registered("1") as one, turns._registered("12") as twelve:
            await turns.abort(client, ["1", "unknown"])
            assert turns.stats().running == 2 and len(one) == len(twelve)
            return one

    rid, _, sent = conversation(talk, [])
    assert sent == [("/abort_request", {"rid": rid})]


def test_two_requests_of_one_id_are_refused():
    async def talk(turns, client):
        async with turns._registered("r"):
            with pytest.raises(ValueError, match="already running"):
                await anext(turns.run(client, request()))

    conversation(talk, [])


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ([], {}, "is empty"),
        ([100], {}, r"outside 0\.\.99"),
        ([-1], {}, r"outside 0\.\.99"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens"),
        ([5], {"temperature": -1.0}, "temperature"),
    ],
)
def test_impossible_requests_are_refused(prompt, sampling, said):
    with pytest.raises(ValueError, match=said):
        Turns(RolloutConfig(), SpecConfig(), vocab=100).check(request(prompt=prompt, **sampling))


def test_greedy_verification_refuses_to_sample():
    turns = Turns(RolloutConfig(), SpecConfig(mode="greedy"), vocab=100)
    turns.check(request(temperature=0.0))
    with pytest.raises(ValueError, match=r"spec\.mode=greedy"):
        turns.check(request(temperature=1.0))
