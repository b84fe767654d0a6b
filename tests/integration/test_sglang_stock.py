"""Servers with the plugin, stock servers and the embedded engine accept as many drafts and emit one law."""

import asyncio
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import pytest

from rlpipe.certify.statistics import normal_quantile, normal_score
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.embedded import EmbeddedEngine
from tests.helpers.engines import request, transformers_logits
from tests.helpers.goodness_of_fit import Law, g_statistic
from tests.helpers.sglang import GAMMA, running_server
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.integration.test_sglang_engine import acceptance, depth_scores

pytestmark = pytest.mark.integration
VOCAB, DEPTH, PROMPT = 6, 3, [2, 0, 4, 1]
TURNS, TOKENS, AT_ONCE, ALPHA = 256, 40, 64, 1e-4
ENGINES = "plugin", "stock", "embedded"


class Played(NamedTuple):
    """What one draft's turns gave: results by engine, and logits of the target."""

    results: dict
    logits: object


def ask(engine, turns):
    async def run():
        room = asyncio.Semaphore(AT_ONCE)

        async def one(i):
            async with room:
                return await engine.generate(request(i, PROMPT, max_new_tokens=TOKENS))

        return await asyncio.gather(*map(one, range(turns)))

    return asyncio.run(run())


def play(target, folder, *, draft=None, plugin=None):
    """All three engines with one random model of six tokens and one draft of it.

    draft: directory of an EAGLE-3 draft; None for the model's MTP layer. plugin: a server that runs already.
    """
    servers = {
        "plugin": nullcontext(plugin) if plugin else running_server(target, folder / "plugin", draft=draft),
        "stock": running_server(target, folder / "stock", draft=draft, plugin=False),
    }
    results = {}
    for name, server in servers.items():
        with server as engine:
            results[name] = ask(engine, TURNS)
    drafter = "mtp" if draft is None else "eagle3"
    spec = SpecConfig(gamma=GAMMA, drafter=drafter, draft_path=str(draft or ""))
    engine = EmbeddedEngine(RolloutConfig(max_running=32, max_context=64, device="cpu"), spec, target)
    try:
        results["embedded"] = ask(engine, TURNS)
    finally:
        engine.close()
    return Played(results, transformers_logits(target))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """By the MTP layer; by an EAGLE-3 draft in test_sglang_eagle3.py, which has such a server."""
    folder, shape = tmp_path_factory.mktemp("mtp"), {"layers": 4, "scale": 0.3, "head_scale": 0.3}
    return play(write_random_checkpoint(folder / "target", "mimo", vocab=VOCAB, **shape), folder)


def test_acceptance_by_depth_is_that_of_stock_and_of_the_embedded_engine(played):
    check_acceptance(played)


def test_first_tokens_have_the_targets_law_and_that_of_stock(played):
    check_first_tokens(played)


def check_acceptance(played):
    """z-tests by depth of the three pairs, alpha 1e-4 in all.

    Power: a difference of .08 at the first depth is seen with probability .95, by the errors found.
    """
    bound = normal_quantile(ALPHA / (2 * 3 * GAMMA))
    for first, second in zip(ENGINES, (*ENGINES[1:], ENGINES[0]), strict=True):
        pair = played.results[first], played.results[second]
        (a, a_error), (b, b_error) = map(acceptance, pair)
        scores = depth_scores(*pair)
        seen = (bound + normal_quantile(0.05)) * np.hypot(a_error, b_error)
        print(first, a.round(4), second, b.round(4), "scores", scores.round(2), "would see", seen.round(3))
        assert np.abs(scores).max() < bound and seen[0] < 0.08


def check_first_tokens(played):
    """G-tests of three tokens against the law, and of the first two against stock's; alpha 1e-4 for each.

    Power: the same turns judged by the law at a temperature of .6 must fail.
    """
    tokens = {
        name: np.array([r.output_ids.tolist()[:DEPTH] for r in rows]) for name, rows in played.results.items()
    }
    law = Law.of([played.logits], PROMPT, VOCAB, DEPTH)
    wrong = Law.of([lambda ids: played.logits(ids) / 0.6], PROMPT, VOCAB, DEPTH)
    limit = normal_quantile(ALPHA / (DEPTH + 1))
    for name in ENGINES:
        scores, off = law.scores(tokens[name]), wrong.scores(tokens[name])
        print(name, "scores", np.round(scores, 2), "at another temperature", np.round(off, 2))
        assert max(scores) < limit < max(off)
    pairs = {
        name: np.bincount(rows[:, 0] * VOCAB + rows[:, 1], minlength=VOCAB**2)
        for name, rows in tokens.items()
    }
    table = np.array([pairs["plugin"], pairs["stock"]])
    table = table[:, table.sum(0) > 0]
    pooled = table.sum(0, keepdims=True) / table.sum()
    freedom = table.shape[1] - 1
    score = normal_score(g_statistic(table, pooled), freedom, 2 * freedom)
    print("plugin against stock, score", round(score, 2), "degrees of freedom", freedom)
    assert score < normal_quantile(ALPHA)
