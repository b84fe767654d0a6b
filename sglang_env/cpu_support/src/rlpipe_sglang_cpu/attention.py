"""SGLang's torch_native attention, extended for a chain of MTP drafts.

Two things are added to `TorchNativeAttnBackend`. A verify step extends every sequence by the draft tokens,
but the batch has no extend lengths for it. Draft step k attends to k + 1 positions more than the batch
contains. Both are implemented as an overlay of the batch, so attention itself is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend


class _Overlay:
    """A batch in which some attributes are replaced."""

    def __init__(self, batch: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _batch=batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


class MtpTorchNativeBackend(TorchNativeAttnBackend):
    """The backend. draft_step: the step of multi-step drafting that it serves, None for other passes."""

    def __init__(self, model_runner: Any, draft_step: int | None = None) -> None:
        super().__init__(model_runner)
        self._draft_step = draft_step

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_):
        batch = forward_batch
        if batch.forward_mode.is_target_verify():
            if batch.spec_info.tree_topk != 1:
                raise NotImplementedError("the CPU verifies chains only: --speculative-eagle-topk must be 1")
            drafted = batch.spec_info.draft_token_num
            batch = _Overlay(
                batch,
                extend_prefix_lens=batch.seq_lens,
                extend_seq_lens=torch.full_like(batch.seq_lens, drafted),
                seq_lens=batch.seq_lens + drafted,
            )
        return super().forward_extend(q, k, v, layer, batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_):
        batch = forward_batch
        if self._draft_step is not None:
            batch = _Overlay(batch, seq_lens=batch.seq_lens + self._draft_step + 1)
        return super().forward_decode(q, k, v, layer, batch, save_kv_cache)


class DraftSteps:
    """One backend for each draft step after the first, as SGLang's drafting loop requires."""

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        if topk != 1:
            raise NotImplementedError(f"the CPU drafts chains: --speculative-eagle-topk is {topk}, not 1")
        self.topk, self.speculative_num_steps = topk, num_steps
        self.device = model_runner.device
        self.attn_backends = [MtpTorchNativeBackend(model_runner, step) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)
