"""Each planted fault is found by its line and named by its name; right servers are not accused.

Alpha .05 for a certificate (1% for each of five lines), 3,000 samples at temperature 1 and half as many at
0.7. At these sizes a right server is accused at most once in twenty certificates; the seeds are fixed.
"""

import asyncio
from html import escape

import pytest

from rlpipe.certify.page import as_data, as_html, as_text
from rlpipe.certify.run import Sizes, collect, judge
from rlpipe.certify.texts import Texts
from tests.helpers.faulty_servers import (
    FAULTS,
    PROMPTS,
    VOCAB,
    FaultyServer,
    MarkovModel,
    features,
    own_draft_of,
)

pytestmark = pytest.mark.statistical
ALPHA, SAMPLES = 0.05, 3000


class Letters:
    """A tokenizer whose tokens are letters; the last two tokens are one letter."""

    eos_token_id = None

    def __len__(self):
        return VOCAB

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(ord("a") + min(token, VOCAB - 2)) for token in ids)


class TextOnly(FaultyServer):
    """The same server, which tells the text of its tokens only."""

    async def sample(self, prompt, **request):
        answers = await super().sample(prompt, **request)
        for answer in answers:
            answer.text, answer.ids, answer.logprobs = Letters().decode(answer.ids, True), None, None
        return answers


def certify(*args, seed=1, with_power=False, **kwargs):
    return judge(sampled(*args, seed=seed, **kwargs), alpha=ALPHA, seed=seed, with_power=with_power)


def sampled(fault="", *, seed, ties=False, samples=SAMPLES, answers=256, server=FaultyServer):
    """The evidence of a server with a fault."""
    model = MarkovModel.random(ties=ties)
    served = server(model, fault, seed=seed)
    if server is TextOnly:
        served.features = features(ids_in=False, ids_out=False, logprobs=False, drafts=False)
    evidence, _ = asyncio.run(
        collect(
            served,
            model,
            PROMPTS,
            Sizes(samples=samples, answers=answers),
            texts=Texts(Letters()),
            own_draft=own_draft_of(model, seed + 100),
        )
    )
    return evidence


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_its_line_and_named(fault):
    certificate = certify(fault)
    name, line = FAULTS[fault]
    assert [cause.name for cause in certificate.causes] == [name]
    assert next(one for one in certificate.lines if one.name == line).failed


def test_a_right_server_is_certified_and_the_power_is_said():
    certificate = certify(with_power=True)
    assert certificate.passed and not certificate.causes
    assert all(line.passed and line.power for line in certificate.lines)
    assert certificate.lines[0].numbers["power"] <= 0.2
    assert certificate.lines[1].numbers["power"] >= 0.95
    assert "No fault was found in the 7 lines" in as_text(certificate)


def test_log_probabilities_before_temperature_are_found_where_rounding_moves_some_by_much():
    """Two thirds of the values are of samples at temperature 1, where they are right."""
    evidence = sampled("log-probabilities before temperature", seed=1)
    for one in evidence.samples:
        one.rows.moved_logprob[:] = 0
        one.rows.moved_logprob[: len(one.tokens) // 20] = 5.0
    assert [cause.name for cause in judge(evidence, alpha=ALPHA).causes] == [
        "log-probabilities before temperature"
    ]


def test_a_sampled_token_whose_reported_probability_is_0_is_a_fault():
    evidence = sampled(seed=1)
    for one in evidence.samples:
        one.logprobs[: len(one.logprobs) // 10] = float("-inf")
    assert [cause.name for cause in judge(evidence, alpha=ALPHA).causes] == ["log-probabilities"]


def test_argmax_ties_of_bfloat16_are_no_fault_and_other_tokens_are():
    right, wrong = certify(ties=True), certify("second best at temperature 0", ties=True)
    assert right.passed and right.lines[-1].numbers["ties"] > 10
    assert wrong.lines[-1].numbers["wrong"] > 0
    assert [cause.name for cause in wrong.causes] == ["greedy"]


def test_right_servers_are_accused_no_more_often_than_alpha_says():
    """12 certificates of 400 samples: more than 4 failures have probability .0002 at alpha .05."""
    failed = [not certify(seed=seed, samples=400, answers=32).passed for seed in range(200, 212)]
    assert sum(failed) <= 4


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("", []),
        ("top-p left on", ["truncated"]),
        ("temperature applied twice", ["temperature"]),
        ("no sampling", ["no sampling"]),
        ("second best at temperature 0", ["greedy"]),
        ("wrong q", []),  # later tokens cannot be judged by text, and the certificate says so
    ],
)
def test_by_text_alone_first_tokens_are_judged_and_the_rest_is_said_to_be_left(fault, names):
    certificate = certify(fault, server=TextOnly)
    assert [cause.name for cause in certificate.causes] == names
    left = {line.name: line.seen for line in certificate.lines if line.passed is None}
    assert left == {
        "later tokens": "not judged: the server returns no token ids",
        "acceptance": "not judged: the server reports no acceptance",
        "log-probabilities": "not judged: the server returns no log-probabilities",
    }


def test_the_page_and_the_json_say_what_the_terminal_says():
    certificate = certify("stale draft")
    page, data = as_html(certificate), as_data(certificate)
    assert data["passed"] is False and data["causes"][0]["name"] == "stale draft"
    for text in (escape(certificate.causes[0].text), "later tokens", "acceptance"):
        assert text in page
    assert "http-equiv" in page and "<script src" not in page
