"""The tiny model's parts: an untrained backbone, and the checkpoint in MiMo layout.

This module defines shapes and files; it trains nothing.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipes.tiny_model.layer import MtpLayer
from recipes.tiny_model.settings import TinyShape
from recipes.tiny_model.tokenizer import CHAT_TEMPLATE, save_tokenizer
from rlpipe.models.checkpoint import MTP_PREFIX

VOCAB_MULTIPLE = 16


def build_backbone(shape: TinyShape, vocab: int, eos: int, pad: int, seed: int) -> Qwen2ForCausalLM:
    """Make a Qwen2 model with tied embeddings; the vocabulary is padded to a multiple of 16."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=math.ceil(vocab / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    model = Qwen2ForCausalLM(config)
    initialise(model, depth=shape.num_layers)
    return model


def initialise(model: nn.Module, depth: int) -> None:
    """Set normal weights of variance 0.5 / fan-in; embeddings use 0.02, residual outputs scale by depth."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = 0.02 if "embed" in name or "lm_head" in name else 0.7 / math.sqrt(parameter.shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * depth)
        nn.init.normal_(parameter, std=std)


def save_checkpoint(
    path: Path,
    backbone: Qwen2ForCausalLM,
    mtp: MtpLayer,
    bpe: Tokenizer,
    chat_template: str = CHAT_TEMPLATE,
    dtype: str = "float32",
) -> None:
    """Write config.json, model.safetensors (lm_head untied), generation config and tokenizer.

    The directory is replaced in one step, so that a reader never sees an incomplete one.
    """
    staging = path.with_name(path.name + ".staging")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    backbone.config.save_pretrained(staging)
    backbone.generation_config.save_pretrained(staging)
    file = staging / "config.json"
    config = json.loads(file.read_text()) | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "head_dim": backbone.config.head_dim,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in backbone.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights |= {MTP_PREFIX + name: tensor.detach().clone() for name, tensor in mtp.state_dict().items()}
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    save_file(weights, staging / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(bpe, staging, backbone.config.max_position_embeddings, chat_template)
    if (path / "README.md").is_file():
        shutil.copy2(path / "README.md", staging / "README.md")
    shutil.rmtree(path, ignore_errors=True)
    staging.rename(path)
