"""Gated delta nets over branches that share their prefixes, computed in chunks.

A value head keeps a state S [d_k, d_v] that each token decays, corrects and reads (Yang et al. 2024,
"Gated Delta Networks", Equation 10; q and k are l2-normed, q is scaled by 1 / sqrt(d_k)):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t

where q, k and v are the output of a causal convolution over the last few tokens. The tokens of a trajectory
are in branches (`micro_batch`). A branch starts from the state, and from the last inputs of the convolution,
at the end of its context, which may be in other branches. `Succession` lists these tokens; gradients of
siblings are summed in the state they start from.

Within a chunk of 64 tokens everything is a product of matrices (Section 3.3 of the paper). Chunks at the same
depth of all trajectories are computed together, so that the longest trajectory determines the number of
sequential steps. On a GPU with `fla` its kernel runs instead, once per generation (`Succession.generations`).

Context parallel ranks, which elsewhere divide the tokens, divide the heads here. Each rank sends q, k, v, b
and a of its tokens to the ranks that have the heads, runs its heads over all tokens, and receives the outputs
for its tokens. With Qwen3-Next 80B in bf16, 32,768 tokens and four ranks, a rank sends 152 MB a layer (101 to
the ranks with the heads, 50 back). That is 5.5 GB in the 36 delta nets of a forward pass, and as much in the
backward pass.

Megatron-core 0.16.1 has such a layer, but that layer needs `fla` and CUDA and refuses packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from rlpipe.batching.micro_batch import Branch
from rlpipe.models.delta_net import DeltaNet

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_kernel
except ImportError:
    fla_kernel = None

CHUNK = 64
EPS = 1e-6  # in the norm of queries and keys


class Succession:
    """The order of the tokens of a flat micro-batch, for layers that run over them in sequence.

    A segment is a stretch of a branch that ends where the branch ends or where a context ends.

    spans: start and length of each segment in the flat tokens. parents: for each segment the earlier segment
    that it follows; -1 at the start of a trajectory. tokens: number of tokens.
    """

    def __init__(self, branches: Sequence[Branch], device: torch.device) -> None:
        self._device = device

        # A branch is cut where the context of another branch ends in it.
        ends: list[set[int]] = [{branch.length} for branch in branches]
        for branch in branches:
            if branch.context:
                last, count = branch.context[-1]
                assert branch.context[:-1] == branches[last].context, "a context is the start of a trajectory"
                ends[last].add(count)

        self.spans: list[tuple[int, int]] = []
        self.parents: list[int] = []
        ending: dict[tuple[int, int], int] = {}  # branch and count -> segment that ends there
        start = 0

        # The first segment of a branch follows the end of its context, each other segment the one before it.
        for index, branch in enumerate(branches):
            parent = ending[branch.context[-1]] if branch.context else -1
            done = 0
            for end in sorted(ends[index]):
                self.spans.append((start + done, end - done))
                self.parents.append(parent)
                parent = ending[index, end] = len(self.spans) - 1
                done = end
            start += branch.length
        self.tokens = start

        # All layers of a pass share the values that the first layer has built.
        self._made: dict[tuple[str, int], Any] = {}

    def before(self, segment: int, count: int) -> list[int]:
        """List the `count` tokens before a segment, in order; -1 where there is no token."""
        tokens: list[int] = []
        parent = self.parents[segment]
        while len(tokens) < count and parent >= 0:
            start, length = self.spans[parent]
            taken = min(count - len(tokens), length)
            tokens = [*range(start + length - taken, start + length), *tokens]
            parent = self.parents[parent]

        return [-1] * (count - len(tokens)) + tokens

    def extended(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """List each segment's tokens after the `count` tokens before it, and each token's index in that list.

        Returns [N + segments * count] int64, -1 where there is no token before, and [N] int64.
        """
        return self._once("extended", count, self._extended)

    def _extended(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Build the result of `extended`."""
        pieces, places, done = [], [], 0
        for segment, (start, length) in enumerate(self.spans):
            pieces.append(np.array(self.before(segment, count), dtype=np.int64))
            pieces.append(np.arange(start, start + length))
            places.append(np.arange(done + count, done + count + length))
            done += count + length

        return self._to_device(np.concatenate(pieces)), self._to_device(np.concatenate(places))

    def chunks(self, size: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Cut segments into chunks, in order of their depth; chunks of depth 0 start a trajectory.

        Returns tokens [chunks, size], where -1 is padding at the end of segments; each token's index in the
        flattened result; and for each depth the index of each chunk's predecessor among the chunks of the
        depth before.
        """
        return self._once("chunks", size, self._chunks)

    def _chunks(self, size: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Build the result of `chunks`."""
        rows: list[np.ndarray] = []
        depths: list[int] = []
        follows: list[int] = []
        last: list[int] = []  # last chunk of each segment

        # A segment's first chunk follows the last one of its parent.
        for (start, length), parent in zip(self.spans, self.parents, strict=True):
            before = last[parent] if parent >= 0 else -1
            for begin in range(0, length, size):
                row = np.full(size, -1)
                row[: min(size, length - begin)] = np.arange(start + begin, start + min(begin + size, length))
                rows.append(row)
                depths.append(depths[before] + 1 if before >= 0 else 0)
                follows.append(before)
                before = len(rows) - 1
            last.append(before)

        # Sort the chunks by depth, and number those of each depth.
        order = np.argsort(depths, kind="stable")
        counts = np.bincount(depths)
        rank = np.empty(len(order), dtype=np.int64)  # index of each chunk among those of its depth
        rank[order] = np.concatenate([np.arange(count) for count in counts])
        by_depth = np.split(order, np.cumsum(counts)[:-1])

        predecessors = [self._to_device(rank[np.array(follows)[chunk]]) for chunk in by_depth[1:]]

        # Invert the grid to find where each token is.
        grid = np.stack(rows)[order]
        places = np.empty(self.tokens, dtype=np.int64)
        places[grid[grid >= 0]] = np.flatnonzero(grid >= 0)

        # Chunks of depth 0 follow a single initial state.
        first = self._to_device(np.zeros(counts[0], dtype=np.int64))
        return self._to_device(grid), self._to_device(places), [first, *predecessors]

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange all heads of this rank's tokens for this rank's share of the heads of all tokens.

        x: [N, heads, d]. Without context parallelism this returns x, as a rank has all tokens and heads (else
        see `context`).
        """
        return x

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Reverse `to_heads`, [N, heads, d]."""
        return x

    def share(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows of a weight [n, ...], ordered by head, for this rank's heads after `to_heads`."""
        return weight

    def generations(self) -> list[list[int]]:
        """List the segments by generation: the number of segments before a segment in its trajectory."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return [[s for s, depth in enumerate(depths) if depth == d] for d in range(max(depths) + 1)]

    def _once(self, name: str, size: int, make: Callable[[int], Any]) -> Any:
        """Make a value on the first request and return the same value afterwards."""
        if (name, size) not in self._made:
            self._made[name, size] = make(size)
        return self._made[name, size]

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy a host array to the device of the tokens."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class GatedDeltaNet(MegatronModule):
    """out_proj(norm(o) * silu(z)), o from the delta rule, for this rank's key heads and their value heads.

    Rows of the input projections and of the convolution are ordered by key head: first q, k, v, z (or b, a)
    of one head, then of the next.
    """

    in_proj_qkvz: ColumnParallelLinear
    in_proj_ba: ColumnParallelLinear

    def __init__(
        self,
        config: TransformerConfig,
        *,
        delta: DeltaNet,
        pg_collection: ProcessGroupCollection,
        layer_number: int | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        self._tp = pg_collection.tp
        self._delta, ranks = delta, self._tp.size()
        self._heads, self._served = delta.key_heads // ranks, delta.value_heads // delta.key_heads

        # Megatron's configuration sets defaults for both.
        assert config.init_method is not None and config.output_layer_init_method is not None

        options = {"config": config, "bias": False, "skip_bias_add": False, "tp_group": self._tp}
        for name, rows in (
            ("in_proj_qkvz", 2 * delta.keys + 2 * delta.values),
            ("in_proj_ba", 2 * delta.value_heads),
        ):
            linear = ColumnParallelLinear(
                config.hidden_size, rows, init_method=config.init_method, gather_output=False, **options
            )
            self.add_module(name, linear)

        self.out_proj = RowParallelLinear(
            delta.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **options,
        )

        # The parameters belong to this rank's heads, except the norm's weight, which all heads share.
        convolved = (2 * delta.keys + delta.values) // ranks
        self.conv_weight = torch.nn.Parameter(torch.zeros(convolved, 1, delta.kernel))
        self.A_log, self.dt_bias = (
            torch.nn.Parameter(torch.zeros(delta.value_heads // ranks)) for _ in range(2)
        )
        self.norm_weight = torch.nn.Parameter(torch.ones(delta.value_dim))
        for parameter in (self.conv_weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)

    def forward(
        self, hidden_states: torch.Tensor, *_: object, packed_seq_params: Any = None, **__: object
    ) -> tuple[torch.Tensor, None]:
        """Map [S, B, H] to the same shape. With a layout B is 1; without one, each row is a sequence."""
        qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        length, rows, _width = qkvz.shape
        if packed_seq_params is None:
            succession = Succession([Branch(length=length, context=[])] * rows, qkvz.device)
        else:
            succession = packed_seq_params.succession

        # Order flat tokens by key head. z stays with its tokens; the others go to the rank of their heads.
        qkvz, ba = (x.transpose(0, 1).reshape(rows * length, self._heads, -1) for x in (qkvz, ba))
        values = self._served * self._delta.value_dim
        qkv, z = qkvz.split([qkvz.shape[-1] - values, values], dim=-1)

        out = self._mix(succession.to_heads(qkv), succession.to_heads(ba), succession)
        out = succession.to_tokens(out.to(qkvz.dtype))
        mixed = self._gated_norm(out, z.reshape(out.shape)).flatten(1)
        return self.out_proj(mixed.view(rows, length, -1).transpose(0, 1).contiguous())

    def _mix(self, qkv: torch.Tensor, ba: torch.Tensor, succession: Succession) -> torch.Tensor:
        """Apply convolution and delta rule to all tokens: [N, key heads, ...] -> [N, value heads, d_v]."""
        d, tokens = self._delta, len(qkv)
        weight, decay, bias = map(succession.share, (self.conv_weight, self.A_log, self.dt_bias))
        b, a = (x.reshape(tokens, -1) for x in ba.chunk(2, dim=-1))

        qkv = self._convolve(qkv.reshape(tokens, -1), weight, succession).view(qkv.shape)
        q, k, v = qkv.split([d.key_dim, d.key_dim, self._served * d.value_dim], dim=-1)

        # Compute the logarithm of the decay in float32 at least.
        wide = torch.promote_types(qkv.dtype, torch.float32)
        g = -decay.to(wide).exp() * F.softplus(a.to(wide) + bias.to(wide))

        v = v.reshape(tokens, -1, d.value_dim)
        return delta_rule(q, k, v, g=g, beta=b.sigmoid(), succession=succession)

    def _convolve(self, x: torch.Tensor, weight: torch.Tensor, succession: Succession) -> torch.Tensor:
        """Apply a causal convolution to each channel, then silu: [N, channels]; weight [channels, 1, w]."""
        index, places = succession.extended(self._delta.kernel - 1)

        # Index -1, before the start of a trajectory, selects the appended row of zeros.
        padded = F.pad(x, (0, 0, 0, 1))
        convolved = F.conv1d(padded[index].t()[None], weight, groups=x.shape[1])[0].t()
        return F.silu(convolved.index_select(0, places - (self._delta.kernel - 1)))

    def _gated_norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Compute RMSNorm(x) * silu(gate) [N, heads, d_v]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self._tp)
        normed = F.rms_norm(x.to(wide), x.shape[-1:], eps=self.config.layernorm_epsilon).to(x.dtype)
        return (weight * normed * F.silu(gate.to(wide))).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's description of each parameter's shard."""
        own = dict(self.named_parameters(recurse=False))
        axes = {name: 0 for name in own if name != "norm_weight"}
        state = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets)
        for name, module in self.named_children():
            state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return state


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    succession: Succession,
) -> torch.Tensor:
    """Apply the delta rule to all trajectories, in float32 at least.

    q, k: [N, key heads, d_k]. v: [N, value heads, d_v]. g, beta: [N, value heads]. Returns the shape of v.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    repeats = v.shape[1] // k.shape[1]

    # A key head serves several value heads.
    q, k = (_l2_normed(x.to(wide)).repeat_interleave(repeats, dim=1) for x in (q, k))

    # The kernel takes a single type and scales q itself.
    if fla_kernel is not None and v.is_cuda:
        q, k = q.to(v.dtype), k.to(v.dtype)
        return _by_generations(q, k, v, g=g, beta=beta, succession=succession)

    q, v, beta = q / math.sqrt(q.shape[-1]), v.to(wide), beta.to(wide)
    return _by_chunks(q, k, v, g=g, beta=beta, succession=succession, size=CHUNK)


def _l2_normed(x: torch.Tensor) -> torch.Tensor:
    """Divide x by its norm over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _by_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    succession: Succession,
    size: int,
) -> torch.Tensor:
    """Compute `delta_rule` with matrix products; q and k are already repeated for each value head.

    With b_i the sum of g up to token i of a chunk, A_ij = beta_i exp(b_i - b_j) k_i k_j for j < i, and
    T = (I + A)^-1, the tokens add U = T (beta v) - T (beta exp(b) k) S to the state S of the chunk before.
    """
    grid, places, predecessors = succession.chunks(size)

    def chunked(x: torch.Tensor) -> torch.Tensor:
        """Gather [chunks, heads, size, ...]; padding is 0, which neither adds to the state nor decays it."""
        padded = F.pad(x, (0,) * (2 * x.dim() - 1) + (1,))
        return padded[grid].transpose(1, 2)

    q, k, v, g, beta = (chunked(x) for x in (q, k, v, g, beta))

    # decay_ij = exp(b_i - b_j) for j <= i, masked before the exponential, which could overflow.
    b = g.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = (b[..., :, None] - b[..., None, :]).masked_fill(~later, -torch.inf).exp()

    # Solve (I + A) [added, read] = [beta v, beta exp(b) k] for all chunks at once.
    a = (beta[..., None] * k) @ k.transpose(-1, -2) * decay
    right = torch.cat((beta[..., None] * v, (beta * b.exp())[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(a.tril(-1), right, upper=False, unitriangular=True)
    added, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    # Compute what does not depend on the state: attention within a chunk, and factors of the state's update.
    within = q @ k.transpose(-1, -2) * decay
    q = q * b.exp()[..., None]
    k = (k * (b[..., -1:] - b).exp()[..., None]).transpose(-1, -2)
    kept = b[..., -1, None, None].exp()

    # Only the state must be computed in sequence, depth by depth.
    counts = [len(before) for before in predecessors]
    state = q.new_zeros(1, q.shape[1], q.shape[-1], v.shape[-1])
    outputs = []
    for before, q_, k_, kept_, added_, read_, within_ in zip(
        predecessors, *(x.split(counts) for x in (q, k, kept, added, read, within)), strict=True
    ):
        state = state.index_select(0, before)
        new = added_ - read_ @ state
        outputs.append(q_ @ state + within_ @ new)
        state = kept_ * state + k_ @ new

    return torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, places)


def _by_generations(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    succession: Succession,
) -> torch.Tensor:
    """Compute `delta_rule` with the kernel of `fla`: it takes segments of any length and initial states."""
    assert fla_kernel is not None
    outputs: list[torch.Tensor] = []
    order: list[np.ndarray] = []
    place: dict[int, int] = {}  # index of a segment within its generation
    state = None

    for segments in succession.generations():
        spans = [succession.spans[segment] for segment in segments]
        index = np.concatenate([np.arange(start, start + length) for start, length in spans])
        tokens = torch.from_numpy(index).to(q.device)
        bounds = torch.tensor([0, *np.cumsum([length for _, length in spans])], device=q.device)

        # A segment starts from the final state of its parent, which is in the generation before.
        if state is not None:
            parents = [place[succession.parents[segment]] for segment in segments]
            state = state.index_select(0, torch.tensor(parents, device=q.device))

        out, state = fla_kernel(
            *(x.index_select(0, tokens)[None] for x in (q, k, v)),
            g=g.index_select(0, tokens)[None],
            beta=beta.index_select(0, tokens)[None],
            initial_state=state,
            output_final_state=True,
            cu_seqlens=bounds,
        )
        outputs.append(out[0])
        order.append(index)
        place = {segment: number for number, segment in enumerate(segments)}

    # Restore the order of the flat tokens.
    places = torch.from_numpy(np.argsort(np.concatenate(order))).to(q.device)
    return torch.cat(outputs).index_select(0, places)
