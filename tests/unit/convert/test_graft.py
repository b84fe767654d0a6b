"""A grafted model computes what it did, drafts by the engine's equations, and better than the identity."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.convert.closed_form import Drafter, Sample, backbone_states, fit_input_proj
from rlpipe.convert.graft import graft
from rlpipe.convert.samples import read_samples
from rlpipe.loop.event_loop import run_coroutine
from rlpipe.models.checkpoint import MTP_FILE, read_config
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.types import GenerateRequest, SamplingParams
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES = {  # the last has heads wider than the hidden size, one key head, a tied head
    "small": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "deep": {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
    "odd": {
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}
VOCABULARY = 97
PROMPT = [3, 14, 15, 92]


def write_model(path, family="qwen2", size="small"):
    """A random model of transformers, and rollouts for it."""
    torch.manual_seed(0)
    config = FAMILIES[family](
        vocab_size=VOCABULARY,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.3,
        **SIZES[size],
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(path / "model")
    lines = [json.dumps({"rollouts_of": "a model"})]
    for seed in range(24):
        ids = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        lines.append(json.dumps({"token_ids": ids, "loss_mask": [0] * 4 + [1] * 36}))
    (path / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    return model


def generate(path):
    """A sampled answer of the embedded engine, with its drafts."""
    engine = EmbeddedEngine(RolloutConfig(max_running=2, max_context=64), SpecConfig(gamma=3), path)
    sampling = SamplingParams(max_new_tokens=24, seed=1, record_drafts=True)
    try:
        return run_coroutine(
            engine.generate(GenerateRequest(request_id="a", prompt_ids=PROMPT, sampling=sampling))
        )
    finally:
        engine.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_grafted_model_keeps_its_log_probabilities_while_it_drafts(family, size, tmp_path):
    model = write_model(tmp_path, family, size)
    result = graft(
        tmp_path / "model", tmp_path / "out", rollouts=tmp_path / "rollouts.jsonl", report=lambda line: None
    )
    assert 0 < result.r2 < 1 and sum(result.closed_form) > sum(result.identity)
    assert read_config(tmp_path / "out")["model_type"] == family

    answer = generate(tmp_path / "out")
    ids = torch.tensor([PROMPT + answer.output_ids.tolist()])
    with torch.no_grad():
        expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[3:, 0]
    assert sum(answer.spec.drafted) > 0
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_two_grafts_are_equal_byte_for_byte_and_transformers_reads_the_model_alone(tmp_path):
    model = write_model(tmp_path)
    for out in ("a", "b"):
        graft(
            tmp_path / "model", tmp_path / out, rollouts=tmp_path / "rollouts.jsonl", report=lambda line: None
        )
    assert (tmp_path / "a" / MTP_FILE).read_bytes() == (tmp_path / "b" / MTP_FILE).read_bytes()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "a").state_dict()
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_acceptance_is_of_the_distributions_that_the_engine_drafts_from(family, tmp_path):
    model = write_model(tmp_path, family)
    graft(
        tmp_path / "model", tmp_path / "out", rollouts=tmp_path / "rollouts.jsonl", report=lambda line: None
    )
    drafter = Drafter(model, load_file(tmp_path / "out" / MTP_FILE), model.config.rms_norm_eps)
    answer = generate(tmp_path / "out")
    ids, compared = PROMPT + answer.output_ids.tolist(), 0
    head = model.get_output_embeddings().weight.detach()
    for step in answer.drafts:
        # The draft of depth 1 predicts the token after the next of its anchor; later depths read the drafts.
        start = len(PROMPT) + step.position
        sequence = torch.tensor(ids[:start] + step.tokens)
        sample = Sample(ids=sequence, sampled=torch.ones(len(sequence), dtype=torch.bool))
        states = drafter.unroll(backbone_states(model, sample), len(step.tokens))
        for token, state, probability in zip(step.tokens, states, step.draft_probs, strict=True):
            q = F.linear(state[start - 2], head).softmax(-1)
            assert abs(float(q[token]) - probability) < 1e-4
            compared += 1
    assert compared > 20


def test_the_fit_recovers_a_linear_map_and_ignores_attention_sinks():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    weight, states = random(8, 16), []
    for _ in range(20):
        hidden, embedded = random(30, 8), random(30, 8)
        inputs = torch.cat((F.rms_norm(hidden[:-1], (8,)), F.rms_norm(embedded[1:], (8,))), 1)
        last = torch.cat((random(1, 8), inputs @ weight.T))
        last[1] = 1e4 * random(8)
        states.append(type("S", (), {"hidden": hidden, "embedded": embedded, "last_input": last}))
    fitted, r2 = fit_input_proj(states, 1e-6)
    assert r2 > 0.999 and torch.allclose(fitted, weight, atol=0.02)


@pytest.mark.parametrize(("family", "message"), [("mimo", "already"), ("qwen3_moe", "dense models")])
def test_models_that_cannot_be_grafted_are_refused_by_name(family, message, tmp_path):
    model = write_random_checkpoint(tmp_path / "model", family)
    with pytest.raises(ValueError, match=message):
        graft(model, tmp_path / "out", report=lambda line: None)


@pytest.mark.parametrize("line", ['{"token_ids": [1, 97]}', '{"token_ids": [1], "loss_mask": []}', '"text"'])
def test_rollouts_that_are_no_tokens_of_the_model_are_refused_with_their_line(line, tmp_path):
    file = tmp_path / "rollouts.jsonl"
    file.write_text("[1, 2, 3]\n" + line + "\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:2"):
        read_samples(file, VOCABULARY)
