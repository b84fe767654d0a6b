"""Proves that a server has the weights that were sent, with fingerprints of target and draft tensors.

A sync that omits the draft is silent: outputs stay correct, and only the acceptance rate falls. SGLang's
`/weights_checker` hashes each parameter in place, per rank and role. The same hashes are computed here from
the weights that were sent, fused and named as SGLang stores them:

    q, k, v_proj -> qkv_proj;  gate, up_proj -> gate_up_proj;  mtp_layers.0 -> draft.model
    gate, up_proj of all experts -> w13_weight;  down_proj of all -> w2_weight

so a difference shows a tensor that did not arrive. Names and layouts come from the model family's table
(`rlpipe/models`) and the drafter's declaration, hashes from `fingerprint.py`. Owns the shapes that a rank
stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlpipe.config.drafters import Drafter
from rlpipe.config.rollout import RolloutConfig
from rlpipe.models import family_of, read_architecture
from rlpipe.models.base import EMBEDDING, FINAL_NORM, HEAD, Layout, Part
from rlpipe.models.checkpoint import is_mtp_weight
from rlpipe.models.delta_net import DeltaNet
from rlpipe.models.grafted import served_with_zero_biases
from rlpipe.weights.fingerprint import Parts, fingerprints

DRAFT = "draft."
EXPERTS = ".experts."  # part of the server's names of expert weights
SHARED = ".shared_experts."  # part of the server's names of shared experts, which read every token
UNSENT = "visual."  # prefix of the server's names of its vision tower, which is never sent


@dataclass(slots=True, kw_only=True)
class CanaryReport:
    """Names of tensors that differ, by role. reasons: why tensors differ, by name, if known."""

    target: list[str] = field(default_factory=list)
    draft: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether the server has exactly the weights that were sent."""
        return not (self.target or self.draft)

    def summary(self) -> str:
        """Summarise the report in one line, for display."""
        if self.passed:
            return "target and draft are as sent"

        by_role = []
        for role, names in (("target", self.target), ("draft", self.draft)):
            if names:
                # Prefer a tensor with a known reason as the example.
                first = min(names, key=lambda name: name not in self.reasons)
                reason = self.reasons.get(first)
                by_role.append(f"{len(names)} of the {role} (first {first}{f': {reason}' if reason else ''})")
        return "; ".join(by_role)


@dataclass(slots=True, kw_only=True)
class Shard:
    """The part of each tensor that one rank of a server stores.

    kv_heads: key heads of the model; if there are fewer than ranks, they are repeated. channels: channels of
    each expert over all ranks if the server pads experts with zeros, else 0. delta: the model's gated delta
    nets, if any.
    """

    rank: int = 0
    size: int = 1
    kv_heads: int = 1
    channels: int = 0
    delta: DeltaNet | None = None

    def rows(self, tensor: torch.Tensor, *, of_kv: bool = False) -> torch.Tensor:
        """Select this rank's rows of a tensor that is split by output. of_kv: rows are key or value heads."""
        size, rank = self.size, self.rank
        if of_kv and self.kv_heads < size:
            rank, size = rank // (size // self.kv_heads), self.kv_heads
        return tensor.chunk(size)[rank]

    def slices(self, tensors: Parts, part: Part) -> Parts:
        """Cut the Hugging Face tensors of one weight to the parts that this rank stores."""
        layout = part.layout
        if layout is Layout.DELTA:
            assert self.delta is not None
            rows = [self.delta.blocks(name) for name in part.hf]
            return [self.rows(x) for tensor, r in zip(tensors, rows, strict=True) for x in tensor.split(r)]

        if layout is Layout.QKV:
            return [self.rows(tensor, of_kv=index > 0) for index, tensor in enumerate(tensors)]
        if layout in (Layout.GATE_UP, Layout.HEADS):
            return [self.rows(tensor) for tensor in tensors]
        if layout is Layout.COLUMNS:
            return [tensor.chunk(self.size, dim=1)[self.rank] for tensor in tensors]
        if layout is Layout.VOCABULARY:
            return [self.rows(_padded(tensor)) for tensor in tensors]
        return tensors


def server_parts(
    weights: Mapping[str, torch.Tensor],
    shard: Shard,
    hf_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    drafter: Drafter | None,
) -> dict[str, Parts]:
    """Return HF weights under the names and in the shapes of one rank's parameters.

    Names of a draft's parameters begin with `draft.`. Each tensor is a list of the parts that the server
    fuses along the first dimension, without copies where possible.

    Args:
        weights: all weights, or a bucket of them.
        hf_config: the model's; if its head is tied, the server does not store a head.
        dtype: dtype of the server's weights.
        drafter: the server's drafter, if any.

    Raises:
        ValueError: if no table maps a tensor, or if a part of a fused tensor is missing.
    """
    parts_by_name: dict[str, Parts] = {}
    float32 = family_of(hf_config).float32
    unmapped = {name for name in weights if is_served(name, drafter)}
    tied = bool(hf_config.get("tie_word_embeddings"))
    zero_biases = served_with_zero_biases(hf_config)

    for served, prefix, part in _table(hf_config, drafter):
        names = [prefix + name for name in part.hf]
        present = unmapped.intersection(names)
        unmapped -= present
        if not present or (tied and served == HEAD.served_name):
            continue
        if missing := sorted(set(names) - present):
            raise ValueError(f"{served} is made of {names}, and {missing} are not sent: send them together.")

        types = [torch.float32 if name.endswith(float32) else dtype for name in names]
        tensors = [weights[name].to(kind) for name, kind in zip(names, types, strict=True)]
        if shard.channels and (EXPERTS in served or SHARED in served):
            # shared experts are stored as a single expert with the width of all of them
            count = 1 if EXPERTS in served else int(hf_config.get("n_shared_experts") or 1)
            tensors = [_widened(tensor, part.layout, count * shard.channels) for tensor in tensors]
        parts_by_name[served] = shard.slices(tensors, part)

        # A grafted model of a family without biases is served by a class that has biases.
        if zero_biases and part.layout is Layout.QKV and served.endswith("weight"):
            biases = [tensor.new_zeros(len(tensor)) for tensor in tensors]
            parts_by_name[served.removesuffix("weight") + "bias"] = shard.slices(biases, part)

    if unmapped:
        raise ValueError(
            f"No table maps where an SGLang server keeps {', '.join(sorted(unmapped))}: add it to the "
            "family's table (rlpipe/models), or send the weights of this model only."
        )

    # tensors that the draft shares with the target appear under both names
    shared = drafter.kind.served.shared if drafter else ()
    names = [part.served_name for part in shared]
    return parts_by_name | {DRAFT + name: parts_by_name[name] for name in names if name in parts_by_name}


def rank_fingerprints(
    weights: Mapping[str, torch.Tensor],
    rollout: RolloutConfig,
    hf_config: Mapping[str, Any],
    *,
    drafter: Drafter | None,
    on_gpu: bool,
    channels: int = 0,
) -> list[dict[str, str]]:
    """Compute the fingerprints that each rank of a server must have for these weights; see `server_parts`.

    on_gpu: whether the server hashes on a GPU. channels: see `Shard`.
    """
    parts = rank_parts(weights, rollout, hf_config, drafter=drafter, channels=channels)
    return [fingerprints(tensors, on_gpu=on_gpu) for tensors in parts]


def rank_parts(
    weights: Mapping[str, torch.Tensor],
    rollout: RolloutConfig,
    hf_config: Mapping[str, Any],
    *,
    drafter: Drafter | None,
    channels: int = 0,
) -> list[dict[str, Parts]]:
    """Return the tensors of each rank of a server, by name. channels: see `Shard`."""
    size, dtype = rollout.sglang.tp, getattr(torch, rollout.dtype)
    kv_heads = int(hf_config["num_key_value_heads"])
    delta = read_architecture(hf_config).delta

    shards = (
        Shard(rank=rank, size=size, kv_heads=kv_heads, channels=channels, delta=delta) for rank in range(size)
    )
    return [server_parts(weights, shard, hf_config, dtype=dtype, drafter=drafter) for shard in shards]


def is_served(name: str, drafter: Drafter | None) -> bool:
    """Return whether a server with this drafter takes updates of a weight.

    Of the MTP layers, a server has only the first.

    >>> is_served("model.mtp_layers.0.norm.weight", Drafter.EAGLE3), is_served("eagle3.d2t", Drafter.EAGLE3)
    (False, False)
    """
    draft = drafter and drafter.kind.served
    if is_mtp_weight(name):
        return bool(draft) and name.startswith(draft.prefix)
    return not draft or name.removeprefix(draft.prefix) not in draft.fixed


def _table(hf_config: Mapping[str, Any], drafter: Drafter | None) -> Iterator[tuple[str, str, Part]]:
    """Yield, for each weight of a model, its server name, the prefix of its HF names, and its description."""
    family = family_of(hf_config)
    for part in (EMBEDDING, FINAL_NORM, HEAD):
        yield part.served_name, "", part

    layers = [f"model.layers.{index}." for index in range(int(hf_config["num_hidden_layers"]))]
    layer = _fused(family.layer_parts(hf_config))
    blocks = [(prefix, prefix, layer) for prefix in layers]
    if drafter:
        draft = drafter.kind.served
        for served_prefix, prefix, parts in draft.tables(family, hf_config):
            blocks.append((DRAFT + served_prefix, draft.prefix + prefix, _fused(parts)))

    for served_prefix, prefix, parts in blocks:
        for part in parts:
            yield served_prefix + part.served_name, prefix, part


def _fused(parts: Iterable[Part]) -> list[Part]:
    """Join, in order, the weights that a server stores in one tensor: those with equal names (experts)."""
    by_name: dict[str, Part] = {}
    for part in parts:
        before = by_name.get(part.served_name)
        by_name[part.served_name] = replace(part, hf=before.hf + part.hf) if before else part
    return list(by_name.values())


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Pad a vocabulary with rows of zeros to a multiple of 64, as SGLang does."""
    missing = -len(tensor) % 64
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor


def _widened(tensor: torch.Tensor, layout: Layout, channels: int) -> torch.Tensor:
    """Append channels of zeros to an expert's weight: rows for gate and up, columns for down."""
    dim = 0 if layout is Layout.GATE_UP else 1
    missing = channels - tensor.shape[dim]
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing) if dim == 0 else (0, missing))


def padded_channels(differing: Mapping[str, tuple[str, str]], ranks: int) -> int:
    """Derive the number of channels to which a server pads each expert; 0 if it does not pad.

    differing: the result of `explain`.

    >>> padded_channels({"model.layers.0.mlp.experts.w2_weight": ("float32 8x32x64", "float32 8x32x48")}, 2)
    128
    """
    for name, (served, expected) in differing.items():
        if name.endswith("experts.w2_weight"):
            served_columns, columns = (int(form.rpartition("x")[2]) for form in (served, expected))
            if served_columns > columns:
                return served_columns * ranks
    return 0


def compare(expected: Mapping[str, str], served: Mapping[str, str]) -> CanaryReport:
    """Compare one rank's checksums with `fingerprints`; a tensor on only one side counts as different.

    served: for each tensor its hash and, if rlpipe's plugin is loaded, its dtype and shape.

    >>> compare({"a": "0", "draft.b": "1"}, {"a": "0 float32 4x2", "draft.b": "2"}).draft
    ['draft.b']
    """
    report = CanaryReport()
    for name in sorted(served.keys() | expected.keys()):
        if name.startswith(UNSENT) and name not in expected:
            continue
        if served.get(name, "").partition(" ")[0] != expected.get(name, ""):
            differing = report.draft if name.startswith(DRAFT) else report.target
            differing.append(name)
    return report


def explain(
    report: CanaryReport, expected: Mapping[str, Parts], served: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Add the reason why each tensor differs to the report: unmapped, not on the server, or another shape.

    expected: tensors of one rank, by name; they may be on the meta device. served: see `compare`; tensors
    without dtype and shape get no reason. Returns (served form, expected form) of the tensors that have
    another dtype or shape.
    """
    other_forms: dict[str, tuple[str, str]] = {}
    for name in (*report.target, *report.draft):
        served_form = served.get(name, "").partition(" ")[2]
        if name not in served:
            report.reasons[name] = "the server has no tensor of this name"
        elif not served_form:
            continue
        elif name not in expected:
            report.reasons[name] = (
                f"a tensor of the server ({served_form}) that no table maps: add it to the family's "
                "(rlpipe/models)"
            )
        elif served_form != (form := describe_parts(expected[name], served_form)):
            report.reasons[name] = f"the server keeps {served_form}, and what was sent is {form}"
            other_forms[name] = served_form, form
    return other_forms


def describe_parts(parts: Parts, served_form: str) -> str:
    """Describe dtype and shape of a tensor like rlpipe's plugin.

    served_form: the plugin's description. Experts are rows of one matrix here but a separate dimension on the
    server. If the sizes fit, the description uses the server's dimensions.

    >>> experts = [torch.zeros(6, 4)]
    >>> describe_parts(experts, "float32 2x3x4"), describe_parts(experts, "float32 2x4x4")
    ('float32 2x3x4', 'float32 6x4')
    """
    rows, columns = sum(len(part) for part in parts), parts[0].shape[1:]
    shape = (rows, *columns)
    served = tuple(int(size) for size in served_form.partition(" ")[2].split("x") if size)
    if len(served) == 3 and len(shape) == 2 and served[0] * served[1] == rows and served[2] == shape[1]:
        shape = served
    return f"{str(parts[0].dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
