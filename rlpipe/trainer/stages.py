"""Pipeline parallelism: the tensors of a model's other stages, and their transfer to the first stage.

Owns only names and transfer of weights; Megatron runs the passes between stages (`passes.schedule`). Every
rank knows the name, shape and dtype of each tensor of each stage, so that all ranks cut the model into the
same buckets.
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


def full_names(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's parameters, then the routers' buffers, under their names in the full model.

    LoRA adapters are omitted, as they are merged into the weights that they belong to.
    """
    buffers = (pair for pair in model.named_buffers() if pair[0].endswith(ROUTER_BIAS.megatron))
    for name, tensor in chain(model.named_parameters(), buffers):
        if not name.startswith("adapters."):
            full = re.sub(r"^decoder\.layers\.(\d+)", lambda match: _full_prefix(model, int(match[1])), name)
            yield full, tensor


def tensors_of_stages(model: PolicyModel) -> list[list[tuple[str, torch.Tensor]]]:
    """List the result of `full_names` for each stage; tensors of other stages are on the meta device.

    The first call is collective over the stages.
    """
    stages = model.pg_collection.pp
    local = list(full_names(model))
    if stages.size() == 1:
        return [local]

    # The stages exchange names and shapes only once, as these do not change.
    if model.stage_shapes is None:
        model.stage_shapes = runtime.gather([(name, t.shape, t.dtype) for name, t in local], stages)

    return [
        local
        if stage == stages.rank()
        else [(name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape, dtype in shapes]
        for stage, shapes in enumerate(model.stage_shapes)
    ]


def is_copy(name: str, stage: int, *, tied: bool) -> bool:
    """Return whether a stage's tensor copies the first stage's embedding: an MTP layer's or a tied head."""
    return stage > 0 and (name == EMBEDDING_COPY or (tied and name == TIED_HEAD))


def hand_over(
    full: list[torch.Tensor] | None,
    blank: Sequence[torch.Tensor],
    *,
    stage: int,
    stages: dist.ProcessGroup,
    device: torch.device,
) -> list[torch.Tensor] | None:
    """Send full tensors from one stage to the first; return them on the first stage, None on others.

    full: the tensors, on the rank of `stage` that holds them. blank: their shapes and types, for the rank of
    the first stage that receives them. Ranks of other pipelines do not call this.
    """
    if stage == stages.rank():
        for tensor in full or []:
            dist.send(tensor.contiguous(), group=stages, group_dst=0)
        return None
    if stages.rank():
        return None

    # Both ranks list the tensors in the same order.
    received = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in blank]
    for tensor in received:
        dist.recv(tensor, group=stages, group_src=stage)
    return received


def share(
    full: list[torch.Tensor] | None,
    blank: Sequence[torch.Tensor],
    *,
    stage: int,
    stages: dist.ProcessGroup,
    device: torch.device,
) -> list[torch.Tensor]:
    """Send full tensors from one stage to all others; return them on each. Arguments as in `hand_over`."""
    tensors = full or [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in blank]
    for tensor in tensors:
        dist.broadcast(tensor.contiguous(), group=stages, group_src=stage)
    return tensors


def _full_prefix(model: PolicyModel, number: int) -> str:
    """Return the prefix that layer `number` of this stage has in the full model."""
    return f"decoder.layers.{model.decoder.layers[number].layer_number - 1}"
