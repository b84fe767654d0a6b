"""Records every draft token with p, q and whether it was accepted, for requests that ask for it.

A request asks with `sampling_params.custom_params = {"rlpipe_drafts": true}`. p and q are the probabilities
of a draft token under target and draft model at the request's temperature, given the drafts before it. q is 1
for a draft that was not sampled, and a greedy target's p is 1 or 0. Like entropies (`measure`), the records
are an auxiliary output of SGLang. Trees, and drafts over another vocabulary than the target's, are not
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

KEY = "rlpipe_drafts"


def asks(request: Any) -> bool:
    """Return whether a request asks for its drafts."""
    parameters = request.sampling_params.custom_params
    return isinstance(parameters, dict) and parameters.get(KEY) is True


@dataclass(frozen=True)
class Drafts:
    """An auxiliary output of drafts. tokens, p, q: [B, n]. accepted: [B], number of accepted drafts."""

    tokens: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    accepted: torch.Tensor

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Drafts:
        """Return a copy on the host; SGLang waits for `copy` before it calls `consume`."""
        return Drafts(copy(self.tokens), copy(self.p), copy(self.q), copy(self.accepted))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Store each step at its first emitted token, in a list parallel to the output tokens.

        A step is (position, accepted, tokens, p, q); position: index of the first draft in the output.
        """
        for row, (request, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is not None and asks(request):
                request.customized_info = request.customized_info or {}
                noted = request.customized_info.setdefault(KEY, [])
                noted += [None] * (commit.output_index - len(noted))  # for tokens without drafts
                columns = (x[row].tolist() for x in (self.accepted, self.tokens, self.p, self.q))
                noted += [(commit.output_index, *columns), *[None] * (len(commit.token_ids) - 1)]


def laws(verify_input: Any, logits: torch.Tensor, sampling: Any) -> tuple[torch.Tensor, ...] | None:
    """Return drafts [B, n], p and q of a step that SGLang verifies; None if it is not recorded.

    verify_input.draft_probs: here probabilities, or None for drafts that were not sampled.
    """
    places = verify_input.draft_token_num
    tokens = verify_input.draft_token.view(-1, places)[:, 1:].long().clone()
    chain = verify_input.tree_topk == 1 and verify_input.max_tree_depth == places
    q, size = verify_input.draft_probs, len(tokens)
    if not chain or (q is not None and q.shape[-1] != logits.shape[-1]):
        return None
    target, chosen = logits.view(size, places, -1)[:, :-1], tokens.unsqueeze(-1)
    p = (target.float() / sampling.temperatures.unsqueeze(-1)).softmax(-1).gather(-1, chosen).squeeze(-1)
    greedy = (sampling.top_ks <= 1).view(-1, 1)
    p = torch.where(greedy, (target.argmax(-1) == tokens).float(), p)
    if q is None:
        return tokens, p, torch.ones_like(p)
    q = q[:size, : places - 1].gather(-1, chosen).squeeze(-1)
    return tokens, p, torch.where(greedy, torch.ones_like(q), q)


def attach(output: Any, *columns: torch.Tensor) -> None:
    """Add tokens, p, q and accepted to a step's output."""
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

    known = output.auxiliary_device_output
    output.auxiliary_device_output = append_auxiliary_output(known, Drafts(*columns))
