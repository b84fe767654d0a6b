"""Makes a directory for targets that SGLang cannot serve from the checkpoint's own directory.

MiMo, with a draft that reads the outputs of its layers    served as Qwen2, whose class returns them
a grafted MTP layer (`rlpipe graft`) of another family     served as MiMo, whose class has the draft
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlpipe.config.spec import SpecConfig
from rlpipe.models import read_architecture
from rlpipe.models.base import Architecture
from rlpipe.models.checkpoint import mtp_prefix, read_config
from rlpipe.models.grafted import MIMO, fits_mimo, is_grafted


@contextmanager
def served_target(path: Path, spec: SpecConfig) -> Iterator[Path]:
    """Yield the directory from which a server loads the target in `path`.

    SGLang's class for MiMo does not give outputs of layers to a draft (models/mimo.py). MiMo has the backbone
    of Qwen2, and SGLang's class for Qwen2 gives these outputs. So a MiMo is served as Qwen2, without its MTP
    layer: a temporary directory has a config.json for Qwen2 and links to the checkpoint's other files. A
    grafted model is served as MiMo in the same way. If its family has no biases on query, key and value, the
    server gets zeros. No update names these biases, so they stay zero; the checkpoint and the trainer do not
    have them.
    """
    config = read_config(path)
    arch = read_architecture(config)
    rewritten = is_grafted(config) and fits_mimo(arch)
    mimo = config.get("architectures") == [MIMO]
    if not rewritten and not (spec.needs_draft and mimo):
        yield path
        return

    config |= {"architectures": [MIMO], "model_type": "qwen2"}
    for name in ("auto_map", "attention_bias"):
        config.pop(name, None)
    if spec.needs_draft:
        # Without this key, SGLang loads the backbone only.
        config.pop("num_nextn_predict_layers", None)
        config["architectures"] = ["Qwen2ForCausalLM"]
    with tempfile.TemporaryDirectory(prefix="rlpipe-served-") as temporary:
        folder = Path(temporary)
        for file in path.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
        if not arch.qkv_bias:
            _write_zero_biases(folder, arch)
        yield folder


def _write_zero_biases(folder: Path, arch: Architecture) -> None:
    """Add zero biases of query, key and value to a linked checkpoint, also for its MTP layer."""
    import torch
    from safetensors.torch import save_file

    rows = {"q": arch.heads * arch.head_dim, "k": arch.kv_heads * arch.head_dim}
    rows["v"] = rows["k"]
    prefixes = [f"model.layers.{index}." for index in range(arch.layers)] + [mtp_prefix(0)]
    biases = {
        f"{prefix}self_attn.{name}_proj.bias": torch.zeros(count)
        for prefix in prefixes
        for name, count in rows.items()
    }
    file = "zero_biases.safetensors"
    save_file(biases, folder / file, {"format": "pt"})

    # SGLang reads a checkpoint of several files by its index, so add the new file to it.
    index_file = folder / "model.safetensors.index.json"
    if index_file.is_file():
        index = json.loads(index_file.read_text())
        index["weight_map"] |= dict.fromkeys(biases, file)
        index_file.unlink()  # it is a link to the checkpoint's index
        index_file.write_text(json.dumps(index))
