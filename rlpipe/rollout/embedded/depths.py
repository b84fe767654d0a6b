"""Several draft layers, one per depth: which tokens and states each reads, and where its keys are.

The layers are chained as in DeepSeek-V3 (arXiv:2412.19437, section 2.2). With h_0 the target's states and e_s
the embedding of token s, layer k computes h_k[t] = layer_k(h_{k-1}[t], e_{t+k}) and attends to its own keys
at earlier anchors. So each layer reads one token further ahead than the layer before it:

    tokens       . . . a a a | d d       n = 6 tokens are known, of which the last is pending
    layer 1      0 1 2 3 4 |             anchors it can run with known tokens: up to n - 2
    layer 2      0 1 2 3 | 4             up to n - 3; anchor 4 reads the first draft
    layer 3      0 1 2 | 3 4             up to n - 4; anchors 3 and 4 read the first and the second draft

A key is in the slot of its anchor. The states before each "|" are a row's frontier (`RowTable.hidden`). A
layer processes the next known token together with the frontier of the layer before it. So all layers catch up
over the same tokens, each layer one anchor behind the layer before it. The last layer also drafts all deeper
tokens, from its output states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlpipe.rollout.embedded.span import Span

if TYPE_CHECKING:
    from rlpipe.rollout.embedded.drafting import Part
    from rlpipe.rollout.embedded.model import Model


def anchor_span(model: Model, first: int, anchors: np.ndarray, *, decoding: bool) -> Span:
    """Make the span of rows first, first + 1, ... at anchors [B, q]; negative anchors use an unread slot."""
    slots = np.where(anchors < 0, model.slots - 1, anchors)
    contexts = np.maximum(anchors.max(1) + 1, 1)
    return model.span(first, torch.from_numpy(slots).to(model.device), contexts, decoding=decoding)


def behind(model: Model, part: Part, depth: int, *, joined: bool) -> Span:
    """Make the span in which the layer of a depth (from 0) catches up over a part of the target's pass.

    joined: whether its rows are new; then they have no frontier and the first `depth` tokens have no state.
    """
    anchors = np.where(part.positions < model.slots - 1, part.positions - depth, -1)
    if joined:
        anchors[:, :depth] = -1
    return anchor_span(model, part.first, anchors, decoding=part.span.decoding)


def carried(states: torch.Tensor, frontier: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """Return the next layer's input states [N, H]: each row's frontier, then all states but the last.

    states: [N, H] of the layer before, part after part. frontier: [rows, H] of that layer, before this pass.
    """
    inputs, start, row = [], 0, 0
    for part in parts:
        batch, stop = part.span.batch, start + part.span.tokens
        block = states[start:stop].unflatten(0, (batch, -1))
        # Shift each row by one anchor: the frontier comes first, and the last state is not read yet.
        before = frontier[row : row + batch].unsqueeze(1)
        inputs.append(torch.cat((before, block[:, :-1]), 1).flatten(0, 1))
        start, row = stop, row + batch
    return torch.cat(inputs)


def draft_deeper(
    model: Model,
    frontier: torch.Tensor,
    window: torch.Tensor,
    tokens: Sequence[torch.Tensor],
    last: np.ndarray,
) -> torch.Tensor:
    """Compute states [A, k - 1, H] of depth k = len(tokens) + 1, for a depth that has its own layer.

    frontier: [A, depths, H] of the decoding rows. window: the result for the depth before, or [A, 1, H] if
    that is the first depth. tokens: the drafts so far, [A] each. last: [A], positions of the pending tokens.
    """
    depth = len(tokens)  # counted from 0
    # The layer before has just computed the window; its frontier is the state before the window.
    states = window if depth == 1 else torch.cat((frontier[:, depth - 1, None], window), 1)
    anchors = last[:, None] + np.arange(-depth, 0)
    span = anchor_span(model, 0, anchors, decoding=True)
    read = torch.stack(list(tokens), 1)
    return model.draft(read.flatten(), states.flatten(0, 1), [span], None, depth).view_as(states)
