"""Reduces gradients of decoder layers over data parallel ranks while the backward pass continues.

    backward of layer n done -> its bucket is complete -> reduced, after the buckets before it
    end of the backward pass -> the remaining buckets, in order

Megatron starts a bucket as soon as all its gradients exist, and every parameter must get one in every step.
Here a parameter may get none (a draft in a step that leaves it out, an expert without tokens, a rank without
micro-batches). So the buckets are started in one fixed order: ranks with different orders would deadlock.
Parameters that several passes use (embeddings, head, draft) are reduced at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads


class OrderedReduction:
    """Starts the reductions of one wrapped model.

    Invariant: buckets before `_next` of `_early` are started, and only those.
    """

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        """Replace Megatron's code that starts reductions. wrapped: built with `overlap_grad_reduce`."""
        names = {parameter: name for name, parameter in wrapped.module.named_parameters()}
        self._names = names
        self._early: list[Any] = []
        self._late: list[Any] = []
        groups: list[Any] = [*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups]
        for group in groups:
            once = all(names[p].startswith("decoder.layers.") for p in group.params)
            (self._early if once else self._late).append(group)
            group.is_first_batch = False  # Megatron counts gradients in the first batch
            group.register_grad_ready = partial(self._count, group)

        self._next = 0
        self._missing = {id(group): set(group.params) for group in self._early}
        config: Any = wrapped.module.config
        config.no_sync_func = wrapped.no_sync
        config.finalize_model_grads_func = partial(self._finish, finalize_model_grads)

    def _count(self, group: Any, parameter: torch.nn.Parameter, *_: object) -> None:
        """Record a gradient of the last micro-batch, and start the buckets that are ready."""
        missing = self._missing.get(id(group))
        if missing is None or not group.is_last_microbatch:
            return

        # A second gradient would be missing from the sum.
        assert parameter in missing, f"{self._names[parameter]} got two gradients in one micro-batch"
        missing.remove(parameter)
        while self._next < len(self._early) and not self._missing[id(self._early[self._next])]:
            self._early[self._next].start_grad_sync()
            self._next += 1

    def _finish(self, finalize: Callable[..., None], *args: Any, **options: Any) -> None:
        """Start the remaining buckets, wait for all of them, and scale with Megatron's own function."""
        for group in (*self._early[self._next :], *self._late):
            group.start_grad_sync()

        self._next = 0
        self._missing = {id(group): set(group.params) for group in self._early}
        finalize(*args, **options)
