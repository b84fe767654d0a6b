"""Model families: one file each, discovered here, read by the trainer, the engines and the canary.

A family is a module of this package that holds `FAMILY`. What all share stands in `base` (dimensions,
refusals, the table of weights) and in `checkpoint` (the files of a Hugging Face directory). Everything here
is data: nothing loads torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from rlpipe.models.base import Architecture, Family

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
FAMILIES: dict[str, Family] = {m.FAMILY.name: m.FAMILY for m in _MODULES if hasattr(m, "FAMILY")}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a `config.json` names. Raises ValueError when there is none of that name."""
    name = hf_config.get("model_type")
    if isinstance(name, str):
        name = name.removesuffix("_text")  # of a model that also sees
    if name not in FAMILIES:
        raise ValueError(
            f"model_type={name!r} is not supported. Use a checkpoint of one of these families: "
            f"{', '.join(FAMILIES)}; or add one (CONTRIBUTING.md, 'A model family')."
        )
    return FAMILIES[name]


def read_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """Dimensions from the contents of a `config.json`.

    Raises ValueError for families and options that would be computed wrongly.
    """
    return family_of(hf_config).parse(hf_config)
