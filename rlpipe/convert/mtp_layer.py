"""Reads an MTP layer from a file, and adds a layer to a checkpoint that has none.

The layer is stored in `mtp.safetensors` next to the checkpoint's weights, which do not change. Engines and
trainer read both; transformers ignores MTP layers and reads only the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import MTP_FILE, check_weights, is_mtp_weight, read_json

if TYPE_CHECKING:
    import torch


def read_layer(file: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of an MTP layer, keyed by their Hugging Face names (`model.mtp_layers.0.*`).

    Raises:
        ValueError: the file cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({error}): copy it again.") from None


def add_layer(directory: Path, layer: Mapping[str, torch.Tensor]) -> None:
    """Write an MTP layer into a checkpoint directory that has none.

    Args:
        directory: changed in place: `mtp.safetensors` is added, config.json counts the layer.
        layer: `model.mtp_layers.0.*` -> tensor.

    Raises:
        ValueError: the names or shapes of the tensors do not fit this model.
    """
    from safetensors.torch import save_file

    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    shapes = read_architecture(config).weight_shapes(mtp=True)
    expected = {name: shape for name, shape in shapes.items() if is_mtp_weight(name)}
    check_weights(layer, expected, frozenset())

    save_file(
        {name: layer[name].contiguous() for name in sorted(layer)}, directory / MTP_FILE, {"format": "pt"}
    )
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")

    # The index of a sharded checkpoint maps each tensor to its file.
    index_file = directory / "model.safetensors.index.json"
    if index := read_json(index_file, "model.path"):
        index["weight_map"] |= dict.fromkeys(sorted(layer), MTP_FILE)
        index_file.write_text(json.dumps(index, indent=1) + "\n")
