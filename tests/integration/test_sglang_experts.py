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
SERVED = {  # tensors of target and draft
    "qwen3_moe": ("none", 21, 0),
    "glm4_moe": ("rejection", 25, 19),
    "deepseek_v3": ("rejection", 27, 20),
}


def test_experts_that_a_server_pads_are_understood_and_kept_up_to_date(tmp_path):
    """SGLang makes 12 channels 32 on a CPU; rlpipe learns it from the server and expects the zeros, too.

    Those of the expert that reads every token as well.
    """
    path = write_random_checkpoint(tmp_path / "model", "glm4_moe", expert_intermediate=12)
    weights = read_weights(path)
    new = perturbed(weights, 0.02)
    with running_server(path, tmp_path / "logs", "none") as engine:
        engine.update_weights(new, 1)
        assert engine.check_weights(new).passed and not engine.events
        old = engine.check_weights(weights)
        assert any(name.endswith("experts.w2_weight") for name in old.target)
        assert not engine.membership().server  # a broadcast's fingerprints are of what was sent


@pytest.mark.parametrize("family", SERVED)
def test_a_server_holds_the_experts_that_were_sent_and_agrees_with_the_trainer(tmp_path, family):
    rope = DEEPSEEK_YARN if family == "deepseek_v3" else None
    path = write_random_checkpoint(tmp_path / "model", family, expert_intermediate=32, rope_parameters=rope)
    mode, target, draft = SERVED[family]
    weights, updated, prompt = read_weights(path), tmp_path / "updated", [5, 6, 7]
    new = perturbed(weights, 0.02)
    write_checkpoint(updated, new, like=path)
    with running_server(path, tmp_path / "logs", mode, bucket_mb=1, routes=True) as engine:
        engine.update_weights(new, 1)
        assert engine.check_weights(new).passed and not engine.events
        old = engine.check_weights(weights)
        assert (len(old.target), len(old.draft)) == (target, draft)  # every tensor changed and is checked
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
