"""rlpipe's verification inside a real server: requests of all kinds together, aborts, drafts that change."""

import asyncio

import pytest
import torch

from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.types import FinishReason
from tests.helpers.cli import ROOT
from tests.helpers.draft_oracle import chain_laws
from tests.helpers.engines import request, transformers_logits, worst_logprob_error
from tests.helpers.sglang import only_mtp

pytestmark = pytest.mark.integration
TINY = ROOT / "models" / "tiny"
END = read_config(TINY)["eos_token_id"]


async def judged(engine):
    """Verify steps of requests, by who judged them."""
    (state,) = (await engine._http.read("/server_info"))["internal_states"]
    return state["rlpipe_plugin"]["judged"]


def test_mixed_requests_aborts_and_changed_drafts_leave_every_token_the_targets(sglang):
    """500 turns, 64 at a time; two updates in the middle replace the draft and leave the target.

    Sampled and greedy turns, stop tokens inside accepted drafts, top logprobs; every seventh is aborted.
    Logprobs and entropies of all tokens must be transformers', whichever verification judged the step.
    """
    weights, logits = read_weights(TINY), transformers_logits(TINY)
    broken = weights | {name: weight * 0.5 for name, weight in only_mtp(weights).items()}
    asked = [
        request(
            i,
            [5 + i % 40, 6 + i % 7],
            max_new_tokens=4 + i % 17 if i % 7 else 200,
            temperature=(0.6, 1.0, 1.3)[i % 3] if i < 300 else float(i % 2),
            stop_token_ids=(266, 19) if i % 2 else (),
            top_logprobs=5 if i % 50 == 0 else 0,
        )
        for i in range(500)
    ]

    async def played(i, one, gate, updated):
        for update in updated[: i // 200]:
            await update.wait()  # so that turns are left for each of the drafts
        async with gate:
            async for result in sglang.stream(one):
                if i % 7 == 0 and len(result.output_ids):
                    sglang.abort([one.request_id])
            return result

    async def run():
        gate, updated = asyncio.Semaphore(64), [asyncio.Event(), asyncio.Event()]
        turns = [asyncio.create_task(played(i, one, gate, updated)) for i, one in enumerate(asked)]
        for version, new in ((1, broken), (2, weights)):
            await asyncio.wait(turns[200 * (version - 1) :][:50])
            await asyncio.to_thread(sglang.update_weights, new, version)
            updated[version - 1].set()
        return await asyncio.gather(*turns)

    before = sglang._call(judged(sglang))
    results = asyncio.run(run())
    counts = {name: count - before.get(name, 0) for name, count in sglang._call(judged(sglang)).items()}
    assert {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT} == {r.finish_reason for r in results}
    assert {version for result in results for version in result.versions.tolist()} == {0, 1, 2}
    worst = max(
        worst_logprob_error(logits, one.prompt_ids.tolist(), result, one.sampling.temperature or 1.0)
        for one, result in zip(asked, results, strict=True)
    )
    print(
        f"{sum(len(r.output_ids) for r in results)} tokens, largest difference {worst:.2e}, judged {counts}"
    )
    assert worst < 1e-4
    assert counts["rlpipe"] > 200 and set(counts) <= {"rlpipe", "greedy"}  # batches of greedy turns alone


def test_recorded_drafts_are_those_of_the_model_and_say_what_became_of_the_tokens(sglang):
    """p and q of every draft of 20 turns, recomputed by transformers and the reference layer.

    Beside them turns that ask for no record. Greedy ones alone are judged by SGLang in place of rlpipe.
    """
    laws, stops = chain_laws(TINY), (266, 19)
    kinds = [(0.7, ()), (1.0, stops), (1.3, ()), (1.0, ()), (0.0, ())]
    asked = [
        request(
            i,
            [5 + i, 6, 7 + i % 3],
            max_new_tokens=24,
            temperature=kinds[i % 5][0] if i < 20 else 0.0,
            stop_token_ids=kinds[i % 5][1],
            record_drafts=i % 6 > 0,
        )
        for i in range(23)
    ]

    async def run():
        together, alone = asked[:20], asked[20:]
        answers = await asyncio.gather(*map(sglang.generate, together))
        answers += await asyncio.gather(*map(sglang.generate, alone))
        return {result.request_id: result for result in answers}

    results, errors, kept, compared = asyncio.run(run()), [], set(), 0
    for one in asked:
        result, temperature = results[one.request_id], one.sampling.temperature
        if not one.sampling.record_drafts:
            assert result.drafts is None
            continue
        assert len(result.drafts) == result.spec.verify_steps
        following = 1  # the first token is the prefill's
        for step in result.drafts:
            if step.position > following:  # a turn that went on behind the model's own end token
                assert one.sampling.stop_token_ids and result.output_ids[following - 1] == END
                following += 1
            assert step.position == following and len(step.tokens) == 3
            given = result.output_ids.tolist()[step.position : step.position + step.num_accepted]
            assert given == step.tokens[: len(given)]
            following += step.num_accepted + 1
            if step.num_accepted < 3 and following <= len(result.output_ids):
                assert result.output_ids[following - 1] != step.tokens[step.num_accepted]
            kept.add(step.num_accepted)
            context = [*one.prompt_ids.tolist(), *result.output_ids.tolist()[: step.position]]
            for found, wanted in zip(
                (step.target_probs, step.draft_probs), laws(context, step.tokens, temperature), strict=True
            ):
                errors.append((torch.tensor(found) - wanted).abs().max().item())
            compared += 3

        # The last token may be the prefill's, behind the model's own end token.
        if following == len(result.output_ids) - 1 and one.sampling.stop_token_ids:
            following += int(result.output_ids[following - 1] == END)
        assert following >= len(result.output_ids)
    print(f"{compared} drafts, largest difference {max(errors):.2e}")
    assert max(errors) < 1e-4 and kept == {0, 1, 2, 3} and compared > 300
