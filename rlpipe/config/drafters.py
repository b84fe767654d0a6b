"""What may draft: one file of `rlpipe/drafts/kinds` per drafter, whose name is a value of `spec.drafter`.

A file holds `DRAFTER` and is imported when its drafter is asked for, so it may import torch, engine and
trainer. Imports no torch itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rlpipe

if TYPE_CHECKING:
    import numpy as np

    from rlpipe.config.run import Config
    from rlpipe.config.sglang import SglangConfig
    from rlpipe.config.spec import SpecConfig
    from rlpipe.models.base import Family, Part

HfConfig = Mapping[str, Any]


def _unchecked(*_: Any) -> None:
    """Nothing can be wrong."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ServedDraft:
    """Where an SGLang server keeps a draft, as the canary compares it.

    prefix: before the names of its weights where they travel with the target's.
    tables: of the target's family and config.json: name of a module of the draft's server, the same in the
        draft's own names, and its weights.
    shared: tensors of the target that the draft holds too.
    fixed: names of its files that are read when a server starts, and never sent.
    """

    prefix: str
    tables: Callable[[Family, HfConfig], Iterable[tuple[str, str, Iterable[Part]]]]
    shared: tuple[Part, ...] = ()
    fixed: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True, frozen=True)
class DrafterKind:
    """One drafter.

    title: what reports and the console call it.
    guess: tokens of the text [T], count, settings -> `count` tokens, certain given the text: a drafter
        without a model. None where a model drafts: the checkpoint's MTP layer, unless `draft` is named.
    draft: "module:name" of the `DraftModel` in the embedded engine, read from spec.draft_path.
    trainer: (config, directory to start from or "", trajectories) -> its trainer, beside the policy's; None
        for one that is trained inside the policy's trainer, or not at all.
    sglang: its `--speculative-algorithm`; "" where SGLang cannot draft so. served: what a server then holds.
    check_served: refuses settings with which it cannot draft, given the `config.json` of what is served.
    check_sglang: refuses drafts that SGLang computes otherwise, given the target's and the server's settings.
    check_trained: refuses to train it in `mtp_adapt`, given the target's. check_cotrained: beside the policy.
    """

    title: str
    guess: Callable[[np.ndarray, int, SpecConfig], np.ndarray] | None = None
    draft: str = ""
    trainer: Callable[..., Any] | None = None
    sglang: str = ""
    served: ServedDraft | None = None
    check_served: Callable[[Config, HfConfig], None] = _unchecked
    check_sglang: Callable[[SpecConfig, HfConfig, SglangConfig], None] = _unchecked
    check_trained: Callable[[Config, HfConfig], None] = _unchecked
    check_cotrained: Callable[[Config], None] = _unchecked


class _Drafters(Mapping[str, DrafterKind]):
    """Each drafter by its name, imported when it is asked for."""

    def __init__(self) -> None:
        folders = [f"{folder}/drafts/kinds" for folder in rlpipe.__path__]
        self._names = [module.name for module in pkgutil.iter_modules(folders)]

    def __getitem__(self, name: str) -> DrafterKind:
        return importlib.import_module(f"rlpipe.drafts.kinds.{name}").DRAFTER

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


DRAFTERS = _Drafters()
