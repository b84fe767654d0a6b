"""Recorded drafts without a server: whose they are, where they stand, their laws, and what a client reads."""

import json
from types import SimpleNamespace

import pytest
import torch

from rlpipe.rollout.sglang.answers import generate_body, parse_answer
from rlpipe.rollout.turn import joined
from rlpipe.types import DraftStep, GenerateRequest, SamplingParams
from tests.unit.rollout.sglang.test_plugin import committed, plugin  # noqa: F401

pytestmark = pytest.mark.unit


def asking(parameters=None):
    params = SimpleNamespace(custom_params=parameters)
    return SimpleNamespace(sampling_params=params, customized_info=None)


def wanting(**sampling):
    return GenerateRequest(request_id="r", prompt_ids=[5], sampling=SamplingParams(**sampling))


@pytest.fixture
def record(plugin):  # noqa: F811
    return plugin("rlpipe_sglang.record")


def test_a_request_asks_by_what_its_body_says(record):
    body = generate_body(wanting(record_drafts=True), "x")
    assert record.asks(asking(body["sampling_params"]["custom_params"]))
    assert "custom_params" not in generate_body(wanting(), "x")["sampling_params"]
    for parameters in (None, {}, {"thinking_budget": 3}, {record.KEY: "yes"}, "rlpipe_drafts"):
        assert not record.asks(asking(parameters))


def test_steps_stand_with_their_first_token_of_those_that_a_request_keeps(record):
    """Requests: one keeps three tokens, one is cut at a stop token, one did not ask, one had ended."""
    asked = {record.KEY: True}
    requests = [asking(asked), asking(asked), asking(), asking(asked)]
    step = record.Drafts(
        torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]),
        torch.full((4, 2), 0.5),
        torch.full((4, 2), 0.25),
        torch.tensor([2, 1, 0, 2]),
    ).copy_to_host(lambda tensor: tensor.clone())
    step.consume(SimpleNamespace(reqs=requests), [committed(1, 3), committed(2, 1), committed(1, 1), None])
    law = [0.5, 0.5], [0.25, 0.25]
    first, second, *others = [one.customized_info and one.customized_info[record.KEY] for one in requests]
    assert first == [None, (1, 2, [1, 2], *law), None, None]
    assert second == [None, None, (2, 1, [3, 4], *law)] and others == [None, None]


@pytest.mark.parametrize("drawn", [True, False])
def test_laws_of_a_step_that_sglang_judges_are_of_each_draft_at_its_temperature(record, drawn):
    generator = torch.Generator().manual_seed(0)
    logits, temperatures = torch.randn(9, 7, generator=generator), torch.tensor([[0.5], [2.0], [1.0]])
    tokens = torch.randint(0, 7, (3, 3), generator=generator)
    tokens[2, 1] = logits[6].argmax()
    q = torch.rand(4, 2, 7, generator=generator).softmax(-1)  # the last row pads a graph's batch
    verify_input = SimpleNamespace(
        draft_token_num=3,
        max_tree_depth=3,
        tree_topk=1,
        draft_token=tokens.flatten(),
        draft_probs=q if drawn else None,
    )
    sampling = SimpleNamespace(temperatures=temperatures, top_ks=torch.tensor([1 << 30, 1 << 30, 1]))
    drafts, p, given = record.laws(verify_input, logits, sampling)
    assert drafts.tolist() == tokens[:, 1:].tolist()
    for row in range(3):
        for depth in range(2):
            token, at = tokens[row, depth + 1], logits[3 * row + depth]
            law = (at / temperatures[row]).softmax(-1)[token]
            assert p[row, depth] == pytest.approx(float(law if row < 2 else at.argmax() == token))
            assert given[row, depth] == (q[row, depth, token] if drawn and row < 2 else 1)
    assert p[2, 0] == 1
    for name, value in (("tree_topk", 2), ("max_tree_depth", 2), ("draft_probs", q[..., :5])):
        other = SimpleNamespace(**vars(verify_input) | {name: value})
        assert record.laws(other, logits, sampling) is None


def test_a_client_reads_the_steps_of_a_growing_turn_and_joins_its_parts(plugin, record):  # noqa: F811
    pack = plugin("rlpipe_sglang.pack")
    state = SimpleNamespace(input_token_logprobs_val=[], output_token_logprobs_val=[])
    key, seen = plugin("rlpipe_sglang.measure").KEY, []

    def answer(count, steps):
        meta = {"finish_reason": None, "weight_version": "3"}
        state.output_token_logprobs_val = state.output_token_logprobs_val + [-0.5] * count
        pack.packed(None, None, meta, state, 0, None)
        info = {key: [[0.5] * count], record.KEY: [steps]}
        pack.noted(lambda *given: seen.append(given[3]), None, meta, state, info, 0, None)
        ids = [7] * len(state.output_token_logprobs_val)
        return json.loads(json.dumps({"output_ids": ids, "meta_info": meta}))

    def step(position, accepted, tokens):
        numbers = [0.5 / token for token in tokens], [0.25 / token for token in tokens]
        return (position, accepted, tokens, *numbers), DraftStep(
            position=position,
            num_accepted=accepted,
            tokens=tokens,
            target_probs=pytest.approx(numbers[0]),
            draft_probs=pytest.approx(numbers[1]),
        )

    first, second, third = step(1, 2, [1, 2, 3]), step(4, 0, [4]), step(5, 1, [5, 6])
    request = wanting(record_drafts=True)
    assert parse_answer(request, answer(1, [None])).drafts == []
    assert parse_answer(request, answer(4, [first[0], None, None, second[0]])).drafts == [first[1], second[1]]
    whole = answer(2, [third[0]])
    assert parse_answer(request, whole).drafts == [first[1], second[1], third[1]]
    assert parse_answer(wanting(), whole).drafts is None and seen == [{}] * 3

    twice = joined(parse_answer(request, whole), parse_answer(request, whole))
    assert [one.position for one in twice.drafts] == [1, 4, 5, 8, 11, 12]
    assert joined(parse_answer(wanting(), whole), parse_answer(wanting(), whole)).drafts is None
