"""Pipeline parallelism: what the other stages of a model hold, and how their tensors reach the first one.

Owns names and hand-over alone; passes between stages are Megatron's (`passes.schedule`). Every rank knows
name, shape and type of each tensor of each stage, so that all of them cut the model into the same buckets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rlpipe.models.base import ROUTER_BIAS
from rlpipe.trainer import runtime

if TYPE_CHECKING:
    from rlpipe.trainer.model import PolicyModel

EMBEDDING_COPY, TIED_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def whole_names(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of this rank, then the buffers of routers, under their names in the whole model.

    Adapters are left out: they are merged into what they stand beside.
    """
    buffers = (pair for pair in model.named_buffers() if pair[0].endswith(ROUTER_BIAS.megatron))
    for name, tensor in chain(model.named_parameters(), buffers):
        if not name.startswith("adapters."):
            yield re.sub(r"^decoder\.layers\.(\d+)", lambda found: _whole(model, int(found[1])), name), tensor


def tensors_of_stages(model: PolicyModel) -> list[list[tuple[str, torch.Tensor]]]:
    """`whole_names` of each stage; those of the others lie on the meta device.

    Collective over the stages when it is called for the first time.
    """
    stages = model.pg_collection.pp
    mine = list(whole_names(model))
    if stages.size() == 1:
        return [mine]
    if model.stage_shapes is None:
        model.stage_shapes = runtime.gather([(name, t.shape, t.dtype) for name, t in mine], stages)
    return [
        mine
        if stage == stages.rank()
        else [(name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape, dtype in shapes]
        for stage, shapes in enumerate(model.stage_shapes)
    ]


def is_copy(name: str, stage: int, *, tied: bool) -> bool:
    """Whether a stage's tensor is a copy of the first stage's embedding: an MTP layer's, or a tied head."""
    return stage > 0 and (name == EMBEDDING_COPY or (tied and name == TIED_HEAD))


def hand_over(
    full: list[torch.Tensor] | None,
    blank: Sequence[torch.Tensor],
    *,
    stage: int,
    stages: dist.ProcessGroup,
    device: torch.device,
) -> list[torch.Tensor] | None:
    """Full tensors of one stage on the first; None elsewhere.

    full: there on that stage's rank that holds them. blank: their shapes and types, on the first stage's rank
    that is to have them, of the same pipeline; other ranks do not call this.
    """
    if stage == stages.rank():
        for tensor in full or []:
            dist.send(tensor.contiguous(), group=stages, group_dst=0)
        return None
    if stages.rank():
        return None
    received = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in blank]
    for tensor in received:
        dist.recv(tensor, group=stages, group_src=stage)
    return received


def _whole(model: PolicyModel, number: int) -> str:
    return f"decoder.layers.{model.decoder.layers[number].layer_number - 1}"
