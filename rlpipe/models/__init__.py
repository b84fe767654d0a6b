"""Model families, which the trainer, the engines and the canary read.

To add a family, write a module of this package that defines `FAMILY`, and add a row to `FAMILIES`. Two
modules contain the common parts: `base` (dimensions, refusals, the table of weights) and `checkpoint` (the
files of a Hugging Face directory). This package contains only data and loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpipe.models import (
    deepseek_v3,
    glm4_moe,
    llama,
    mimo,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from rlpipe.models.base import Architecture, Family

FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "llama": llama.FAMILY,
    "mimo": mimo.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_moe": qwen3_5_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
}
"""`model_type` of a `config.json` -> its family."""


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Return the family that a `config.json` names. Raises ValueError when there is none of that name."""
    name = hf_config.get("model_type")
    if isinstance(name, str):
        name = name.removesuffix("_text")  # the text part of a multimodal model
    if name not in FAMILIES:
        raise ValueError(
            f"model_type={name!r} is not supported. Use a checkpoint of one of these families: "
            f"{', '.join(FAMILIES)}; or add one (CONTRIBUTING.md, 'A model family')."
        )
    return FAMILIES[name]


def read_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """Read the dimensions of a model from the contents of its `config.json`.

    Raises ValueError for unknown families, and for options that are not supported.
    """
    return family_of(hf_config).parse(hf_config)
