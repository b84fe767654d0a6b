"""Fingerprints by the Triton kernel on a CUDA device: those of the CPU, with one wait for all tensors."""

from __future__ import annotations

import pytest
import torch

from rlpipe.weights.fingerprint import fingerprints

pytestmark = pytest.mark.gpu


def test_fingerprints_on_the_gpu_equal_those_of_the_cpu():
    torch.manual_seed(0)
    tensors = {
        "tiles": [torch.randn(512, 256), torch.randn(64, 256), torch.randn(64, 256)],
        "parts within tiles": [torch.randn(7, 3).bfloat16(), torch.randn(9, 3).bfloat16()],
        "odd bytes": [torch.arange(8193 * 4 + 3).to(torch.uint8)],
        "transposed": [torch.randn(300, 500).t()],
        "one word": [torch.ones(1)],
        "empty": [torch.empty(0)],
    }
    on_gpu = {name: [part.cuda() for part in parts] for name, parts in tensors.items()}
    assert fingerprints(on_gpu, on_gpu=True) == fingerprints(tensors, on_gpu=True)
