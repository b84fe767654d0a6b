"""A real SGLang server with experts: new weights arrive, and it reads them as the trainer does."""

import pytest

from rlpipe.models.checkpoint import read_weights, write_checkpoint
from tests.helpers.engines import generate, request, transformers_logits, worst_logprob_error
from tests.helpers.sglang import perturbed, running_server
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import trainer_logprobs

pytestmark = pytest.mark.integration


def test_a_server_holds_the_experts_that_were_sent_and_agrees_with_the_trainer(tmp_path):
    path = write_random_checkpoint(tmp_path / "model", "qwen3_moe", expert_intermediate=32)
    weights, updated, prompt = read_weights(path), tmp_path / "updated", [5, 6, 7]
    new = perturbed(weights, 0.02)
    write_checkpoint(updated, new, like=path)
    with running_server(path, tmp_path / "logs", "none", bucket_mb=1) as engine:
        engine.update_weights(new, 1)
        assert engine.check_weights(new).passed and not engine.events
        assert len(engine.check_weights(weights).target) == 21  # every tensor changed and is checked
        name = "model.layers.1.mlp.experts.6.down_proj.weight"
        wrong = new | {name: new[name].clone()}
        wrong[name][3, 4] += 1e-3
        assert engine.check_weights(wrong).target == ["model.layers.1.mlp.experts.w2_weight"]
        result = generate(engine, request("r", prompt, max_new_tokens=24))[0]
    expected = trainer_logprobs(updated, [(prompt, result)])[0]
    assert result.logprobs == pytest.approx(expected, abs=1e-4)
    assert worst_logprob_error(transformers_logits(updated), prompt, result) < 1e-4
