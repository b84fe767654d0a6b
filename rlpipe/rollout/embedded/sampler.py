"""Distributions and samples of the engine: our kernels in bfloat16 on CPUs with AVX-512, torch elsewhere.

With 49k tokens and a single row, torch's passes over the vocabulary take a tenth of a decode step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlpipe.rollout.embedded import cpu_kernels
from rlpipe.spec.sampling import log_probs, sample_cdf, softmax


class Distributions(NamedTuple):
    """log_probs, probs: [N, V] float32. entropies: [N] float32, in nats."""

    log_probs: torch.Tensor
    probs: torch.Tensor
    entropies: torch.Tensor

    def select(self, rows: torch.Tensor | slice) -> Distributions:
        """Return some rows."""
        return Distributions(*(column[rows] for column in self))

    def then(self, other: Distributions) -> Distributions:
        """Return these rows and, after them, those of another."""
        return Distributions(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


class Sampler:
    """Computes distributions from logits of a model on `device` in `dtype`, and samples from them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._kernels = cpu_kernels.usable(device, dtype)

    def distributions(self, logits: torch.Tensor, temperature: torch.Tensor | None) -> Distributions:
        """Compute the distributions of logits [N, V]; temperature: [N], or None for 1."""
        if (kernels := self.kernels_for(logits)) is not None:
            return Distributions(*kernels.distributions(logits, temperature))
        log_p = log_probs(logits, temperature)
        probs = log_p.exp()
        return Distributions(log_p, probs, -torch.linalg.vecdot(probs, log_p))

    def softmax(self, logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
        """Compute probabilities from logits [N, ..., V] in float32; temperature: [N], or None for 1."""
        kernels = self.kernels_for(logits) if logits.dim() == 2 else None
        return softmax(logits, temperature) if kernels is None else kernels.softmax(logits, temperature)

    def sample(self, weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Sample from unnormalised weights; see `sample_cdf`."""
        kernels = self.kernels_for(weights)
        return sample_cdf(weights, uniforms) if kernels is None else kernels.sample(weights, uniforms)

    def kernels_for(self, rows: torch.Tensor) -> cpu_kernels.Kernels | None:
        """Return the kernels if they can read rows over this vocabulary, [..., V]."""
        return None if rows.shape[-1] % cpu_kernels.LANES else self._kernels
