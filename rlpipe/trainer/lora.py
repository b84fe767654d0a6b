"""Low-rank adapters (LoRA) on the frozen linear layers of the decoder, as in peft.

    y = W x + (alpha / r) B A x        A [r, in] Kaiming-uniform, B [out, r] zero at the start

Owns the adapters, their shards, and the merged weight W + (alpha / r) B A, the only form in which weights
leave the trainer. Each Hugging Face projection has a separate pair A, B, even where Megatron fuses several
projections into one weight.

Under tensor parallelism W is cut by rows (column-parallel) or by columns (row-parallel). By rows: B is cut in
the same way, A is complete on every rank, and the gradient of A x is summed over ranks. By columns: A is cut
in the same way, B is complete, and A x is summed over ranks. So a rank can compute its merged shard without
the others, and only r numbers a token are exchanged. With sequence parallelism, A x is gathered along the
tokens if W is cut by rows, and scattered after the sum if W is cut by columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from rlpipe.config.lora import LoraConfig
from rlpipe.models import Architecture

if TYPE_CHECKING:
    from rlpipe.trainer.model import PolicyModel

Linear = ColumnParallelLinear | RowParallelLinear


class Adapter(torch.nn.Module):
    """The adapters of one linear layer. Its rows consist of `groups` groups with a block per projection.

    a: [projections * rank, in], the A of all projections, stacked. b: for each projection B,
    [rows of the projection, rank]. All are this rank's shards.
    """

    def __init__(
        self,
        linear: Linear,
        blocks: Sequence[int],
        *,
        groups: int,
        config: LoraConfig,
        generator: torch.Generator,
    ) -> None:
        """Initialise A randomly and B with zeros.

        blocks: rows of each projection in one group. generator: samples A; its state must be the same on
        every rank.
        """
        super().__init__()
        self._by_rows = isinstance(linear, ColumnParallelLinear)
        self._groups, self._scale = groups, config.alpha / config.rank
        self._tp = cast("dist.ProcessGroup", linear.tp_group)  # Megatron's constructor sets it if it is None

        # Sample the full A and cut it, so that it is the same for any tensor parallel size.
        bound = linear.input_size**-0.5  # Kaiming bound with a = sqrt(5)
        a = torch.empty(len(blocks) * config.rank, linear.input_size)
        a.uniform_(-bound, bound, generator=generator)
        if not self._by_rows:
            a = a.chunk(self._tp.size(), dim=1)[self._tp.rank()].clone()

        self.a = torch.nn.Parameter(a)
        self.b = torch.nn.ParameterList(torch.zeros(groups * block, config.rank) for block in blocks)
        self._shares_tokens = linear.sequence_parallel

        # Megatron sums the gradients of the replicated factor over the ranks that share the tokens.
        for replicated in [self.a] if self._by_rows else self.b:
            replicated.sequence_parallel = linear.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        for shard in self.b if self._by_rows else [self.a]:
            set_tensor_model_parallel_attributes(
                shard, is_parallel=True, dim=0 if self._by_rows else 1, stride=1
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the term to add to the layer's output for its input x [..., in]."""
        # The collective between A and B depends on how W and the tokens are cut.
        if self._shares_tokens:
            between = _gathered if self._by_rows else reduce_scatter_to_sequence_parallel_region
        else:
            between = copy_to_tensor_model_parallel_region if self._by_rows else _summed

        low = between(F.linear(x, self.a) * self._scale, group=self._tp)
        pairs = zip(low.chunk(len(self.b), dim=-1), self.b, strict=True)
        return self._fuse([F.linear(part, b) for part, b in pairs])

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Compute W + (alpha / r) B A of this rank's shard [out, in] in float32 at least, in W's type."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        pairs = zip(self.a.to(wide).chunk(len(self.b)), self.b, strict=True)
        change = self._fuse([a.t() @ b.to(wide).t() for a, b in pairs]).t()
        return torch.add(weight.to(wide), change, alpha=self._scale).to(weight.dtype)

    def _fuse(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Join outputs of the projections [..., rows] in the order of the layer's rows."""
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([x.unflatten(-1, (self._groups, -1)) for x in outputs], dim=-1).flatten(-2)


class Adapters(torch.nn.ModuleDict):
    """All LoRA adapters of a model, by layer and projection, with the weights that they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[torch.nn.Parameter, Adapter] = {}
        self._on = True

    def add(self, name: str, linear: Linear, adapter: Adapter) -> None:
        """Add an adapter to the linear layer: its forward pass uses the adapter from now on."""
        assert linear.weight is not None
        self[name] = self._of[linear.weight] = adapter

        def with_adapter(_: Linear, inputs: tuple[torch.Tensor], output: tuple[Any, Any]) -> Any:
            return (output[0] + adapter(inputs[0]), output[1]) if self._on else output

        linear.register_forward_hook(with_adapter)

    def merged(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return a parameter of the backbone or the draft model, with its adapter merged if it has one."""
        adapter = self._of.get(parameter)
        return parameter.detach() if adapter is None else adapter.merged(parameter.detach())

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapters within the context, so that the model computes as before training."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's description of each parameter's shard."""
        parameters = dict(self.named_parameters())

        # Replicated factors have no cut axis.
        axes = {
            name: parameter.partition_dim  # pyright: ignore[reportAttributeAccessIssue]
            for name, parameter in parameters.items()
            if getattr(parameter, "tensor_model_parallel", False)
        }
        return make_sharded_tensors_for_checkpoint(parameters, prefix, axes, sharded_offsets)


def attach(model: PolicyModel, arch: Architecture, config: LoraConfig, *, seed: int) -> None:
    """Add the configured adapters to every decoder layer; initial values are equal for all parallel sizes."""
    model.adapters = Adapters()
    groups = arch.kv_heads // model.pg_collection.tp.size()
    for layer in model.decoder.layers:
        i = layer.layer_number - 1  # in the full model

        # Every layer has a different seed, so that a stage need not sample the layers of other stages.
        generator = torch.Generator().manual_seed(seed * arch.layers + i)

        # Each entry: name, layer, rows of each projection in one group, number of groups.
        parts: list[tuple[str, Linear, list[int], int]] = []
        if config.attention:
            attention = layer.self_attention
            heads = [arch.heads // arch.kv_heads * arch.head_dim, arch.head_dim, arch.head_dim]
            parts.append(("qkv", attention.linear_qkv, heads, groups))
            parts.append(("proj", attention.linear_proj, [arch.hidden], 1))
        if config.mlp:
            gate_up, down = layer.mlp.linear_fc1, layer.mlp.linear_fc2
            parts.append(("fc1", gate_up, [gate_up.output_size_per_partition // 2] * 2, 1))
            parts.append(("fc2", down, [arch.hidden], 1))

        for name, linear, blocks, count in parts:
            adapter = Adapter(linear, blocks, groups=count, config=config, generator=generator)
            model.adapters.add(f"{i}_{name}", linear, adapter)


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather x along the tokens; the gradient is scattered."""
    return gather_from_sequence_parallel_region(x, group=group)


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum x over the ranks."""
    return reduce_from_tensor_model_parallel_region(x, group=group)
