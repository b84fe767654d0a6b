"""Real SGLang servers with experts: new weights arrive, and they read them as the trainer does."""

import numpy as np
import pytest

from rlpipe.models.checkpoint import read_weights, write_checkpoint
from tests.helpers.chosen_experts import chosen_experts
from tests.helpers.engines import generate, request, transformers_logits, worst_logprob_error
from tests.helpers.sglang import perturbed, running_server
from tests.helpers.tiny_checkpoint import DEEPSEEK_YARN, write_random_checkpoint
from tests.helpers.trainers import trainer_logprobs

pytestmark = pytest.mark.integration
SERVED = {  # channels of an expert, tensors of target and draft
    "qwen3_moe": ("none", 32, 21, 0),
    "glm4_moe": ("rejection", 12, 25, 19),  # SGLang makes them 32 on a CPU, those of shared experts, too
    "deepseek_v3": ("rejection", 32, 27, 20),
}


@pytest.mark.parametrize("family", SERVED)
def test_a_server_holds_the_experts_that_were_sent_and_agrees_with_the_trainer(tmp_path, family):
    """Of experts that it pads, rlpipe learns it from the server, and expects the zeros."""
    rope = DEEPSEEK_YARN if family == "deepseek_v3" else None
    mode, channels, target, draft = SERVED[family]
    path = write_random_checkpoint(
        tmp_path / "model", family, expert_intermediate=channels, rope_parameters=rope
    )
    weights, updated, prompt = read_weights(path), tmp_path / "updated", [5, 6, 7]
    new = perturbed(weights, 0.02)
    write_checkpoint(updated, new, like=path)
    with running_server(path, tmp_path / "logs", mode, bucket_mb=1, routes=True) as engine:
        engine.update_weights(new, 1)
        assert engine.check_weights(new).passed and not engine.events
        old = engine.check_weights(weights)
        assert (len(old.target), len(old.draft)) == (target, draft)  # every tensor changed and is checked
        # A broadcast's fingerprints are of what was sent, without zeros.
        assert bool(engine.membership().server) == (channels == 32)
        name = "model.layers.1.mlp.experts.6.down_proj.weight"
        wrong = new | {name: new[name].clone()}
        wrong[name][3, 4] += 1e-3
        assert engine.check_weights(wrong).target == ["model.layers.1.mlp.experts.w2_weight"]
        result = generate(engine, request("r", prompt, max_new_tokens=24, routes=True))[0]
        text = [*prompt, *result.output_ids.tolist(), 8, 9]
        later = generate(engine, request("s", text, max_new_tokens=6, routes=True))[0]
        fresh = generate(
            engine, request("t", text, max_new_tokens=6, routes=True, routes_from=len(text) - 3)
        )[0]
    expected = trainer_logprobs(updated, [(prompt, result)])[0]
    assert result.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    assert worst_logprob_error(transformers_logits(updated), prompt, result) < 1e-4
    # the second finds the first in the server's cache; the third wants the experts of new tokens alone
    for start, found in ((prompt, result), (text, later), (text, fresh)):
        ids = [*start, *found.output_ids.tolist()]
        assert found.routes.shape[0] == len(ids) - found.routes_from and (found.routes[-1] == 255).all()
        expected = chosen_experts(updated, ids)[found.routes_from : -1]
        assert np.array_equal(np.sort(found.routes[:-1], -1), expected)
    assert fresh.routes_from == len(text) - 3
