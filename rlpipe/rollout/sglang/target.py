"""The directory from which SGLang serves a target whose draft reads the outputs of its layers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_config


@contextmanager
def served_target(path: Path, spec: SpecConfig) -> Iterator[Path]:
    """Yield the directory from which a server loads the target in `path`.

    SGLang's class for MiMo gives no outputs of layers to a draft (models/mimo.py); its backbone is Qwen2's,
    whose class does. So a MiMo is served as Qwen2, without its MTP layer: linked from a temporary directory
    with such a config.json.
    """
    config = read_config(path)
    if not spec.needs_draft or config.get("architectures") != ["MiMoForCausalLM"]:
        yield path
        return

    # Without these keys, SGLang loads the backbone only.
    for name in ("num_nextn_predict_layers", "auto_map"):
        config.pop(name, None)
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    with tempfile.TemporaryDirectory(prefix="rlpipe-served-") as temporary:
        folder = Path(temporary)
        for file in path.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
        yield folder
