"""Where SGLang keeps the experts that read each token (`--enable-return-routed-experts`), on a CPU too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def registered(original: Callable, buffer: torch.Tensor, *how: Any, **options: Any) -> None:
    """AROUND `_cuda_host_register`: memory of the host is registered for copies where there is a GPU."""
    if torch.cuda.is_available():
        original(buffer, *how, **options)
