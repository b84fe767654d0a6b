"""What may draft: one file per drafter, whose name is that of the file and a value of `spec.drafter`.

A file holds `DRAFTER`. What needs torch stands elsewhere, or is named as "module:name" and loaded where it
runs: an engine, a trainer. Imports no torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from rlpipe.config.run import Config
    from rlpipe.config.spec import SpecConfig

HfConfig = Mapping[str, Any]


def _unchecked(*_: Any) -> None:
    """Nothing can be wrong."""


@dataclass(slots=True, kw_only=True, frozen=True)
class DrafterKind:
    """One drafter.

    title: what reports and the console call it.
    guess: tokens of the text [T], count, settings -> `count` tokens, certain given the text: a drafter
        without a model. None where a model drafts: the checkpoint's MTP layer, unless `draft` is named.
    draft: a `DraftModel` of the embedded engine with a directory of its own, `spec.draft_path`.
    trainer: (config, directory to start from or "", trajectories) -> its trainer, beside the policy's; "" for
        one that is trained inside the policy's trainer, or not at all.
    sglang: its `--speculative-algorithm`; "" where SGLang cannot draft so.
    check_served: refuses settings with which it cannot draft, given the `config.json` of what is served.
    check_trained: refuses to train it in `mtp_adapt`, given the target's. check_cotrained: beside the policy.
    """

    title: str
    guess: Callable[[np.ndarray, int, SpecConfig], np.ndarray] | None = None
    draft: str = ""
    trainer: str = ""
    sglang: str = ""
    check_served: Callable[[Config, HfConfig], None] = _unchecked
    check_trained: Callable[[Config, HfConfig], None] = _unchecked
    check_cotrained: Callable[[Config], None] = _unchecked


DRAFTERS: dict[str, DrafterKind] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").DRAFTER
    for module in pkgutil.iter_modules(__path__)
}
