"""Turns and drafts behind 32k tokens, where YaRN stretches contexts: engine, trainer, transformers agree.

Tiny widths, one layer of which attention is the cost: the positions are the real ones. The original context
is a quarter of what is read, so frequencies that were not stretched, or a magnitude that was left out, show.
Angles are positions times frequencies in float32, whose last bit is 2e-3 radians at these positions: that is
why transformers' logprobs, from frequencies that it rounds in another order, are compared less strictly.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from tests.helpers.engines import generate, recomputed, request, running_engine
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import trainer_logprobs

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]

PROMPT, NEW, ORIGINAL, ROUNDED = 32_768, 24, 8192, 1e-3
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 5.0,
    "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model whose attention is sharp enough that a wrong rotation moves its logits."""
    return write_random_checkpoint(
        tmp_path_factory.mktemp("long"),
        layers=1,
        heads=2,
        kv_heads=1,
        scale=0.4,
        max_position=5 * ORIGINAL,
        rope_parameters=YARN,
    )


@pytest.fixture(scope="module")
def played(path):
    """Prompt and turn of an engine that drafts."""
    prompt = np.random.default_rng(0).integers(2, 64, PROMPT).tolist()
    with running_engine(path, max_running=1, max_context=PROMPT + NEW) as engine:
        (result,) = generate(engine, request(0, prompt, max_new_tokens=NEW, stop_token_ids=[]))
    assert len(result.output_ids) == NEW and result.spec.proposed
    return prompt, result


def plain(path, ids, rope_parameters=None):
    """Logits of transformers at the last NEW + 1 places."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    if rope_parameters:
        config.rope_parameters = rope_parameters
    model = AutoModelForCausalLM.from_pretrained(path, config=config).eval()
    with torch.no_grad():
        return model(torch.tensor([ids]), logits_to_keep=NEW + 1).logits[0]


def test_the_engine_samples_behind_32k_tokens_from_what_transformers_says(path, played):
    prompt, result = played
    logprobs, entropies = recomputed(
        lambda ids: torch.cat([torch.empty(len(ids) - NEW - 1, 64), plain(path, ids)]), prompt, result
    )
    assert (torch.tensor(result.logprobs) - logprobs).abs().max() < ROUNDED
    assert (torch.tensor(result.entropies) - entropies).abs().max() < ROUNDED


def test_a_rotation_that_is_not_stretched_is_seen_at_these_positions(path, played):
    prompt, result = played
    unscaled = {"rope_type": "default", "rope_theta": YARN["rope_theta"]}
    ids = [*prompt, *result.output_ids.tolist()]
    assert (plain(path, ids) - plain(path, ids, unscaled)).abs().max() > 20 * ROUNDED


def test_the_trainer_gives_a_turn_behind_32k_tokens_the_same_logprobs(path, played):
    prompt, result = played
    (found,) = trainer_logprobs(path, [(prompt, result)])
    assert found == pytest.approx(result.logprobs.tolist(), abs=1e-4)


def test_the_last_of_128k_positions_is_rotated_as_transformers_rotates_it(path):
    from transformers import AutoConfig
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    config = read_config(path)
    config["rope_parameters"] = YARN | {"factor": 16.0}
    rope = read_architecture(config).rope
    theirs = AutoConfig.from_pretrained(path)
    theirs.rope_parameters = config["rope_parameters"]
    position, dim = 16 * ORIGINAL - 1, config["hidden_size"] // config["num_attention_heads"]
    cos, sin = Qwen2RotaryEmbedding(theirs)(torch.zeros(1), torch.tensor([[position]]))
    angles = position * torch.tensor(rope.frequencies(dim), dtype=torch.float64)
    for ours, given in ((angles.cos(), cos), (angles.sin(), sin)):
        expected = rope.magnitude * ours.repeat(2)
        torch.testing.assert_close(given[0, 0].double(), expected, atol=2e-2, rtol=0)
