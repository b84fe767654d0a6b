"""Windows that the study's layer drafts, read by the frozen model: for `exact_window` and `ppow`.

`TextWindows` implements `rlpipe.drafts.windows.rollout.WindowDrafter`, so windows are sampled, verified and
rewarded by the code that trains drafts in rlpipe. Only the passes are of their own:

    the layer, depth 1, all anchors  -> states and keys, with a graph
    the layer, depths 2..K           -> G windows from each anchor, with a graph
    the model, W G K tokens          -> hidden states after every draft, after the text's keys
    the model, W (K - 1) tokens      -> the same along each greedy window, where R_dist counts

The model reads one text at a time. All windows of a text are in one pass, where a token attends to the text
up to its anchor and to its own window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recipes.smollm_adapt.texts import Text
from recipes.smollm_rl.make_layer import Layer
from rlpipe.drafts.loss import depth_targets
from rlpipe.drafts.vocabulary import spread
from rlpipe.drafts.windows.rollout import SampledWindows, criticality_of


class WindowLayer(Layer):
    """The layer of `make_layer`, which can also continue a text with tokens that it drafts itself."""

    def read(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the states of depth 1 at all anchors, [B, S, H]; retains their keys. Arguments: `unroll`."""
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        x = self._join(hidden, ids.roll(-1, 1))
        x = x + self._attend(self._norm(x, "input_layernorm"), 1, self._keys, self._values)
        return self._finish(x)

    def start(self, rows: Tensor, anchors: Tensor) -> None:
        """Prepare to continue the text of each row after its anchor. rows, anchors: [N]."""
        self._rows, self._anchors = rows, anchors
        self._window_keys: list[Tensor] = []
        self._window_values: list[Tensor] = []

    def step(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the states after one more token of each continuation: [N, H], [N] -> [N, H]."""
        x = self._join(state, tokens)
        return self._finish(x + self._attend_window(self._norm(x, "input_layernorm")))

    def _attend_window(self, x: Tensor) -> Tensor:
        """Attend to the keys of depth 1 up to the anchor, and to those of the continuation, [N, H]."""
        positions = self._anchors + 1 + len(self._window_keys)
        query, key, value = (
            self._product(x, f"self_attn.{name}_proj").float().unflatten(-1, (-1, self._size))
            for name in "qkv"
        )
        self._window_keys.append(self._rotate(key, positions))
        self._window_values.append(value)
        query = self._rotate(query, positions).unflatten(1, (self._groups, -1)) / math.sqrt(self._size)

        keys, values = self._keys[0][self._rows], self._values[0][self._rows]  # [N, S, groups, D]
        later = torch.arange(keys.shape[1]) > self._anchors[:, None]
        shallow = torch.einsum("bngd,btnd->bngt", query, keys).masked_fill(later[:, None, None], -torch.inf)
        deeper = [torch.einsum("bngd,bnd->bng", query, key)[..., None] for key in self._window_keys]
        weights = torch.cat((shallow, *deeper), -1).softmax(-1)

        length = keys.shape[1]
        output = torch.einsum("bngt,btnd->bngd", weights[..., :length], values)
        for index, value in enumerate(self._window_values):
            output = output + weights[..., length + index, None] * value[:, :, None]
        return self._product(output.flatten(1), "self_attn.o_proj").float()


class TextWindows:
    """The layer and the frozen model on some texts, for one step of `WindowTraining`.

    table: [D], the tokens that the layer drafts, ascending. Attributes: see `WindowDrafter`.
    """

    def __init__(self, model: Any, layer: WindowLayer, table: Tensor, texts: Sequence[Text]) -> None:
        """Read the texts, by the layer with a graph."""
        self._model, self._layer, self._texts = model, layer, texts
        self.known: Tensor | None = table
        self._table = table
        self._head = model.get_output_embeddings().weight.detach()
        self.vocab = len(self._head)
        ids, sampled, self._hidden = (
            pad_sequence([getattr(text, name) for text in texts], batch_first=True)
            for name in ("ids", "sampled", "hidden")
        )
        self.turns, self.sampled = ids.numpy(), sampled.numpy()
        self.owners = self.rows = np.arange(len(texts))
        self._states = layer.read(self._hidden.float(), ids)

    @property
    def draft_cost(self) -> float:
        """Ratio of the layer's parameters to the model's, without embedding and head."""
        backbone = sum(weight.numel() for weight in self._model.base_model.layers.parameters())
        return sum(weight.numel() for weight in self._layer.weights.values()) / backbone

    def criticality(self) -> Tensor:
        """Compute the criticality [R, L] of the first draft from each token."""
        near = depth_targets(torch.from_numpy(self.turns), torch.from_numpy(self.sampled), 1).mask[:, 0]
        near = near.view(self.turns.shape)
        critical = torch.zeros(near.shape)
        states, target = self._states.detach()[near], self._hidden.roll(-1, 1)[near]
        critical[near] = criticality_of(self, states, target)
        return critical

    def start(self, windows: SampledWindows, group: int) -> torch.device:
        """Prepare to draft from the anchors of W windows, `group` times from each."""
        self._rows, self._anchors = torch.from_numpy(windows.turns), torch.from_numpy(windows.columns)
        self._group, self._state = group, self._states[self._rows, self._anchors]
        self._layer.start(self._rows.repeat_interleave(group), self._anchors.repeat_interleave(group))
        self._greedy = torch.empty(len(self._rows), 0, dtype=torch.long)
        return self._state.device

    def draft(self, tokens: Tensor | None) -> Tensor:
        """Return states of the layer after its last tokens [W, G]: [W, G, H], at first [W, 1, H]."""
        if tokens is None:
            self._state = self._state[:, None]
        else:
            state = self._state.expand(*tokens.shape, -1).flatten(0, 1)
            self._state = self._layer.step(state, tokens.flatten()).unflatten(0, tokens.shape)
        return self._state

    def first(self) -> Tensor:
        """Return states [W, H] of the model at the first draft."""
        return self._hidden[self._rows, self._anchors + 1]

    def read(self, tokens: Tensor) -> Tensor:
        """Return states [W, G, K, H] of the model after each of the tokens [W, G, K]."""
        owners = torch.arange(len(tokens)).repeat_interleave(tokens.shape[1])
        return self._continue(owners, tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])

    def greedy(self, tokens: Tensor) -> Tensor:
        """Append a token [W] to each greedy window; return states [W, H] of the model after it."""
        self._greedy = torch.cat((self._greedy, tokens[:, None]), 1)
        return self._continue(torch.arange(len(tokens)), self._greedy)[:, -1]

    def target_logprobs(self, states: Tensor) -> Tensor:
        """Compute the model's log-probabilities: [..., H] -> [..., V]."""
        return F.linear(states, self._head).float().log_softmax(-1)

    def draft_logprobs(self, states: Tensor) -> Tensor:
        """Compute the layer's log-probabilities over the whole vocabulary: [..., H] -> [..., V]."""
        logits = F.linear(states.bfloat16(), self._head[self._table]).float()
        return spread(logits, self._table, self.vocab).log_softmax(-1)

    @torch.no_grad()
    def _continue(self, owners: Tensor, tokens: Tensor) -> Tensor:
        """Compute the model's states [N, n, H] after each token of N continuations [N, n].

        owners: [N], the window that each continues: its text up to one token after the anchor.
        """
        count, length = tokens.shape
        states = self._hidden.new_empty(count, length, self._hidden.shape[-1])
        rows, starts = self._rows[owners], self._anchors[owners] + 2
        for row, text in enumerate(self._texts):
            here = rows == row
            width, read = int(here.sum()) * length, len(text.ids)
            if not width:
                continue

            # Rows of the mask: the text, which is causal, then the continuations, one after another.
            first, step = starts[here].repeat_interleave(length), torch.arange(width) % length
            owner = torch.arange(width) // length
            visible = torch.ones(read + width, read + width, dtype=torch.bool).tril()
            visible[read:, :read] = torch.arange(read) < first[:, None]
            visible[read:, read:] &= owner[:, None] == owner

            output = self._model.base_model(
                torch.cat((text.ids, tokens[here].flatten()))[None],
                attention_mask=visible[None, None],
                position_ids=torch.cat((torch.arange(read), first + step))[None],
                use_cache=False,
            )
            states[here] = output.last_hidden_state[0, read:].view(-1, length, states.shape[-1])
        return states
