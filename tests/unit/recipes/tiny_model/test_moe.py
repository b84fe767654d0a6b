"""A mixture cut from a dense model: what it computes, what is written, and that its experts stay balanced."""

import pytest
import torch
from transformers import Qwen2ForCausalLM

from recipes.tiny_model.layer import MtpLayer
from recipes.tiny_model.model import build_backbone
from recipes.tiny_model.moe import Balance, moe_config, routers, stored, upcycle
from recipes.tiny_model.settings import MoeShape, TinyShape
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import MTP_PREFIX, read_name

pytestmark = pytest.mark.unit
IDS = torch.randint(2, 40, (3, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def dense() -> tuple[Qwen2ForCausalLM, dict[str, torch.Tensor]]:
    shape = TinyShape(hidden_size=32, num_layers=3, head_dim=8, intermediate_size=48)
    model = build_backbone(shape, 40, eos=1, pad=0, seed=0).eval()
    draft = {MTP_PREFIX + name: tensor for name, tensor in MtpLayer(model.config).state_dict().items()}
    weights = model.state_dict() | draft
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return model, weights


@torch.no_grad()
def test_experts_that_hold_all_channels_compute_what_the_dense_model_does(dense):
    model, weights = dense
    # two experts read every token, and together with the shared one they have all 48 channels twice over
    config = moe_config(model.config, MoeShape(experts=2, per_token=2, intermediate=24))
    mixture, layer = upcycle(weights, config, seed=0)
    for router in [*routers(mixture), *routers(layer)]:
        router.weight.zero_()  # every expert weighs 1
    torch.testing.assert_close(mixture.eval()(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)
    plain = MtpLayer(model.config)
    plain.load_state_dict(
        {n.removeprefix(MTP_PREFIX): t for n, t in weights.items() if n.startswith(MTP_PREFIX)}
    )
    hidden, embedded = torch.randn(2, 3, 5, 32).unbind(0)
    places = torch.arange(5)[None]
    expected = plain.eval()(hidden, embedded, places)
    torch.testing.assert_close(layer.eval()(hidden, embedded, places), expected, atol=1e-5, rtol=1e-5)


def test_what_is_written_is_what_the_family_reads(dense):
    model, weights = dense
    config = moe_config(model.config, MoeShape(experts=4, per_token=2, intermediate=16))
    tensors = stored(*upcycle(weights, config, seed=0), torch.bfloat16)
    settings = config.to_dict() | {"num_nextn_predict_layers": 1}
    shapes = {read_name(name, settings): tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == read_architecture(settings).weight_shapes(mtp=True)
    routed = {name for name, tensor in tensors.items() if tensor.dtype is torch.float32}
    assert routed == {name for name in tensors if ".mlp.gate." in name} and routed


@torch.no_grad()
def test_the_bias_moves_towards_experts_that_read_less(dense):
    model, weights = dense
    config = moe_config(model.config, MoeShape(experts=4, per_token=2, intermediate=16))
    mixture, _ = upcycle(weights, config, seed=0)
    router = routers(mixture)[0]
    router.weight[0] = 0
    router.weight[1:] *= 10
    router.e_score_correction_bias += torch.tensor([1.0, 0, 0, 0])  # every token goes to the first
    balance = Balance(mixture, rate=0.05)
    mixture(IDS)
    balance.step()
    assert balance.spread == 2.0  # all of its tokens, where the mean has half
    assert router.e_score_correction_bias[0].item() == pytest.approx(0.95)
    for _ in range(30):
        mixture(IDS)
        balance.step()
    assert balance.spread < 1.6
