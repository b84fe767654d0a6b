"""An MTP draft with a reduced vocabulary: it uses some rows of the target's head.

SGLang's --speculative-token-map copies these rows only at the start. A weight update does not change the
copy, and the draft has no parameter that fits an update of the head. Here draft and target share the full
head, as without a map. A buffer of the draft has a copy of the rows of the tokens in RLPIPE_DRAFT_VOCAB
({"tokens": ids}). The draft's logits are computed with this buffer, and it is written again after each
update.

SGLang's answer omits the checksum of the buffer while its rows equal the head's bit for bit; otherwise
rlpipe's canary gets a tensor of the draft that was never sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ASKED = "RLPIPE_DRAFT_VOCAB"  # environment variable with the path of the table
BUFFER = "draft_vocab_head"


class CutHead:
    """The rows `ids` [D] of a draft's head, in a buffer."""

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor) -> None:
        """Copy the rows, and make the draft compute its logits [N, D] with the copy from now on."""
        head, processor = model.lm_head, model.logits_processor
        if getattr(head, "use_intel_amx_backend", False):
            raise ValueError("rlpipe's plugin cannot cut a head that SGLang has packed for AMX.")
        self._head, self.ids = head, ids.to(head.weight.device)
        self.rows = self.expected()
        model.register_buffer(BUFFER, self.rows)

        # only for this draft's processor: the target has a separate one
        cut = SimpleNamespace(weight=self.rows)
        processor._compute_lm_head = partial(_computed, processor._compute_lm_head, cut)

    def expected(self) -> torch.Tensor:
        """Return a new copy of the rows."""
        return self._head.weight.detach().index_select(0, self.ids)

    def refresh(self) -> None:
        """Write the rows again in the same memory, because CUDA graphs read it."""
        self.rows.copy_(self.expected())


def _computed(original: Callable, cut: Any, states: torch.Tensor, _: Any, *bias: Any, **out: Any) -> Any:
    """Compute logits of `states` with the cut head instead of the given one."""
    return original(states, cut, *bias, **out)


cut_heads: list[CutHead] = []  # the heads of this process's draft


def tokens() -> torch.Tensor | None:
    """Return the tokens that the draft knows, [D] int64; None for all."""
    path = os.environ.get(ASKED)
    return torch.tensor(json.loads(Path(path).read_text())["tokens"]) if path else None


def installed(worker: Any) -> None:
    """Cut the head of a draft worker after its memory pool is allocated; without a table, do nothing."""
    ids = tokens()
    if ids is not None:
        cut_heads[:] = [CutHead(worker.draft_runner.model, ids)]
        worker.hot_token_id = cut_heads[0].ids  # SGLang maps sampled tokens to target ids with it


def updated(_: Any, *__: Any) -> None:
    """After `record_weight_version_after_update`, which ends every kind of update: refresh the rows."""
    for head in cut_heads:
        head.refresh()


def checked(checksums: dict[str, str]) -> None:
    """Remove the cut head from a draft's checksums, unless it differs from the head's rows."""
    for head in cut_heads:
        if BUFFER in checksums and torch.equal(head.rows, head.expected()):
            del checksums[BUFFER]
