"""A real SGLang server decodes what the embedded engine and the trainer compute, and keeps the contract."""

import asyncio
import json

import numpy as np
import pytest

from rlpipe.certify.statistics import normal_quantile
from rlpipe.cli.certify import main as certify
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_weights
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.types import FinishReason
from tests.helpers.certified import address
from tests.helpers.cli import ROOT
from tests.helpers.documents import commands
from tests.helpers.engines import generate, request, running_engine, transformers_logits, worst_logprob_error
from tests.helpers.sglang import GAMMA, only_mtp
from tests.helpers.trainers import trainer_logprobs

pytestmark = pytest.mark.integration
TINY = ROOT / "models" / "tiny"
TEMPERATURE = 0.8


def prompts(count, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 800, int(rng.integers(1, longest))).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def sampled(sglang_server):
    """Turns of SGLang at a temperature of .8: (prompt, result)."""
    asked = prompts(12)
    options = {"temperature": TEMPERATURE, "max_new_tokens": 60, "top_logprobs": 5}
    results = generate(sglang_server, *(request(i, p, **options) for i, p in enumerate(asked)))
    return list(zip(asked, results, strict=True))


def test_logprobs_and_entropies_are_those_of_transformers(sampled):
    logits = transformers_logits(TINY)
    worst = max(worst_logprob_error(logits, prompt, result, TEMPERATURE) for prompt, result in sampled)
    print(f"largest |SGLang - transformers| of logprobs and entropies: {worst:.2e}")
    assert worst < 1e-4


def test_each_token_has_its_own_entropy_whatever_shares_its_batch(sglang):
    """160 turns: temperatures, lengths, stop tokens inside accepted drafts, top logprobs, aborts."""
    asked = [
        request(
            i,
            prompt,
            max_new_tokens=4 + i % 29 if i % 7 else 200,  # every seventh is aborted
            temperature=(0.0, 0.6, 1.0)[i % 3],
            stop_token_ids=(266, 19) if i % 2 else (),
            top_logprobs=5 if i % 5 == 0 else 0,
        )
        for i, prompt in enumerate(prompts(160, seed=4))
    ]

    async def played(one, cut):
        async for result in sglang.stream(one):
            if cut and len(result.output_ids):
                sglang.abort([one.request_id])
        return result

    async def run():
        return await asyncio.gather(*(played(one, i % 7 == 0) for i, one in enumerate(asked)))

    results, logits = asyncio.run(run()), transformers_logits(TINY)
    assert {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT} == {r.finish_reason for r in results}
    worst = max(
        worst_logprob_error(logits, one.prompt_ids.tolist(), result, one.sampling.temperature or 1.0)
        for one, result in zip(asked, results, strict=True)
    )
    print(f"largest difference over {sum(len(result.output_ids) for result in results)} tokens: {worst:.2e}")
    assert worst < 1e-4


def test_logprobs_are_those_of_the_megatron_trainer(sampled):
    """What importance weights are made of: the largest difference over 720 tokens, fp32."""
    found = trainer_logprobs(TINY, sampled, TEMPERATURE)
    differences = [
        abs(ours - theirs)
        for line, (_, result) in zip(found, sampled, strict=True)
        for ours, theirs in zip(line, result.logprobs.tolist(), strict=True)
    ]
    print(f"largest |SGLang - trainer| over {len(differences)} tokens: {max(differences):.2e}")
    assert max(differences) < 1e-3


def test_both_engines_decode_the_same_argmax_with_the_same_logprobs(sglang):
    asked = [request(i, p, temperature=0, max_new_tokens=40) for i, p in enumerate(prompts(12, seed=1))]
    with running_engine(TINY, max_running=16, max_context=256) as embedded:
        ours = generate(embedded, *asked)
    theirs = generate(sglang, *asked)
    assert [r.output_ids.tolist() for r in ours] == [r.output_ids.tolist() for r in theirs]
    first, second = ([x for r in results for x in r.logprobs.tolist()] for results in (ours, theirs))
    worst = max(abs(a - b) for a, b in zip(first, second, strict=True))
    print(f"largest |SGLang - embedded| over {sum(len(r.output_ids) for r in ours)} tokens: {worst:.2e}")
    assert worst < 1e-3


def test_top_logprobs_hold_the_most_likely_tokens_at_the_temperature(sampled):
    logits = transformers_logits(TINY)
    prompt, result = sampled[0]
    rows = logits([*prompt, *result.output_ids.tolist()])[len(prompt) - 1 : -1] / TEMPERATURE
    values, ids = rows.log_softmax(-1).topk(5)
    for row, (expected, tokens) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
        assert [token for token, _ in result.top_logprobs[row]] == tokens
        assert [value for _, value in result.top_logprobs[row]] == pytest.approx(expected, abs=1e-3)


def acceptance(results):
    """Per depth: the rate, and its standard error with one cluster per request (ratio estimator)."""
    accepted = np.array([r.spec.accepted for r in results], float)
    reached = np.array([r.spec.drafted for r in results], float)
    rate = accepted.sum(0) / reached.sum(0)
    spread = ((accepted - rate * reached) ** 2).sum(0) * len(results) / (len(results) - 1)
    return rate, np.sqrt(spread) / reached.sum(0)


def depth_scores(first, second):
    """Standard normal scores of the difference of two engines' acceptance, depth by depth."""
    (a, a_error), (b, b_error) = acceptance(first), acceptance(second)
    return (a - b) / np.hypot(a_error, b_error)


def test_acceptance_per_depth_is_that_of_the_embedded_engine(sglang):
    """Two-sided z-tests, one per depth, alpha 1e-4 in all; 256 requests a side, 8192 tokens.

    Power: a draft whose last norm is off by a factor of .5 must fail.
    """
    asked = [
        request(i, p, temperature=1.0, max_new_tokens=32)
        for i, p in enumerate(prompts(32, seed=2, longest=12) * 8)
    ]
    theirs = generate(sglang, *asked)
    config = RolloutConfig(max_running=32, max_context=256, device="cpu")
    embedded = EmbeddedEngine(config, SpecConfig(gamma=GAMMA), TINY)
    try:
        ours = generate(embedded, *asked)
        weights = read_weights(TINY)
        stale = weights | {k: w * 0.5 for k, w in only_mtp(weights).items() if "final_layernorm" in k}
        embedded.update_weights(stale, 1)
        wrong = generate(embedded, *asked)
    finally:
        embedded.close()
    bound = normal_quantile(1e-4 / (2 * GAMMA))
    print(
        "acceptance by depth: SGLang",
        acceptance(theirs)[0].round(4),
        "embedded",
        acceptance(ours)[0].round(4),
    )
    print(
        "scores",
        depth_scores(theirs, ours).round(2),
        "with a wrong draft",
        depth_scores(theirs, wrong).round(2),
    )
    assert np.abs(depth_scores(theirs, ours)).max() < bound
    assert np.abs(depth_scores(theirs, wrong)).max() > bound


def test_a_turn_ends_at_the_stop_tokens_asked_for_and_at_no_other(sglang):
    """The server itself also stops at the model's end token (1), which was not asked for here."""
    asked = [request(i, [5, 6, 7], max_new_tokens=60, stop_token_ids=(266,)) for i in range(24)]
    results = generate(sglang, *asked)
    for result in results:
        assert 266 not in result.output_ids.tolist()[:-1]
        if result.finish_reason is FinishReason.STOP:
            assert result.output_ids[-1] == 266
        else:
            assert result.finish_reason is FinishReason.LENGTH and len(result.output_ids) == 60
        assert len(result.logprobs) == len(result.versions) == len(result.output_ids)
    assert any(1 in result.output_ids.tolist() for result in results)


def test_an_aborted_turn_returns_what_exists_and_others_go_on(sglang):
    async def run():
        long = asyncio.ensure_future(sglang.generate(request("12", [5, 6], max_new_tokens=200)))
        other = asyncio.ensure_future(sglang.generate(request("1", [5, 6], max_new_tokens=40)))
        await asyncio.sleep(0.4)
        sglang.abort(["1"])  # a prefix of the other's id, which the server would abort as well
        sglang.abort(["12"])
        return await long, await other

    async def only_one():
        long = asyncio.ensure_future(sglang.generate(request("12", [5, 6], max_new_tokens=120)))
        await asyncio.sleep(0.2)
        sglang.abort(["1"])
        return await long

    long, _ = asyncio.run(run())
    assert long.finish_reason is FinishReason.ABORT and 0 < len(long.output_ids) < 200
    assert len(long.logprobs) == len(long.versions) == len(long.output_ids)
    assert asyncio.run(only_one()).finish_reason is FinishReason.LENGTH


def test_a_stream_grows_into_the_whole_turn(sglang):
    async def run():
        return [part async for part in sglang.stream(request("s", [5, 6, 7], max_new_tokens=24))]

    parts = asyncio.run(run())
    whole = parts[-1]
    assert len(parts) > 3 and whole.finish_reason is FinishReason.LENGTH and len(whole.output_ids) == 24
    for part in parts[:-1]:
        count = len(part.output_ids)
        assert (
            part.output_ids.tolist() == whole.output_ids.tolist()[:count]
            and part.versions.tolist() == whole.versions.tolist()[:count]
        )
        assert (
            part.logprobs.tolist() == whole.logprobs.tolist()[:count]
            and part.entropies.tolist() == whole.entropies.tolist()[:count]
        )
        assert part.finish_reason is FinishReason.ABORT


def test_a_paused_engine_decodes_nothing_and_continues(sglang):
    async def run():
        task = asyncio.ensure_future(sglang.generate(request("p", [5, 6], max_new_tokens=240)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(sglang.pause)
        done, _ = await asyncio.wait({task}, timeout=1.5)
        await asyncio.to_thread(sglang.resume)
        return done, await task

    done, result = asyncio.run(run())
    assert not done and len(result.output_ids) == 240


def test_greedy_and_sampled_requests_share_a_batch(sglang):
    asked = [request(i, [5, 6, 7], max_new_tokens=12, temperature=float(i % 2)) for i in range(8)]
    results = generate(sglang, *asked)
    alone = generate(sglang, request("alone", [5, 6, 7], max_new_tokens=12, temperature=0))[0]
    assert all(r.output_ids.tolist() == alone.output_ids.tolist() for r in results[::2])
    assert len({tuple(r.output_ids.tolist()) for r in results[1::2]}) > 1


def test_the_page_on_certificates_is_followed_to_the_letter(sglang, tmp_path, monkeypatch):
    """Only the address is this server's; its key is where the page says.

    A right server fails one certificate in a hundred (alpha), and two in a row one time in ten thousand.
    """
    url, key = address(sglang)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    for command in commands(ROOT / "docs" / "certify.md"):
        assert command.words[:2] == ("rlpipe", "certify")
        words = [url if word.startswith("http://") else word for word in command.words[2:]]
        assert any(certify([*words, "--json", "certificate.json"]) == 0 for _ in range(2))
    assert "no fault found" in (tmp_path / "certificate.html").read_text()
    lines = json.loads((tmp_path / "certificate.json").read_text())["lines"]
    assert all(line["passed"] for line in lines)  # each was judged


def test_requests_the_server_would_die_of_are_refused_before_it_sees_them(sglang):
    for ids in ([], [800], [-1]):
        with pytest.raises(ValueError, match="prompt_ids"):
            generate(sglang, request("bad", ids))
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(sglang, request("bad", [5], max_new_tokens=0))


def test_counters_are_sums_of_what_was_returned(sglang):
    before = sglang.stats()
    results = generate(sglang, *(request(i, [5, 6, 7, 8 + i], max_new_tokens=20) for i in range(6)))
    after = sglang.stats()
    assert after.generated_tokens - before.generated_tokens == sum(len(r.output_ids) for r in results)
    steps = after.spec.verify_steps - before.spec.verify_steps
    assert steps == sum(r.spec.verify_steps for r in results)
    assert after.spec.proposed - before.spec.proposed == GAMMA * steps
    assert after.busy_seconds > before.busy_seconds and after.running == 0
