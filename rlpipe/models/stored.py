"""Differences between the files of Qwen3-Next and Qwen3.5 and rlpipe's format: configs, names, fused experts.

    mtp.fc, mtp.norm, ..., mtp.layers.0.*     the MTP layer; config.json may not mention it
    model.language_model.*                    the text model of a Qwen3.5; its settings are in `text_config`
    model.visual.*                            the vision tower of a Qwen3.5: not read, but exports copy it
    mlp.experts.gate_up_proj, .down_proj      all experts of a layer, [experts, out, in]

Pure functions of names, shapes and slices; files are read and written by `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MTP = "mtp."
MTP_LAYER = "mtp.layers.0."
MTP_PREFIX = "model.mtp_layers.0."
VISION = "model.visual."
_TEXT = "model.language_model."
_OF_DRAFT = ("fc.", "norm.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.")
_FUSED = {
    "mlp.experts.gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "mlp.experts.down_proj": ("down_proj.weight",),
}


def is_qwen_hybrid(config: Mapping[str, Any]) -> bool:
    """Return whether a model's files have the format that this module describes."""
    return str(config.get("model_type")).startswith(("qwen3_next", "qwen3_5"))


def plain_config(config: Mapping[str, Any], *, mtp: bool | None) -> dict[str, Any]:
    """Return a config.json with its text settings at the top and its MTP layer under the usual name.

    mtp: whether the files have an MTP layer; None if there are no files to check.
    """
    if not is_qwen_hybrid(config):
        return dict(config)

    text = config.get("text_config") or {}
    plain = {**config, **text, "model_type": config["model_type"]}
    plain["tie_word_embeddings"] = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))

    # config.json may not mention the MTP layer, so the files decide.
    layers = plain.get("num_nextn_predict_layers") or plain.get("mtp_num_hidden_layers") or int(mtp or 0)
    plain["num_nextn_predict_layers"] = 0 if mtp is False else layers
    return plain


def file_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the name of a weight in files and on servers.

    >>> file_name("model.mtp_layers.0.fc.weight", {})
    'mtp.fc.weight'
    >>> file_name("model.mtp_layers.0.mlp.gate.weight", {})
    'mtp.layers.0.mlp.gate.weight'
    >>> file_name("model.norm.weight", {"text_config": {}})
    'model.language_model.norm.weight'
    """
    if name.startswith(MTP_PREFIX):
        suffix = name.removeprefix(MTP_PREFIX)
        return (MTP if suffix.startswith(_OF_DRAFT) else MTP_LAYER) + suffix
    if "text_config" in config and name.startswith("model."):
        return _TEXT + name.removeprefix("model.")
    return name


def hf_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the name of a weight that files call `name`; empty for a weight that is not read.

    >>> hf_name("mtp.layers.0.mlp.gate.weight", {}), hf_name("model.visual.patch_embed.proj.weight", {})
    ('model.mtp_layers.0.mlp.gate.weight', '')
    """
    if name.startswith(VISION):
        return ""
    if name.startswith(MTP):
        return MTP_PREFIX + name.removeprefix(MTP_LAYER if name.startswith(MTP_LAYER) else MTP)
    return "model." + name.removeprefix(_TEXT) if name.startswith(_TEXT) else name


def split_experts(
    name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[Any, ...], tuple[int, ...]]]:
    """Yield name, index and shape of each weight in a tensor of fused experts; yield any other tensor as is.

    >>> for name, _, rows in split_experts("model.layers.7.mlp.experts.down_proj", (2, 8, 4)):
    ...     print(name, rows)
    model.layers.7.mlp.experts.0.down_proj.weight (8, 4)
    model.layers.7.mlp.experts.1.down_proj.weight (8, 4)
    """
    ending = next((ending for ending in _FUSED if name.endswith(ending)), None)
    if ending is None:
        yield name, (), shape
        return

    prefix, matrices = name.removesuffix(ending) + "mlp.experts.", _FUSED[ending]
    rows = shape[1] // len(matrices)
    for expert in range(shape[0]):
        for position, matrix in enumerate(matrices):
            yield (
                f"{prefix}{expert}.{matrix}",
                (expert, slice(position * rows, (position + 1) * rows)),
                (rows, shape[2]),
            )
