"""In a scheduler: imports the file of the served model instead of all 259 model files.

SGLang imports all files when it looks up its first class, unless SGLANG_EXTERNAL_MODEL_PACKAGE names a
package of models that it should search first. rlpipe's launcher names this package, which has no models: the
hook adds the classes of the one file that defines the class in a checkpoint's config.json. If no file defines
it, SGLang imports all files, as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ASKED = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def one_file(original: Callable, model_config: Any) -> tuple[type, str]:
    """Around `get_model_architecture`, called for target and draft: first import the class's file."""
    from sglang.srt.models.registry import ModelRegistry

    for architecture in model_config.hf_config.architectures or ():
        if architecture not in ModelRegistry.models:
            ModelRegistry.models.update(_classes_beside(architecture))
    return original(model_config)


def _classes_beside(architecture: str) -> dict[str, type]:
    """Import the file that defines a class; return its model classes by name, empty without a file."""
    package = import_module("sglang.srt.models")
    definition = re.compile(rf"^class {re.escape(architecture)}\b", re.MULTILINE)

    for file in sorted(Path(package.__path__[0]).glob("*.py")):
        if definition.search(file.read_text()):
            entries = getattr(import_module(f"{package.__name__}.{file.stem}"), "EntryClass", [])
            classes = {one.__name__: one for one in (entries if isinstance(entries, list) else [entries])}
            if architecture in classes:
                return classes
    return {}
