"""Reinforcement learning for language models with speculative rollouts.

This package exports the Python API (docs/python_api.md). Each name is imported on first use, so
`import rlpipe` loads no heavy library.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlpipe.api.engine import Engine, Generation
    from rlpipe.api.runs import Result, compose, load_run, run
    from rlpipe.config.run import Config
    from rlpipe.drafts.loss import mtp_loss
    from rlpipe.spec.verify import (
        verify_block,
        verify_chain,
        verify_greedy,
        verify_target_only,
        verify_tree,
        verify_tree_greedy,
    )

__all__ = [
    "Config",
    "Engine",
    "Generation",
    "Result",
    "compose",
    "load_run",
    "mtp_loss",
    "run",
    "verify_block",
    "verify_chain",
    "verify_greedy",
    "verify_target_only",
    "verify_tree",
    "verify_tree_greedy",
]


def __getattr__(name: str) -> Any:
    """Return a name of the API, after importing the module that defines it."""
    if name not in __all__:
        raise AttributeError(f"module 'rlpipe' has no attribute {name!r}")

    # This must precede the import of torch, which most of these modules import.
    from rlpipe.config.openmp import spin_briefly

    spin_briefly()
    if name.startswith("verify_"):
        from rlpipe.spec import verify as module
    elif name == "mtp_loss":
        from rlpipe.drafts import loss as module
    elif name == "Config":
        from rlpipe.config import run as module
    elif name in ("Engine", "Generation"):
        from rlpipe.api import engine as module
    else:
        from rlpipe.api import runs as module
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Type of this package: keeps `rlpipe.run` the function when the module `rlpipe.run` is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name == "run" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
