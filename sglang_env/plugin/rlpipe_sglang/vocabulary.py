"""An MTP draft over a part of the vocabulary: the rows of the target's head that it multiplies.

SGLang's --speculative-token-map copies the rows once, which an update of the weights leaves as they were, and
the draft then has no parameter into which an update of the head fits. Here draft and target share the whole
head, as without a map. A copy of the rows of the tokens in RLPIPE_DRAFT_VOCAB ({"tokens": ids}) is a buffer
of the draft, which its logits are computed with, and which is written again after each update.

The checksum of the buffer is left out of SGLang's answer while its rows are bit for bit the head's; otherwise
rlpipe's canary sees a tensor of the draft that was never sent.
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

ASKED = "RLPIPE_DRAFT_VOCAB"  # the environment variable: path of the table
BUFFER = "draft_vocab_head"


class CutHead:
    """The rows `ids` [D] of a draft's head."""

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor) -> None:
        """Copy them, and compute the draft's logits [N, D] with the copy from now on."""
        head, processor = model.lm_head, model.logits_processor
        if getattr(head, "use_intel_amx_backend", False):
            raise ValueError("rlpipe's plugin cannot cut a head that SGLang has packed for AMX.")
        self._head, self.ids = head, ids.to(head.weight.device)
        self.rows = self.expected()
        model.register_buffer(BUFFER, self.rows)

        # of this draft's processor alone: the target has one of its own
        cut = SimpleNamespace(weight=self.rows)
        processor._compute_lm_head = partial(_computed, processor._compute_lm_head, cut)

    def expected(self) -> torch.Tensor:
        """A new copy of the rows."""
        return self._head.weight.detach().index_select(0, self.ids)

    def refresh(self) -> None:
        """Write the rows again, in the same memory: CUDA graphs read it."""
        self.rows.copy_(self.expected())


def _computed(original: Callable, cut: Any, states: torch.Tensor, _: Any, *bias: Any, **out: Any) -> Any:
    """Logits of `states` by the cut head in place of the one that is given."""
    return original(states, cut, *bias, **out)


cut_heads: list[CutHead] = []  # of this process's draft


def tokens() -> torch.Tensor | None:
    """[D] int64: the tokens that the draft knows; None for all."""
    path = os.environ.get(ASKED)
    return torch.tensor(json.loads(Path(path).read_text())["tokens"]) if path else None


def installed(worker: Any) -> None:
    """Cut the head of a draft worker whose memory pool is ready; without a table, change nothing."""
    ids = tokens()
    if ids is not None:
        cut_heads[:] = [CutHead(worker.draft_runner.model, ids)]
        worker.hot_token_id = cut_heads[0].ids  # by which SGLang names what it has drawn


def updated(_: Any, *__: Any) -> None:
    """AFTER `record_weight_version_after_update`, which each way of updating calls when it has loaded."""
    for head in cut_heads:
        head.refresh()


def checked(checksums: dict[str, str]) -> None:
    """Take the cut head out of the checksums of a draft, unless it differs from the head's rows."""
    for head in cut_heads:
        if BUFFER in checksums and torch.equal(head.rows, head.expected()):
            del checksums[BUFFER]
