"""Samples drafts from logits, and keeps the logits of their distribution for verification.

    z = logits / T          float32 [B, V]: kept instead of SGLang's probabilities; q = softmax(z)
    X = argmax_v (z_v - ln E_v),  E_v ~ Exp(1) independent, so that X ~ q       by kernels (Gumbel-max)
    X = min {v: Q(v) > u Q(V)},  Q the running sum of q, u uniform              in torch, cheaper there

The temperature is applied only here. SGLang's `draft_probs` contains z after every sampling of drafts: after
a prefill (`renorm_draft_probs`, then `fast_sample`) and in a draft step (`sample_draft_proposal`), so that
rows of both can be merged. Only `verify.sampled` reads it. For a request with a seed, SGLang samples the
draft.

Most public EAGLE-3 drafts know K < V of the target's tokens, and an MTP layer may too (`vocabulary`). SGLang
refuses them with rejection sampling, since verification needs q of all V tokens. Here X is sampled among the
K tokens and z is -inf for the others (`whole`). So an unknown token is never drafted and can only come from
the residual, and the target's distribution is preserved.

A CUDA graph keeps the memory of its results, and SGLang captures a graph for each of up to 67 batch sizes. So
a graph copies the z of a step's drafts, [B, gamma, V], to a buffer that graphs of all sizes share
(`captured`).

Multi-layer workers and servers with disaggregated prefill write probabilities in other places too; for them
nothing is changed.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from rlpipe_sglang import ranks, vocabulary

failed: list[str] = []  # why torch runs instead of the kernels on this process's GPU


class Known:
    """Tokens that this process's draft knows. ids: [K] int64, target ids; None for all. size: V."""

    ids: torch.Tensor | None = None
    size: int = 0


def keeps_logits() -> bool:
    """Return whether `draft_probs` of this server contains z."""
    from sglang.srt.runtime_context import get_disagg, get_spec

    return not get_spec().enable_multi_layer_eagle and get_disagg().disaggregation_mode == "null"


def allocated(original: Callable, worker: Any, *memory: Any, **named: Any) -> None:
    """Around `EagleDraftWorker.alloc_memory_pool`, which reads the draft's ids and then refuses K < V.

    This hook accepts K < V. An MTP layer's ids are set if SGLang has not raised an error.
    """
    from sglang.srt.runtime_context import get_spec

    try:
        original(worker, *memory, **named)
    except ValueError:
        if getattr(worker, "hot_token_id", None) is None or not keeps_logits():
            raise
    else:
        vocabulary.installed(worker)
    if worker.hot_token_id is not None and get_spec().speculative_use_rejection_sampling:
        Known.ids, Known.size = worker.hot_token_id.long(), worker.target_worker.model_config.vocab_size


class Captured:
    """A float32 buffer as large as z of the largest captured step; each graph writes its z to the beginning.

    SGLang copies z from there before another graph runs.
    """

    buffer: torch.Tensor | None = None


def captured(original: Callable, worker: Any, batch: Any) -> tuple[Any, ...]:
    """Around `EagleDraftWorker.draft_forward`: in a capture, copy z to the buffer of all graphs."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    *tree, z = original(worker, batch)
    if z is None or not get_is_capture_mode():
        return (*tree, z)

    # The largest batch is captured first, after two runs without capture; so the buffer belongs to no graph.
    if Captured.buffer is None or Captured.buffer.numel() < z.numel():
        Captured.buffer = z.new_empty(z.numel())
    return (*tree, Captured.buffer[: z.numel()].view(z.shape).copy_(z))


def whole(z: torch.Tensor) -> torch.Tensor:
    """Expand z [B, K] to [B, V]; return z itself if the draft knows all tokens."""
    if Known.ids is None:
        return z
    return z.new_full((len(z), Known.size), float("-inf")).index_copy_(1, Known.ids, z)


def scaled(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Compute z in new memory, because SGLang's CUDA graphs overwrite the logits in the next step."""
    return logits.float() / temperatures


def by_kernel(name: str, reference: Callable, device: torch.device, *given: Any) -> Any:
    """Call `reference`, or on a GPU the function `name` of `kernels`, unless that cannot be compiled.

    Raises torch.OutOfMemoryError, and RuntimeError if other ranks of the server would continue with kernels.
    """
    if device.type == "cuda" and not failed:
        try:
            return getattr(importlib.import_module("rlpipe_sglang.kernels"), name)(*given)
        except torch.OutOfMemoryError:  # the reference needs even more memory; the next step may succeed
            raise
        except Exception as error:  # an error of the compiler; torch is correct but slower
            ranks.require_alone(error)
            failed.append(f"{type(error).__name__}: {error}")
            logging.getLogger(__name__).warning("rlpipe's kernels do not run, torch does: %s", failed[0])
    return reference(*given)


def first_beyond(running: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token [B, 1] int64 at which `running` [B, V] exceeds u times its last value.

    running: float64, cumulative sums. uniforms: u [B, 1] in [0, 1). Tokens of probability 0 are never
    returned.
    """
    # for a row of nan no token qualifies: the index is clamped
    return torch.searchsorted(running, running[:, -1:] * uniforms, right=True).clamp_(
        max=running.shape[1] - 1
    )


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor | None, top_ks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute z [B, V] and sample [B, 1] int64 from softmax(z); without temperatures the logits are z.

    A greedy request (top_k 1) gets the argmax; its target distribution has one token, see SGLang's docstring.
    """
    z = logits if temperatures is None else scaled(logits, temperatures)
    running = z.softmax(-1).cumsum(-1, dtype=torch.float64)
    drafts = first_beyond(running, torch.rand(len(z), 1, dtype=torch.float64, device=z.device))
    if top_ks is not None:
        drafts = torch.where((top_ks <= 1).view(-1, 1), z.argmax(-1, keepdim=True), drafts)
    return z, drafts


def proposed(
    original: Callable,
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None = None,
    *,
    sampling_seed: torch.Tensor | None = None,
    **position: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Around `sample_draft_proposal`: return z, ones (scores that a chain never reads) and X."""
    if not keeps_logits():
        return original(logits, temperatures, top_ks, sampling_seed=sampling_seed, **position)
    if sampling_seed is not None:
        drafts = original(logits, temperatures, top_ks, sampling_seed=sampling_seed, **position)[2]
        z = scaled(logits, temperatures)
    else:
        z, drafts = by_kernel("draw", draw, logits.device, logits, temperatures, top_ks)
    return whole(z), torch.ones_like(drafts, dtype=torch.float32), drafts


def prefilled(original: Callable, logits: torch.Tensor, sampling: Any, rejection: bool) -> torch.Tensor:
    """Around `renorm_draft_probs`: return z, marked for `drawn`, instead of softmax(z)."""
    if not (rejection and logits.size(0) and keeps_logits()):
        return original(logits, sampling, rejection)
    z = whole(scaled(logits, sampling.temperatures))
    z.rlpipe_scaled = sampling.top_ks
    return z


def drawn(
    original: Callable,
    probs: torch.Tensor,
    *count: int,
    sampling_seed: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Around `fast_sample`: sample from a z of `prefilled`; leave calls with probabilities to SGLang."""
    if not hasattr(probs, "rlpipe_scaled"):
        return original(probs, *count, sampling_seed=sampling_seed, **more)
    z = probs if Known.ids is None else probs[:, Known.ids]
    if sampling_seed is not None:
        return original(z.softmax(-1), *count, sampling_seed=sampling_seed, **more)
    drafts = by_kernel("draw", draw, z.device, z, None, probs.rlpipe_scaled)[1]
    return torch.ones_like(drafts, dtype=torch.float32), drafts


def extended(original: Callable, worker: Any, batch: Any, result: Any, **plan: Any) -> None:
    """Around `_draft_extend_for_decode`: without a graph, compute logits only at each request's last token.

    SGLang's graphs do so too, but its eager pass computes logits at all positions and uses one per request.
    """
    graph, kept = worker.cuda_graph_runner_for_draft_extend, result.accept_lens
    if not (graph or kept.is_cuda or worker.seed_dsa_topk_from_draft_extend or batch.forward_mode.is_idle()):
        tokens = result.next_token_ids.long()
        tokens.rlpipe_last = kept.long() - 1  # index of each request's last token, for `selected`
        rows = torch.arange(len(kept), device=kept.device)
        result.prepared_draft_extend_inputs = kept - 1, rows, tokens
    original(worker, batch, result, **plan)


def selected(
    forward: Any, extend: Any, _: Any, tokens: torch.Tensor, width: int, *__: Any, **___: Any
) -> None:
    """After `prepare_for_draft_extend`: set where to compute logits and states; width: tokens per request."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    last = getattr(tokens, "rlpipe_last", None)
    if last is None:
        return
    extend.select_index = torch.arange(0, len(last) * width, width, device=last.device) + last
    if forward.capture_hidden_mode == CaptureHiddenMode.FULL:
        forward.capture_hidden_mode = CaptureHiddenMode.LAST
