"""From which directory SGLang serves a target that gives a draft the outputs of its layers."""

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
    """The directory from which a server loads the target in `path`.

    SGLang's class for MiMo gives no outputs of layers to a draft (models/mimo.py); its backbone is Qwen2's,
    whose class does. So a MiMo is served as that: linked from a temporary directory with such a config.json,
    its MTP layer left aside.
    """
    config = read_config(path)
    if not spec.needs_draft or config.get("architectures") != ["MiMoForCausalLM"]:
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
