"""rlpipe's verification inside a real server: requests of all kinds together, aborts, drafts that change."""

import asyncio

import pytest

from rlpipe.models.checkpoint import read_weights
from rlpipe.types import FinishReason
from tests.helpers.cli import ROOT
from tests.helpers.engines import request, transformers_logits, worst_logprob_error
from tests.helpers.sglang import only_mtp

pytestmark = pytest.mark.integration
TINY = ROOT / "models" / "tiny"


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
                if i % 7 == 0 and result.output_ids:
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
    assert {version for result in results for version in result.versions} == {0, 1, 2}
    worst = max(
        worst_logprob_error(logits, one.prompt_ids, result, one.sampling.temperature or 1.0)
        for one, result in zip(asked, results, strict=True)
    )
    print(
        f"{sum(len(r.output_ids) for r in results)} tokens, largest difference {worst:.2e}, judged {counts}"
    )
    assert worst < 1e-4
    assert counts["rlpipe"] > 200 and set(counts) <= {"rlpipe", "greedy"}  # batches of greedy turns alone
