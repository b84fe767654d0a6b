"""Models of other families with an MTP layer of MiMo's layout (`rlpipe graft`); servers load them as MiMo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpipe.models import read_architecture
from rlpipe.models.base import Architecture
from rlpipe.models.checkpoint import GRAFTED, has_mtp

MIMO = "MiMoForCausalLM"


def is_grafted(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has an MTP layer of MiMo's layout, but a model class that ignores it."""
    return has_mtp(config) and config.get("architectures") != [MIMO] and config["model_type"] in GRAFTED


def fits_mimo(arch: Architecture) -> bool:
    """Return whether SGLang's MiMo class can run a model: a Qwen2 decoder, with or without q/k/v biases."""
    return not (arch.qk_norm or arch.output_bias or arch.mlp_bias)


def served_with_zero_biases(config: Mapping[str, Any]) -> bool:
    """Return whether a server stores zero biases of query, key and value because the model has no biases."""
    if not is_grafted(config):
        return False
    arch = read_architecture(config)
    return fits_mimo(arch) and not arch.qkv_bias
