"""Lets SGLang store each token's experts (`--enable-return-routed-experts`) on a CPU too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def registered(original: Callable, buffer: torch.Tensor, *how: Any, **options: Any) -> None:
    """Around `_cuda_host_register`: register host memory for copies only if there is a GPU."""
    if torch.cuda.is_available():
        original(buffer, *how, **options)
