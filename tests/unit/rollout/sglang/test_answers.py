"""What is sent to `/generate` and read back, on answers recorded from SGLang 0.5.23."""

import pytest

from rlpipe.rollout.sglang.answers import (
    continuation,
    generate_body,
    parse_answer,
    spec_counts,
    token_versions,
)
from rlpipe.rollout.turn import joined
from rlpipe.types import FinishReason, GenerateRequest, SamplingParams
from rlpipe.weights.protocols import ServerError

pytestmark = pytest.mark.unit


def request(**sampling):
    return GenerateRequest(request_id="r", prompt_ids=[5, 6], sampling=SamplingParams(**sampling))


def answer(ids, **meta):
    """As the server answers, with logprobs -0.5 * position."""
    common = {
        "finish_reason": {"type": "length", "length": len(ids)},
        "output_token_logprobs": [[-0.5 * place, token, None] for place, token in enumerate(ids)],
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": len(ids)}],
        "spec_verify_ct": 4,
        "spec_num_proposed_drafts": 12,
        "spec_correct_drafts_histogram": [2, 1, 1],
    }
    return {"output_ids": list(ids), "meta_info": common | meta}


def test_an_answer_becomes_tokens_with_logprobs_and_versions():
    result = parse_answer(request(), answer([7, 8, 9]))
    assert result.output_ids.tolist() == [7, 8, 9] and result.logprobs.tolist() == [0.0, -0.5, -1.0]
    assert result.versions.tolist() == [3, 3, 3] and result.finish_reason is FinishReason.LENGTH
    assert result.entropies.tolist() == [0.0, 0.5, 1.0]  # the estimate: -logprob
    assert result.top_logprobs is None and result.drafts is None


def test_the_histogram_counts_how_often_each_depth_was_reached_and_kept():
    counts = parse_answer(request(), answer([7])).spec
    assert counts.drafted == [4, 2, 1] and counts.accepted == [2, 1, 0]
    assert counts.verify_steps == 4 and counts.proposed == 12


def test_a_histogram_cut_short_still_has_every_depth():
    meta = {"spec_verify_ct": 2, "spec_num_proposed_drafts": 6, "spec_correct_drafts_histogram": [2]}
    assert spec_counts(meta).drafted == [2, 0, 0] and spec_counts(meta).accepted == [0, 0, 0]


def test_without_speculation_nothing_is_counted():
    assert spec_counts({}).proposed == 0 and spec_counts({}).drafted == []


def test_tokens_carry_the_version_of_their_span():
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}]
    assert parse_answer(request(), answer([7, 8, 9], weight_versions=spans)).versions.tolist() == [4, 7, 7]


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "4", "start": 1, "end": 3}],
        [{"version": "4", "start": 0, "end": 2}],
        [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 2, "end": 3}],
        [],
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_refused(spans):
    with pytest.raises(ServerError, match="weight_versions"):
        token_versions(spans, 3)


def test_logprobs_of_other_tokens_are_refused():
    broken = answer([7, 8])
    broken["meta_info"]["output_token_logprobs"].pop()
    with pytest.raises(ServerError, match="do not belong together"):
        parse_answer(request(), broken)


def test_an_aborted_request_returns_what_exists():
    result = parse_answer(request(), answer([7], finish_reason={"type": "abort", "message": "Aborted"}))
    assert result.finish_reason is FinishReason.ABORT and result.output_ids.tolist() == [7]


def test_a_part_of_a_stream_keeps_the_versions_already_known():
    part = answer([7, 8, 9], finish_reason=None, weight_version="4")
    del part["meta_info"]["weight_versions"]
    assert parse_answer(request(), part, known=[3, 3]).versions.tolist() == [3, 3, 4]


def test_top_logprobs_are_pairs_of_token_and_logprob():
    rows = [[[-0.1, 7, None], [-2.5, 8, None]]]
    result = parse_answer(request(top_logprobs=2), answer([7], output_top_logprobs=rows))
    assert result.top_logprobs == [[(7, -0.1), (8, -2.5)]]
    assert generate_body(request(top_logprobs=2), "x")["top_logprobs_num"] == 2


def test_stop_tokens_need_the_servers_end_of_text_check():
    stops = generate_body(request(stop_token_ids=(1, 2)), "x")["sampling_params"]
    assert stops["stop_token_ids"] == [1, 2] and stops["ignore_eos"] is False
    assert generate_body(request(), "x")["sampling_params"]["ignore_eos"] is True


def test_a_seed_of_63_bits_fits_the_server():
    assert generate_body(request(seed=2**63 - 1), "x")["sampling_params"]["sampling_seed"] < 2**31


def test_two_parts_of_a_turn_are_one():
    whole = request(max_new_tokens=5, seed=9)
    first = parse_answer(whole, answer([7, 8]))
    rest = continuation(whole, first)
    assert rest.prompt_ids.tolist() == [5, 6, 7, 8] and rest.sampling.max_new_tokens == 3
    assert rest.sampling.seed != whole.sampling.seed
    both = joined(first, parse_answer(rest, answer([9])))
    assert both.output_ids.tolist() == [7, 8, 9] and both.versions.tolist() == [3, 3, 3]
    assert both.spec.drafted == [8, 4, 2] and both.spec.verify_steps == 8
