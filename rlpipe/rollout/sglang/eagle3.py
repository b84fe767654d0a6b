"""EAGLE-3 drafts in SGLang: which of them it computes as they were trained, and for which targets.

Line numbers are SGLang 0.5.23's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlpipe.config.eagle3 import read_shape
from rlpipe.config.paths import resolve
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import WeightTransfer
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.models.checkpoint import read_config


def check_draft(rollout: RolloutConfig, spec: SpecConfig, target: Mapping[str, Any]) -> None:
    """Refuse a draft that SGLang would not load, or would compute otherwise than it was trained.

    target: `config.json` of the model. Raises ValueError with what, the value and the remedy.
    """
    shape = read_shape(resolve(spec.draft_path), target)
    named = f"spec.draft_path={spec.draft_path!r}"
    if rollout.sglang.draft_path:
        raise ValueError(
            f"rollout.sglang.draft_path={rollout.sglang.draft_path!r} names an MTP layer, and "
            "spec.drafter=eagle3 drafts from spec.draft_path: leave the first empty."
        )
    if rollout.sglang.weight_transfer is WeightTransfer.DISK:  # scheduler_components/weight_updater.py:143
        raise ValueError(
            "rollout.sglang.weight_transfer=disk with spec.drafter=eagle3: SGLang reads one checkpoint into "
            "target and draft. Set weight_transfer=auto, shared, tensor or collective."
        )
    if shape.reduced and spec.mode in (SpecMode.REJECTION, SpecMode.BLOCK):  # eagle_worker_v2.py:269
        raise ValueError(
            f"spec.mode={spec.mode}: {named} knows {shape.draft_vocab} of {shape.vocab} tokens, and SGLang "
            "samples drafts over the whole vocabulary only. Use spec.mode=target_only (or greedy), a draft "
            "trained with eagle3.draft_vocab=0, or rollout=embedded."
        )
    depth, layers = int(target["num_hidden_layers"]), list(shape.layers)
    # A model gives the inputs of the layers after these, in their order, and a draft leaves fc out where its
    # input is no wider than its state (models/qwen2.py:462, models/llama_eagle3.py:238).
    if len(layers) < 2 or layers != sorted(layers) or layers[-1] == depth - 1:
        raise ValueError(
            f"{named} reads layers {layers} of the target, and SGLang fuses two or more in ascending order "
            f"up to {depth - 2}. Train a draft on such eagle3.layers, or use rollout=embedded."
        )


@contextmanager
def served_target(path: Path, spec: SpecConfig) -> Iterator[Path]:
    """The directory from which a server loads the target in `path`.

    SGLang's class for MiMo gives no outputs of layers to a draft (models/mimo.py); its backbone is Qwen2's,
    whose class does. So a MiMo is served as that: linked from a temporary directory with such a config.json,
    its MTP layer left aside.
    """
    config = read_config(path)
    if not spec.needs_eagle3 or config.get("architectures") != ["MiMoForCausalLM"]:
        yield path
        return
    for name in ("num_nextn_predict_layers", "auto_map"):
        config.pop(name, None)
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    with tempfile.TemporaryDirectory(prefix="rlpipe-served-") as made:
        folder = Path(made)
        for file in path.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
        yield folder
