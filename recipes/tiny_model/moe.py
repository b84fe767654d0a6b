"""An MoE in GLM-4.5's layout, cut from a small dense model, with its MTP layer and its files.

This module defines shapes, tensor names, and how the dense model is cut; it trains nothing. Modules come from
transformers, except for the MTP layer, which transformers does not read: `final(decoder(eh_proj([enorm(e),
hnorm(h)])))`.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PretrainedConfig, Qwen2Config
from transformers.models.glm4_moe import modeling_glm4_moe as glm

from recipes.tiny_model.settings import MoeShape
from rlpipe.models.checkpoint import MTP_PREFIX, TOKENIZER_FILES

UNUSED = (  # written by transformers for any model
    *("_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "output_attentions"),
    *("output_hidden_states", "problem_type", "return_dict"),
)
FLOAT32 = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")  # read in float32 by trainer and servers


def moe_config(dense: Qwen2Config, shape: MoeShape) -> Glm4MoeConfig:
    """Make the MoE's config from the dense model's: heads rotate fully, experts follow the first layer."""
    return Glm4MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=dense.hidden_size,
        intermediate_size=dense.intermediate_size,
        num_hidden_layers=dense.num_hidden_layers,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        head_dim=dense.head_dim,
        max_position_embeddings=dense.max_position_embeddings,
        rms_norm_eps=dense.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        attention_bias=True,
        use_qk_norm=False,
        tie_word_embeddings=False,
        n_routed_experts=shape.experts,
        num_experts_per_tok=shape.per_token,
        moe_intermediate_size=shape.intermediate,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=float(shape.per_token),  # a token's experts weigh 1 on average
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        bos_token_id=None,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
    )


class GlmMtpLayer(nn.Module):
    """GLM-4.5's MTP layer; arguments and result are the same as for `layer.MtpLayer`."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"
        self.enorm, self.hnorm = glm.Glm4MoeRMSNorm(hidden, eps), glm.Glm4MoeRMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.decoder = glm.Glm4MoeDecoderLayer(config, layer_idx=config.first_k_dense_replace)
        self.decoder.self_attn.layer_idx = 0
        self.final = glm.Glm4MoeRMSNorm(hidden, eps)
        self._rotary = [glm.Glm4MoeRotaryEmbedding(config)]  # in a list: no parameters, no state dict entry

    def forward(self, hidden: Tensor, embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """Compute one depth of sequences; hidden, embeddings: [B, T, H]. Returns [B, T, H], normalised."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        rope = self._rotary[0](x, position_ids)
        return self.final(self.decoder(x, position_embeddings=rope))


def cut(dense: Mapping[str, Tensor], prefix: str, block: nn.Module, generator: torch.Generator) -> None:
    """Turn a dense MLP into an MoE, in place: `block` is a Glm4MoeMoE.

    dense: weights by Hugging Face name, the MLP's below `prefix`. The shared expert gets the channels with
    the largest weights. For each other expert, channels are sampled from the remaining ones. The experts'
    outputs are scaled so that the sum of a token's experts equals, in expectation over the sampling, the
    output of the remaining channels in the dense MLP.
    """
    gate, up, down = (dense[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    order = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).argsort(descending=True)
    shared, experts = block.shared_experts, block.experts
    inner, count = shared.gate_proj.weight.shape[0], experts.num_experts
    rest = order[inner:]
    scale = len(rest) / (inner * block.top_k)
    with torch.no_grad():
        for target, source in ((shared.gate_proj, gate), (shared.up_proj, up)):
            target.weight.copy_(source[order[:inner]])
        shared.down_proj.weight.copy_(down[:, order[:inner]])
        for index in range(count):
            chosen = rest[torch.randperm(len(rest), generator=generator)[:inner]]
            experts.gate_up_proj[index].copy_(torch.cat([gate[chosen], up[chosen]]))
            experts.down_proj[index].copy_(down[:, chosen] * scale)
        block.gate.weight.normal_(std=0.02, generator=generator)


def upcycle(
    dense: Mapping[str, Tensor], config: Glm4MoeConfig, seed: int
) -> tuple[Glm4MoeForCausalLM, GlmMtpLayer]:
    """Make MoE and MTP layer from a dense checkpoint in MiMo's layout, before any training."""
    generator = torch.Generator().manual_seed(seed)
    model, layer = Glm4MoeForCausalLM(config), GlmMtpLayer(config)
    same = {name: tensor for name, tensor in dense.items() if not name.startswith(MTP_PREFIX)}
    model.load_state_dict(same, strict=False)
    for index in range(config.first_k_dense_replace, config.num_hidden_layers):
        cut(dense, f"model.layers.{index}.mlp.", model.model.layers[index].mlp, generator)
    draft = {n.removeprefix(MTP_PREFIX): tensor for n, tensor in dense.items() if n.startswith(MTP_PREFIX)}
    layer.decoder.load_state_dict(draft, strict=False)
    cut(draft, "mlp.", layer.decoder.mlp, generator)
    layer.enorm.weight.data.copy_(draft["token_layernorm.weight"])
    layer.hnorm.weight.data.copy_(draft["hidden_layernorm.weight"])
    layer.final.weight.data.copy_(draft["final_layernorm.weight"])
    hidden, token = draft["input_proj.weight"].chunk(2, 1)  # MiMo reads the hidden state first
    layer.eh_proj.weight.data.copy_(torch.cat([token, hidden], 1))
    return model, layer


def routers(module: nn.Module) -> list[nn.Module]:
    """Return the routers of all MoE layers of a module."""
    return [part for part in module.modules() if isinstance(part, glm.Glm4MoeTopkRouter)]


class Balance:
    """Balances the load of experts: after each step a bias moves by `rate` towards those used less.

    This is DeepSeek-V3's rule (arXiv:2412.19437, section 2.1.2), by which GLM-4.5's bias was trained.
    """

    def __init__(self, module: nn.Module, rate: float) -> None:
        self._rate, self.spread = rate, 0.0
        self._handles = [router.register_forward_hook(self._count) for router in routers(module)]
        self._loads: dict[nn.Module, Tensor] = {}

    @torch.no_grad()
    def _count(self, router: nn.Module, _inputs: object, scores: Tensor) -> None:
        chosen = (scores.sigmoid() + router.e_score_correction_bias).topk(router.top_k).indices
        load = chosen.flatten().bincount(minlength=router.n_routed_experts)
        self._loads[router] = self._loads.get(router, 0) + load

    def step(self) -> None:
        """Move the biases by the loads since the last call; set `spread` to largest load over mean load."""
        shares = []
        for router, load in self._loads.items():
            load = load.float()
            router.e_score_correction_bias += self._rate * (load.mean() - load).sign()
            shares.append((load.max() / load.mean()).item())
        self._loads.clear()
        self.spread = max(shares)

    def close(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()


def stored(model: Glm4MoeForCausalLM, layer: GlmMtpLayer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights with the names of GLM-4.5's files; routers and their biases are in float32."""
    number = model.config.num_hidden_layers
    weights = dict(model.state_dict())
    for name, tensor in layer.state_dict().items():
        name = name.removeprefix("decoder.").replace("final.", "shared_head.norm.")
        weights[f"model.layers.{number}.{name}"] = tensor
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for index, both in enumerate(tensor):
                base = name.removesuffix("gate_up_proj") + f"{index}."
                tensors[f"{base}gate_proj.weight"], tensors[f"{base}up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            for index, one in enumerate(tensor):
                tensors[f"{name.removesuffix('down_proj')}{index}.down_proj.weight"] = one
        else:
            tensors[name] = tensor
    return {
        name: tensor.detach().to(torch.float32 if name.endswith(FLOAT32) else dtype).clone()
        for name, tensor in tensors.items()
    }


def save_mixture(path: Path, model: Glm4MoeForCausalLM, layer: GlmMtpLayer, like: Path, dtype: str) -> None:
    """Write config.json, model.safetensors and the tokenizer of the checkpoint `like`; keep a card if any."""
    path.mkdir(parents=True, exist_ok=True)
    written = {name: value for name, value in model.config.to_dict().items() if name not in UNUSED}
    config = written | {
        "architectures": ["Glm4MoeForCausalLM"],
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = stored(model, layer, getattr(torch, dtype))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        if (like / name).is_file():
            shutil.copy2(like / name, path / name)
