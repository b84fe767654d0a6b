"""The kernels of a decode step in bfloat16 on CPUs with AVX-512, compiled by the user's C compiler.

A decode step reads all weights for a few rows, so memory bounds it. With a released model of 135M parameters,
oneDNN's products of 1 to 16 rows take at least twice as long as reading the weights takes. These kernels
(`cpu_kernels.c`) run all layers of a pass in one call, which takes 1.2 times as long. They also need no
second, prepacked copy of a weight. Products use AMX where the CPU has it, or else its vector instructions for
bfloat16, or else those for float32.

`kernels` compiles them once for each version of the source, in about a second, into the user's cache.
Without AVX-512, Linux or a compiler there are none, and the model uses torch's operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from rlpipe.config.machine import cpu_has_fast_bfloat16
from rlpipe.models import Architecture
from rlpipe.models.released import user_cache
from rlpipe.rollout.embedded.span import Span
from rlpipe.spec.verify import Verdict

logger = logging.getLogger(__name__)

MANY_ROWS = 128  # passes of more rows use torch's operations between products
MOST_CHANNELS = 512  # of a head, see `attend`
LANES = 16  # distributions are over a multiple of it

_SOURCE = Path(__file__).with_suffix(".c")
_COMPILERS = ("gcc", "cc")
_FLAGS = ("-O3", "-fopenmp", "-fPIC", f"-DMOST_CHANNELS={MOST_CHANNELS}")
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_SIGNATURES = {
    "linear": [_POINTER] * 5 + [_LONG] * 3,
    "rms_norm": [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT],
    "gate": [_POINTER] * 2 + [_LONG] * 2,
    "rotate_and_store": [_POINTER] * 4 + [_LONG] * 6,
    "attend": [_POINTER],
    "run_layers": [_POINTER, _LONG, *[_POINTER] * 3, _LONG],
    "run_draft": [_POINTER] * 6,
    "draft_chain": [_POINTER] * 4,
    "distributions": [_POINTER] * 5 + [_LONG] * 2,
    "sample": [_POINTER] * 3 + [_LONG] * 2,
    "verify_chain": [_POINTER] * 9 + [_LONG] * 4,
}
_COUNTING = ("sample", "draft_chain", "verify_chain")  # they return how many rows failed


class Product(ctypes.Structure):
    """The addresses of a weight and its bias, and its sizes."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("outputs", _LONG), ("inputs", _LONG))


class WholeLayer(ctypes.Structure):
    """The addresses of a layer's weights, and its sizes, for `Kernels.run_layers`: `layer.whole_layer`."""

    _fields_ = (
        *((name, Product) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("input_norm", "query_norm", "key_norm", "post_norm")),
        *((name, _LONG) for name in ("heads", "kv_heads", "size", "rotary")),
        *((name, _FLOAT) for name in ("eps", "scale")),
    )


class WholeDraft(ctypes.Structure):
    """An MTP layer, for `Kernels.run_draft`. joined: its columns for the state come first."""

    _fields_ = (
        *(("layer", WholeLayer), ("joined", Product)),
        *((name, _POINTER) for name in ("hidden_norm", "token_norm", "final_norm")),
    )


class ChainStart(NamedTuple):
    """What drafting a chain for A rows begins with.

    states: [A, H], of the MTP layer for the first draft. pending: [A] int64, the tokens before the drafts.
    uniforms: [A, gamma] float64. temperature: [A] float32, or None for 1. greedy: [A] bool, rows that take
    the most likely token, or None.
    """

    states: torch.Tensor
    pending: torch.Tensor
    uniforms: torch.Tensor
    temperature: torch.Tensor | None
    greedy: torch.Tensor | None


class _Chain(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("states", "embedding", "ids", "temperature", "greedy", "uniforms")),
        *((name, _POINTER) for name in ("tokens", "columns", "q")),
        ("depths", _LONG),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("query", "keys", "values", "mask", "contexts", "positions", "y")),
        *((name, _LONG) for name in ("rows", "width", "kv_heads", "group", "size", "length", "stride")),
        *((name, _LONG) for name in ("cached", "spaced", "covered", "apart")),
        ("scale", _FLOAT),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("places", "rotations")),
        ("attention", _Attention),
    )


class Kernels:
    """The compiled kernels, for tensors in bfloat16 on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        # Of many rows, oneDNN's products are faster with instructions for bfloat16, and take twice as long
        # as ours without.
        self.most_rows = MANY_ROWS if cpu_has_fast_bfloat16() else sys.maxsize
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _LONG if name in _COUNTING else None
        self._library = library

    @staticmethod
    def can_multiply(weight: torch.Tensor) -> bool:
        """Return whether `linear` can use a weight [out, in]."""
        return weight.shape[0] >= 32 and weight.shape[1] % 32 == 0

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute x W^T + b; see `can_multiply` and `most_rows`.

        Shapes: x [N, in], weight [out, in] contiguous, bias [out] or None -> [N, out].
        """
        rows, (outputs, inputs) = len(x), weight.shape
        x, y, work = x.contiguous(), x.new_empty(rows, outputs), x.new_empty(rows * inputs)
        added = None if bias is None else bias.data_ptr()
        pointers = (weight.data_ptr(), added, x.data_ptr(), y.data_ptr(), work.data_ptr())
        self._library.linear(*pointers, rows, outputs, inputs)
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Compute RMSNorm of x [N, H], rounded once; H: a multiple of 16."""
        x = x.contiguous()
        y = torch.empty_like(x)
        self._library.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *x.shape, eps)
        return y

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute silu(gate) * up, rounded once: [N, 2 I] contiguous -> [N, I]; I: a multiple of 16."""
        rows, both = gate_up.shape
        y = gate_up.new_empty(rows, both // 2)
        self._library.gate(gate_up.data_ptr(), y.data_ptr(), rows, both // 2)
        return y

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotation: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
        *,
        heads: int,
        turned: int,
    ) -> None:
        """Apply RoPE to queries and keys in place, and copy keys and values to a layer's cache.

        qkv: [N, all heads, D] contiguous. rotation: [N, 1, R / 2] complex64, R a multiple of 16. slots: [N *
        heads of keys and values] int64, indices in cache [slots, D]. heads: number of query heads. turned:
        number of query and key heads.
        """
        rows, every, size = qkv.shape
        pointers = (qkv.data_ptr(), rotation.data_ptr(), slots.data_ptr(), cache.data_ptr())
        self._library.rotate_and_store(*pointers, rows, every, turned, heads, size, 2 * rotation.shape[-1])

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        mask: torch.Tensor,
        contexts: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Compute softmax(scale q k^T + mask) v with grouped heads, for a few queries of each row.

        query: [B * q, heads, D], D a multiple of 32 and at most MOST_CHANNELS. keys, values: [B, kv_heads, L,
        D], views of the cache. mask: [B, q, L] float32, 0 or -inf. contexts: [B] int64, the number of keys of
        each row to read. Returns [B * q, heads * D].
        """
        tokens, heads, size = query.shape
        batch, kv_heads = keys.shape[:2]
        y = query.new_empty(tokens, heads * size)
        attention = _attention(keys, values, mask, contexts, tokens // batch)
        attention.query, attention.y, attention.stride = query.data_ptr(), y.data_ptr(), query.stride(0)
        attention.kv_heads, attention.group, attention.size = kv_heads, heads // kv_heads, size
        attention.scale = scale
        self._library.attend(ctypes.byref(attention))
        return y

    def run_layers(
        self, layers: ctypes.Array[WholeLayer], x: torch.Tensor, *, span: Span, rotations: torch.Tensor
    ) -> torch.Tensor:
        """Run a model's layers over the tokens x [N, H] of one span, and write their keys and values.

        span: has `contexts`. rotations: [positions, R / 2] complex64, of all positions.
        """
        y, description = torch.empty_like(x), _Description(span, 0, rotations)
        addresses = x.data_ptr(), y.data_ptr(), description.address
        self._library.run_layers(ctypes.byref(layers), len(layers), *addresses, span.seen.stride(0))
        return y

    def run_draft(
        self,
        draft: WholeDraft,
        x: torch.Tensor,
        tokens: torch.Tensor,
        *,
        embedding: torch.Tensor,
        span: Span,
        index: int,
        rotations: torch.Tensor,
    ) -> torch.Tensor:
        """Run an MTP layer over the states x [N, H] and the tokens [N] after them: normed states [N, H].

        embedding: [V, H]. index: index of the layer in the cache. span, rotations: see `run_layers`.
        """
        x, tokens = x.contiguous(), tokens.contiguous()
        y, description = torch.empty_like(x), _Description(span, index, rotations)
        given = (tensor.data_ptr() for tensor in (x, tokens, embedding, y))
        self._library.run_draft(ctypes.byref(draft), *given, description.address)
        return y

    def draft_chain(
        self,
        draft: WholeDraft,
        head: Product,
        start: ChainStart,
        *,
        embedding: torch.Tensor,
        ids: torch.Tensor | None,
        span: Span,
        index: int,
        rotations: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draft a chain of tokens for each row, all with one MTP layer.

        head: gives D logits, a multiple of 16. ids: [D] int64, the tokens that the logits stand for, or None
        for all. span: of the pending tokens and the drafts. The others: see `run_draft`.

        Returns tokens [A, gamma + 1], the pending ones and the drafts; the drafts as indices of D [A, gamma];
        and the distributions [A, gamma, D] float32 that they were sampled from. Raises RuntimeError if the
        logits of a row that samples have a NaN.
        """
        rows, depths = start.uniforms.shape
        states, uniforms = start.states.contiguous(), start.uniforms.contiguous()
        tokens = torch.empty(rows, depths + 1, dtype=torch.int64)
        tokens[:, 0] = start.pending
        columns = torch.empty(rows, depths, dtype=torch.int64)
        probs = torch.empty(rows, depths, head.outputs)

        given = states, embedding, ids, start.temperature, start.greedy, uniforms, tokens, columns, probs
        chain = _Chain(*(None if tensor is None else tensor.data_ptr() for tensor in given), depths)
        description = _Description(span, index, rotations)
        records = (ctypes.byref(record) for record in (draft, head, chain))
        _require_tokens(self._library.draft_chain(*records, description.address))
        return tokens, columns, probs

    def distributions(
        self, logits: torch.Tensor, temperature: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute log-softmax and softmax [N, V] and entropies [N] of logits [N, V], in float32.

        V: a multiple of 16. temperature: [N] float32, or None for 1.
        """
        logits, divisor = logits.contiguous(), None if temperature is None else temperature.data_ptr()
        log_p, p = torch.empty(2, *logits.shape)
        entropies = torch.empty(len(logits))
        pointers = (logits.data_ptr(), divisor, log_p.data_ptr(), p.data_ptr(), entropies.data_ptr())
        self._library.distributions(*pointers, *logits.shape)
        return log_p, p, entropies

    def softmax(self, logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
        """Compute the softmax alone; see `distributions`."""
        logits, divisor = logits.contiguous(), None if temperature is None else temperature.data_ptr()
        p = torch.empty(logits.shape)
        self._library.distributions(logits.data_ptr(), divisor, None, p.data_ptr(), None, *logits.shape)
        return p

    def sample(self, weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Sample from weights [N, V] float32, V a multiple of 16, as `spec.sampling.sample_cdf` does.

        uniforms: [N] float64. Returns [N] int64. Raises RuntimeError for weights without mass or with a NaN.
        """
        weights, uniforms = weights.contiguous(), uniforms.contiguous()
        tokens = torch.empty(len(weights), dtype=torch.int64)
        pointers = (weights.data_ptr(), uniforms.data_ptr(), tokens.data_ptr())
        _require_tokens(self._library.sample(*pointers, *weights.shape))
        return tokens

    def verify_chain(
        self,
        columns: torch.Tensor,
        draft_probs: torch.Tensor,
        target_probs: torch.Tensor,
        accept_uniforms: torch.Tensor,
        residual_uniforms: torch.Tensor,
        *,
        ids: torch.Tensor | None,
    ) -> Verdict:
        """Verify drafts by rejection sampling, as `spec.verify.verify_chain` does; V is a multiple of 16.

        columns: [B, gamma] int64, the drafts as indices of draft_probs [B, gamma, D] float32. target_probs:
        [B, gamma + 1, V] float32. ids: [D] int64, the tokens that the draft can propose, or None for all.
        Raises RuntimeError if a row of target_probs that decides has a NaN.
        """
        batch, gamma, vocab = len(columns), columns.shape[1], target_probs.shape[-1]
        given = target_probs, draft_probs, columns, accept_uniforms, residual_uniforms
        p, q, columns, coins, uniforms = (tensor.contiguous() for tensor in given)
        verdict = Verdict(
            num_accepted=torch.empty(batch, dtype=torch.int64),
            next_token=torch.empty(batch, dtype=torch.int64),
            accept_prob=torch.empty(batch, gamma),
        )
        failed = self._library.verify_chain(
            *(p.data_ptr(), q.data_ptr(), None if ids is None else ids.data_ptr()),
            *(columns.data_ptr(), coins.data_ptr(), uniforms.data_ptr()),
            *(verdict.num_accepted.data_ptr(), verdict.next_token.data_ptr(), verdict.accept_prob.data_ptr()),
            *(batch, gamma, vocab, q.shape[-1]),
        )
        _require_tokens(failed)
        return verdict


def _require_tokens(failed: int) -> None:
    """Raise RuntimeError if rows failed, as a token out of range would be read as an address."""
    if failed:
        raise RuntimeError(
            f"{failed} distributions have no mass or a NaN: the model's logits are not finite."
        )


class _Description:
    """A pass over a span as the kernels read it, and what must live meanwhile; arguments: see `run_draft`."""

    def __init__(self, span: Span, index: int, rotations: torch.Tensor) -> None:
        assert span.contexts is not None
        keys, values = span.seen[index]
        mask = None if span.unseen is None else span.tables.mask
        self._positions, self._places = span.positions.contiguous(), span.places.contiguous()
        attention = _attention(keys, values, mask, span.contexts, span.width)
        attention.positions = self._positions.data_ptr()
        self._pass = _Pass(self._places.data_ptr(), rotations.data_ptr(), attention)
        self.address = ctypes.byref(self._pass)


def _attention(
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    contexts: torch.Tensor,
    width: int,
) -> _Attention:
    """Describe what `Kernels.attend` and `run_layers` read; width: tokens of each row."""
    covered, apart = (0, 0) if mask is None else (mask.stride(0), mask.stride(1))
    return _Attention(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        mask=None if mask is None else mask.data_ptr(),
        contexts=contexts.data_ptr(),
        rows=len(keys),
        width=width,
        length=keys.shape[2],
        cached=keys.stride(0),
        spaced=keys.stride(1),
        covered=covered,
        apart=apart,
    )


def fits(arch: Architecture) -> bool:
    """Return whether all kernels can compute a model."""
    return (
        arch.latent is None
        and arch.hidden % 16 == 0
        and arch.rotary_dim % 16 == 0
        and arch.head_dim % 32 == 0
        and arch.head_dim <= MOST_CHANNELS
    )


def usable(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels if they are for tensors on this device and of this dtype."""
    return kernels() if device.type == "cpu" and dtype == torch.bfloat16 else None


@cache
def kernels() -> Kernels | None:
    """Compile and load the kernels, or load them from the cache; None if this machine cannot have them."""
    processor = _processor()
    if processor is None:
        return None
    version = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    path = user_cache() / "kernels" / f"{processor}-{version}.so"
    try:
        if not path.exists():
            _compile(path, [f"-march={processor}"])
        return Kernels(ctypes.CDLL(str(path)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning(
            "decode steps in bfloat16 take about twice as long, as their kernels cannot be compiled: %s. "
            "This needs gcc, or a similar compiler in CC, and a folder XDG_CACHE_HOME that can be written.",
            reason,
        )
        return None


def _processor() -> str | None:
    """Return the processor to compile for, as compilers name it; None if the kernels cannot run here."""
    if sys.platform != "linux":
        return None
    if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
        return "sapphirerapids"
    if torch.cpu._is_avx512_bf16_supported():
        return "cooperlake"  # and Zen 4 and 5
    return "skylake-avx512" if torch.cpu._is_avx512_supported() else None


def _compile(path: Path, processor: Sequence[str]) -> None:
    """Compile the source to a shared library; processor: flags that name it.

    Raises FileNotFoundError without a compiler.
    """
    compiler = os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler: install gcc, or set CC")

    # Linked without an OpenMP runtime of its own, it uses the one that torch has loaded, and its threads.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part, whole = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        steps = [*_FLAGS, *processor, "-c", _SOURCE, "-o", part], ["-shared", part, "-lm", "-o", whole]
        for step in steps:
            subprocess.run([*compiler.split(), *step], check=True, capture_output=True, text=True)
        whole.replace(path)  # so that processes that compile at the same time do not meet
