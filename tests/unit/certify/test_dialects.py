"""Servers of every dialect are asked in their own way, and what they lack is seen, not assumed."""

import asyncio
import json

import numpy as np
import pytest

from rlpipe.certify.dialects import Prompt, Server
from tests.helpers.http_server import serving

pytestmark = pytest.mark.unit
PROBE = Prompt(text="two words", ids=[5, 6])


def open_and_sample(answer, count=3, temperature=0.7, **options):
    """The server's features, three samples of it, and the bodies that it got."""
    bodies = []

    async def respond(path, body):
        content = json.loads(body) if body else None
        bodies.append((path, content))
        status, reply = answer(path, content)
        return status, json.dumps(reply).encode()

    async def run():
        async with serving(respond) as served:
            server = await Server.open(served.url, PROBE, **options)
            try:
                sampled = await server.sample(PROBE, count=count, temperature=temperature, tokens=2)
                return server.features, sampled
            finally:
                await server.close()

    features, answers = asyncio.run(run())
    return features, answers, bodies


def sglang(path, body):
    if path == "/server_info":
        info = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
        return 200, info | {"speculative_use_rejection_sampling": True, "dtype": "bfloat16"}
    meta = {"output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]], "spec_verify_ct": 1}
    meta |= {"spec_num_proposed_drafts": 3, "spec_correct_drafts_histogram": [0, 1]}
    return 200, [{"output_ids": [7, 8], "meta_info": meta}] * body["sampling_params"]["n"]


def test_sglang_is_known_by_its_server_info():
    features, answers, bodies = open_and_sample(sglang)
    assert (features.gamma, features.mode, features.dtype) == (3, "rejection", "bfloat16")
    assert features.missing() == []
    assert [a.ids for a in answers] == [[7, 8]] * 3 and answers[0].logprobs == [-0.5, -0.25]
    assert (answers[0].accepted, answers[0].verify_steps) == (1, 1)
    assert bodies[-1][1]["input_ids"] == [5, 6] and bodies[-1][1]["sampling_params"]["temperature"] == 0.7


def vllm(path, body):
    """vLLM's completions: ids in and out, logprobs, n, but not of a greedy answer."""
    if path == "/v1/models":
        return 200, {"data": [{"id": "served"}]}
    if path != "/v1/completions":
        return 404, {"error": "no such path"}
    if body.get("n", 1) > 1 and not body["temperature"]:
        return 400, {"error": "n must be 1 when using greedy sampling"}
    choice = {"text": "ab"}
    if body.get("return_token_ids"):
        choice["token_ids"] = [7, 8]
    if body.get("logprobs"):
        choice["logprobs"] = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25]}
    return 200, {"choices": [choice] * body.get("n", 1)}


def test_vllm_gives_ids_and_log_probabilities():
    features, answers, bodies = open_and_sample(vllm)
    assert features.dialect == "OpenAI completions"
    assert features.missing() == ["reports no acceptance"] and features.copies
    assert answers[2].ids == [7, 8] and answers[2].logprobs == [-0.5, -0.25]
    assert bodies[-1][1]["prompt"] == [5, 6] and bodies[-1][1]["model"] == "served"


def test_greedy_answers_are_asked_for_one_at_a_time():
    _, answers, bodies = open_and_sample(vllm, temperature=0.0)
    assert len(answers) == 3 and "n" not in bodies[-1][1]


def test_ids_are_read_from_texts_of_tokens_where_an_older_server_writes_them_so():
    def older(path, body):
        status, answer = vllm(path, {k: v for k, v in (body or {}).items() if k != "return_token_ids"})
        for choice in answer.get("choices", []):
            if "logprobs" in choice and body.get("return_tokens_as_token_ids"):
                choice["logprobs"]["tokens"] = ["token_id:7", "token_id:8"]
        return status, answer

    features, answers, _ = open_and_sample(older)
    assert features.ids_out and answers[0].ids == [7, 8]


@pytest.mark.parametrize("processed", [False, True])
def test_ids_are_read_from_the_rows_of_log_probabilities_of_llama_cpp(processed):
    """processed: with `post_sampling_probs` it gives probabilities, 0 for a token that a sampler removed."""

    said = [("prob", 0.5), ("prob", 0.0)] if processed else [("logprob", -0.5), ("logprob", -3e38)]

    def llama_cpp(path, body):
        status, answer = vllm(path, {k: v for k, v in (body or {}).items() if k != "return_token_ids"})
        for choice in answer.get("choices", []):
            if "logprobs" in choice:
                rows = [{"id": 7 + n, "token": "a", name: value} for n, (name, value) in enumerate(said)]
                choice["logprobs"] = {"content": rows}
        return status, answer

    features, answers, bodies = open_and_sample(llama_cpp)
    assert features.missing() == ["reports no acceptance"]
    assert "ignore_eos" not in bodies[-1][1]  # it would forbid the end token
    assert answers[0].ids == [7, 8]
    assert np.allclose(answers[0].logprobs, [np.log(0.5), -np.inf] if processed else [-0.5, -3e38])


def text_only(path, body):
    """As transformers' server: unknown fields and ids are refused."""
    if path == "/v1/models":
        return 200, {"data": [{"id": "served"}]}
    if path != "/v1/completions":
        return 404, {"error": "no such path"}
    if set(body) - {"model", "prompt", "temperature", "max_tokens"} or not isinstance(body["prompt"], str):
        return 422, {"error": "unsupported"}
    return 200, {"choices": [{"text": " a"}]}


def test_a_server_of_text_only_is_asked_one_at_a_time_and_what_it_lacks_is_said():
    features, answers, bodies = open_and_sample(text_only)
    assert features.missing() == [
        "takes no token ids",
        "returns no token ids",
        "returns no log-probabilities",
        "reports no acceptance",
    ]
    assert not features.copies and len(answers) == 3
    assert bodies[-1][1] == {"model": "served", "prompt": "two words", "temperature": 0.7, "max_tokens": 2}


def test_fields_that_a_server_ignores_are_not_taken_for_features():
    def ignoring(path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "served"}]}
        return (200, {"choices": [{"text": "a"}]}) if path == "/v1/completions" else (404, {})

    features, _, _ = open_and_sample(ignoring)
    assert not (features.ids_out or features.logprobs or features.copies)


def test_a_server_of_chat_only_gets_messages():
    def chat(path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "served"}]}
        if path != "/v1/chat/completions":
            return 404, {"error": "no such path"}
        listed = {"content": [{"token": "a", "logprob": -0.5}]} if body.get("logprobs") else None
        choice = {"message": {"content": "a"}, "logprobs": listed, "token_ids": [7]}
        return 200, {"choices": [choice] * body.get("n", 1)}

    features, answers, bodies = open_and_sample(chat)
    assert features.dialect == "OpenAI chat" and features.ids_out and features.logprobs
    assert bodies[-1][1]["messages"] == [{"role": "user", "content": "two words"}]
    assert np.allclose(answers[0].logprobs, [-0.5])


def test_fields_of_the_user_travel_with_every_request():
    _, _, bodies = open_and_sample(vllm, extra={"top_k": -1})
    assert all(body["top_k"] == -1 for path, body in bodies if path == "/v1/completions")


@pytest.mark.parametrize(
    ("url", "message"), [("localhost:1", "give http://HOST:PORT"), ("http://127.0.0.1:9", "start the server")]
)
def test_what_is_no_server_is_refused_with_the_remedy(url, message, monkeypatch):
    monkeypatch.setattr("rlpipe.rollout.sglang.client._READ_ATTEMPTS", 1)
    with pytest.raises(ValueError, match=message):
        asyncio.run(Server.open(url, PROBE))


def test_a_server_of_something_else_is_refused_with_what_was_tried():
    def other(path, body):
        return (200, {"data": [{"id": "x"}]}) if path == "/v1/models" else (404, {"error": "nothing here"})

    with pytest.raises(ValueError, match="answers neither /generate nor /v1/completions"):
        open_and_sample(other)
