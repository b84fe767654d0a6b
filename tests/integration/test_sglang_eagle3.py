"""A real SGLang server drafts with our EAGLE-3 export as the embedded engine does, and is kept up to date.

The target has MiMo's layout, which SGLang serves as a Qwen2 here, and a vocabulary so small that the law of
its first tokens can be enumerated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlpipe.certify.statistics import normal_quantile
from rlpipe.config.drafters import Drafter
from rlpipe.config.eagle3 import PREFIX
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import SglangConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import is_mtp_weight, read_config, read_weights
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.rollout.sglang.environment import find_environment
from tests.helpers.broadcasts import Trainer
from tests.helpers.cli import ROOT, SMALL, prompt_states, run
from tests.helpers.driven_engine import driven_engine
from tests.helpers.eagle3_drafts import random_draft, write_random_draft
from tests.helpers.engines import generate, recomputed, request, transformers_logits
from tests.helpers.goodness_of_fit import Law
from tests.helpers.sglang import GAMMA, configured, lossy, needs_sglang, perturbed, repaired, running_server
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.integration import test_sglang_stock as stock

pytestmark = pytest.mark.integration
VOCAB, DEPTH, SAMPLES, TOKENS = 6, 3, 1_200, 40
PROMPT = [2, 0, 4, 1]
LAYERS = [0, 1, 2]
KNOWN = [0, 2, 3, 5]  # a reduced vocabulary
DRAFT_TENSORS = 10  # beside the target's embedding


def prompts(count):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, int(rng.integers(2, 20))).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    shape = {"vocab": VOCAB, "layers": 4, "scale": 0.3, "head_scale": 0.3}
    return write_random_checkpoint(tmp_path_factory.mktemp("target"), "mimo", **shape)


@pytest.fixture(scope="module")
def start(target, tmp_path_factory):
    return write_random_draft(tmp_path_factory.mktemp("draft"), target, layers=LAYERS)


@pytest.fixture(scope="module")
def server(target, start, tmp_path_factory):
    with running_server(target, tmp_path_factory.mktemp("logs"), draft=start, bucket_mb=1) as engine:
        yield engine


@pytest.fixture
def served(server, target):
    """The shared server, back on its first weights afterwards."""
    yield server
    repaired(server)
    server.events.clear()
    if server.stats().policy_version:
        server.update_weights(read_weights(target) | trained(target, seed=0), 0)


def trained(target, seed, sharper=1.0):
    """A draft as it travels; seed 0: the one that the server starts with. sharper: factor of its logits."""
    draft = random_draft(target, layers=LAYERS, seed=seed)
    draft.lm_head.weight.data *= sharper
    return {f"{PREFIX}{name}": tensor for name, tensor in draft.state_dict().items()}


def embedded(target, draft, *asked, weights=None):
    """The same turns from the embedded engine."""
    config = RolloutConfig(max_running=32, max_context=256, device="cpu")
    engine = EmbeddedEngine(config, SpecConfig(gamma=GAMMA, drafter="eagle3", draft_path=str(draft)), target)
    try:
        if weights is not None:
            engine.update_weights(weights, 1)
        return generate(engine, *asked)
    finally:
        engine.close()


def test_greedy_turns_take_the_tokens_of_the_embedded_engine(served, target, start):
    asked = [request(i, p, temperature=0, max_new_tokens=TOKENS) for i, p in enumerate(prompts(12))]
    theirs, ours = generate(served, *asked), embedded(target, start, *asked)
    assert [t.output_ids.tolist() for t in theirs] == [o.output_ids.tolist() for o in ours]


def test_sampled_turns_have_the_targets_law_and_logprobs(served, target):
    """G-test of the first three tokens, 1,200 turns, alpha 1e-4 over its four scores.

    Power: the same samples judged by the law at a temperature of .6 must fail.
    """
    asked = [request(i, PROMPT, max_new_tokens=DEPTH + 1) for i in range(SAMPLES)]
    results = generate(served, *asked)
    logits = transformers_logits(target)
    tokens = np.array([result.output_ids.tolist()[:DEPTH] for result in results])
    limit = normal_quantile(1e-4 / (DEPTH + 1))
    scores = Law.of([logits], PROMPT, VOCAB, DEPTH).scores(tokens)
    wrong = Law.of([lambda ids: logits(ids) / 0.6], PROMPT, VOCAB, DEPTH).scores(tokens)
    print("scores", np.round(scores, 2), "at another temperature", np.round(wrong, 2))
    assert max(scores) < limit < max(wrong)
    for result in results[:20]:
        logprobs, _ = recomputed(logits, PROMPT, result)
        assert (logprobs - torch.tensor(result.logprobs)).abs().max() < 1e-3


def acceptance_scores(first, second):
    """Standard normal scores of the difference of two engines' acceptance, by depth, clustered by turn."""
    rates, errors = [], []
    for results in (first, second):
        accepted = np.array([r.spec.accepted for r in results], float)
        reached = np.array([r.spec.drafted for r in results], float)
        rate = accepted.sum(0) / reached.sum(0)
        spread = ((accepted - rate * reached) ** 2).sum(0) * len(results) / (len(results) - 1)
        rates.append(rate)
        errors.append(np.sqrt(spread) / reached.sum(0))
    scores = (rates[0] - rates[1]) / np.hypot(*errors)
    print("acceptance by depth", *(rate.round(4) for rate in rates), "scores", scores.round(2))
    return scores


def test_acceptance_by_depth_is_that_of_the_embedded_engine_before_and_after_an_update(served, target, start):
    """z-tests by depth, alpha 1e-4 in all, 128 turns of 40 tokens a side, for two drafts of one target.

    Power: each draft's turns judged by the other's must fail.
    """
    asked = [request(i, p, max_new_tokens=TOKENS) for i, p in enumerate(prompts(128))]
    weights = read_weights(target) | trained(target, seed=3, sharper=3.0)
    first = generate(served, *asked), embedded(target, start, *asked)
    served.update_weights(weights, 1)
    second = generate(served, *asked), embedded(target, start, *asked, weights=weights)
    assert {version for result in second[0] for version in result.versions.tolist()} == {1}
    bound = normal_quantile(1e-4 / (4 * GAMMA))
    for theirs, ours in (first, second):
        assert np.abs(acceptance_scores(theirs, ours)).max() < bound
    assert np.abs(acceptance_scores(first[0], second[1])).max() > bound


@pytest.mark.parametrize("transfer", ["shared", "collective"])
def test_after_an_update_target_and_draft_are_bit_equal_to_what_was_sent(served, target, transfer):
    weights = read_weights(target)
    new = perturbed(weights, 0.02) | trained(target, seed=5)
    with configured(served, weight_transfer=transfer):
        served.update_weights(new, 5)
    assert served.check_weights(new).passed and not served.events
    assert len(served.check_weights(new | trained(target, seed=6)).draft) == DRAFT_TENSORS
    assert served.check_weights(weights | trained(target, seed=5)).draft == [
        "draft.model.embed_tokens.weight"
    ]
    assert generate(served, request("v", PROMPT, max_new_tokens=6))[0].versions.tolist() == [5] * 6


def test_a_draft_that_is_not_trained_is_left_and_checked(served, target):
    new = perturbed(read_weights(target), 0.02)
    served.update_weights(new, 2)
    assert served.check_weights(new | trained(target, seed=0)).passed and not served.events


@dataclass
class DraftTrainer:
    """Stands for the trainer of a draft."""

    weights: dict[str, torch.Tensor]

    def export_weights(self):
        return self.weights


def test_a_trainer_broadcasts_policy_and_draft_and_a_lost_draft_trips_the_canary(served, target):
    """Two updates; what the second says of the draft is lost, and is sent again to this server alone."""
    first, second = (perturbed(read_weights(target), 0.02, seed=seed) for seed in (1, 2))
    draft, members = DraftTrainer(trained(target, seed=7)), [served.membership().server]

    def lost(path, body):
        """Received, since all ranks take part, and kept nowhere."""
        if body["selector"] != "draft" or served.events:
            return body
        return body | {"selector": "target", "names": [f"lost.{name}" for name in body["names"]]}

    with configured(served, weight_transfer="collective"):
        trainer = Trainer.of(served._config, read_config(target), drafter=Drafter.EAGLE3, draft=draft)
        try:
            served.receive_weights(trainer.offer(first, 1, members))
            assert served.check_weights(first | draft.weights).passed and not served.events
            draft.weights = trained(target, seed=8)
            lossy(served, lost)
            served.receive_weights(trainer.offer(second, 2, members, again=True))
        finally:
            trainer.close()
    assert [kind for kind, _ in served.events] == ["canary_failed"]
    assert f"{DRAFT_TENSORS} of the draft" in served.events[0][1]["what"]
    assert served.check_weights(second | draft.weights).passed


def test_a_replaced_server_starts_on_the_newest_draft(served, target):
    new = perturbed(read_weights(target), 0.02) | trained(target, seed=4)
    served.update_weights(new, 4)
    for child in psutil.Process(served.server.pid).children():
        child.kill()
    (result,) = generate(served, request("v", PROMPT, max_new_tokens=TOKENS))
    assert result.versions.tolist() == [4] * TOKENS and served.check_weights(new).passed
    assert [kind for kind, _ in served.events] == ["server_died", "server_restarted"]


@pytest.fixture(scope="module")
def reduced(target, tmp_path_factory):
    """A server under rejection sampling whose draft knows four of the six tokens, and the draft."""
    draft = write_random_draft(tmp_path_factory.mktemp("reduced"), target, ids=KNOWN, layers=LAYERS)
    with running_server(target, tmp_path_factory.mktemp("logs"), draft=draft) as engine:
        yield engine, draft


def test_a_reduced_vocabulary_drafts_for_greedy_turns(reduced, target):
    """Tokens and steps of the embedded engine. Turns end where drafts may still stand: not compared."""
    engine, draft = reduced
    asked = [request(i, p, temperature=0, max_new_tokens=TOKENS) for i, p in enumerate(prompts(12))]
    with driven_engine(target, "greedy", gamma=GAMMA, drafter="eagle3", draft_path=draft) as driven:
        ours = driven.generate(*asked)
    theirs = generate(engine, *asked)
    assert [t.output_ids.tolist() for t in theirs] == [o.output_ids.tolist() for o in ours]
    assert [t.spec.verify_steps for t in theirs] == [o.spec.verify_steps for o in ours]
    accepted = sum(sum(o.spec.accepted) for o in ours)
    assert 0 < accepted < GAMMA * sum(o.spec.verify_steps for o in ours)


def test_drafts_of_a_reduced_vocabulary_leave_the_targets_law_as_it_is(reduced, target):
    """G-test of the first three tokens, as above; power: the law with unknown tokens rarer."""
    engine, _ = reduced
    asked = [request(i, PROMPT, max_new_tokens=DEPTH + 1) for i in range(SAMPLES)]
    tokens = np.array([result.output_ids.tolist()[:DEPTH] for result in generate(engine, *asked)])
    logits = transformers_logits(target)
    unknown = [token for token in range(VOCAB) if token not in KNOWN]

    def without(ids):
        found = logits(ids).clone()
        found[..., unknown] -= 3.0
        return found

    limit = normal_quantile(1e-4 / (DEPTH + 1))
    scores = Law.of([logits], PROMPT, VOCAB, DEPTH).scores(tokens)
    wrong = Law.of([without], PROMPT, VOCAB, DEPTH).scores(tokens)
    print("scores", np.round(scores, 2), "unknown tokens rarer", np.round(wrong, 2))
    assert max(scores) < limit < max(wrong)


def test_drafts_of_a_reduced_vocabulary_are_accepted_as_often_as_in_the_embedded_engine(reduced, target):
    """z-tests by depth, alpha 1e-4 in all. Every recorded draft is a token that the draft knows."""
    engine, draft = reduced
    asked = [request(i, p, max_new_tokens=TOKENS, record_drafts=True) for i, p in enumerate(prompts(128))]
    theirs, ours = generate(engine, *asked), embedded(target, draft, *asked)
    assert {t for result in theirs for step in result.drafts for t in step.tokens} == set(KNOWN)
    assert all(min(step.draft_probs) > 0 for result in theirs for step in result.drafts)
    assert np.abs(acceptance_scores(theirs, ours)).max() < normal_quantile(1e-4 / (2 * GAMMA))


def test_acceptance_and_tokens_are_those_of_a_stock_server(served, target, start, tmp_path):
    """As in test_sglang_stock.py, with the draft of EAGLE-3."""
    played = stock.play(target, tmp_path, draft=start, plugin=served)
    stock.check_acceptance(played)
    stock.check_first_tokens(played)


def test_a_run_co_trains_the_draft_that_its_server_drafts_with(tmp_path):
    """Two steps of the main job; policy and draft reach the server by the trainer's broadcast."""
    needs_sglang()
    tiny = ROOT / "models" / "tiny"
    draft = write_random_draft(tmp_path / "draft", tiny, ids=range(400), scale=0.05)
    result = run(
        "+recipe=swe_rl",
        "rollout=sglang",
        "run.dir=out",
        *SMALL,
        "val.every=0",
        f"rollout.sglang.python={find_environment(SglangConfig(), on_gpu=False).python}",
        "rollout.device=cpu",
        "rollout.sglang.weight_transfer=collective",
        "spec.drafter=eagle3",
        f"spec.draft_path={draft}",
        "draft.train=online",
        cwd=tmp_path,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    out = tmp_path / "out"
    _, *records = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    policy, draft = read_weights(tiny), load_file(draft / "model.safetensors")
    sent = [w for name, w in policy.items() if not is_mtp_weight(name)]
    sent += [w for name, w in draft.items() if name not in ("d2t", "t2d")]
    for step, record in enumerate(records, 1):
        assert step - record["weights/version"] in (0, 1)
        assert record["mtp/grad_norm"] > 0
    assert records[-1]["weights/version"] == 2 and records[-1]["weights/canary_failures"] == 0
    assert records[-1]["weights/bytes"] == sum(w.nbytes for w in sent)
    assert len(records) == 2 and prompt_states(out) == {"trained": 4}
    learnt = load_file(out / "checkpoints" / "step_2" / "draft" / "model.safetensors")
    assert not torch.equal(learnt["fc.weight"], draft["fc.weight"])
    faults = {"broadcast_failed", "canary_failed", "server_died", "weights_lost"}
    assert not faults & {json.loads(line)["kind"] for line in (out / "events.jsonl").read_text().splitlines()}
