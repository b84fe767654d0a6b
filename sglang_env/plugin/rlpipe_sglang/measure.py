"""Entropy and log-probability of each sampled token, in one pass over the logits it was sampled from.

Both are of the law that the token was drawn from, p = softmax(logits / T), in nats: T is the request's
temperature, and 1 where it asked for temperature 0, as SGLang has it. H(p) = -sum_v p(v) ln p(v), in float32.

SGLang computes log-probabilities in two places: after each verify step of speculative decoding, and where
one token a request is sampled (first tokens after a prefill, and all without speculation). Entropies travel
as SGLang's auxiliary output, which its scheduler copies to the host beside the tokens and then hands the
tokens that each request really keeps: none of drafts behind a stop token, of aborted or retracted requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

KEY = "rlpipe_entropies"


def entropy(logprobs: torch.Tensor, probs: torch.Tensor | None = None) -> torch.Tensor:
    """[...] float32 from [..., V] log-probabilities, which must be finite: SGLang clamps them.

    probs: theirs. Without them softmax finds them, which a processor computes ten times as fast as exp where
    many are too small for a float.

    >>> entropy(torch.tensor([[0.5, 0.25, 0.25]]).log()) / torch.tensor(2.0).log()
    tensor([1.5000])
    """
    probs = logprobs.softmax(-1) if probs is None else probs
    return -(probs * logprobs).sum(-1).float()


@dataclass(frozen=True)
class Entropies:
    """An auxiliary output. values [B, n] or [B]: row b holds those of request b's tokens, in order."""

    values: torch.Tensor

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Entropies:
        """The same on the host; SGLang waits for `copy` before it calls `consume`."""
        return Entropies(copy(self.values))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Note the entropies of the tokens each request keeps, in the list that SGLang streams with them."""
        rows = self.values.reshape(len(self.values), -1).tolist()
        for row, (request, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is not None and request.return_logprob:
                request.customized_info = request.customized_info or {}
                noted = request.customized_info.setdefault(KEY, [])
                noted += [float("nan")] * (commit.output_index - len(noted))  # the client refuses them
                noted += rows[row][: len(commit.token_ids)]


def verified(
    original: Callable,
    batch: Any,
    logits_output: Any,
    predict: torch.Tensor,
    *,
    accept_index: torch.Tensor | None = None,
    chain_stride: int | None = None,
) -> None:
    """AROUND `compute_spec_logprobs`: B requests of n places each, of which the first ones were accepted.

    SGLang's own runs as well where top or named log-probabilities are asked for. Nothing is computed where
    `verify.sampled` judged the step and so knows them.
    """
    from sglang.srt.environ import envs

    if any(batch.top_logprobs_nums or ()) or any(ids is not None for ids in batch.token_ids_logprobs or ()):
        original(batch, logits_output, predict, accept_index=accept_index, chain_stride=chain_stride)
    verdict = getattr(logits_output, "rlpipe_verdict", None)
    if verdict is not None and not envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
        _attach(logits_output, verdict.entropies)
        logits_output.next_token_logprobs = verdict.logprobs
        return
    logits, sampling = logits_output.next_token_logits, batch.sampling_info
    places = chain_stride
    if accept_index is not None:
        places, chosen = accept_index.shape[1], accept_index.long().reshape(-1)
        logits, predict = logits[chosen], predict[chosen]
    if not (sampling.is_all_greedy or envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get()):
        logits = logits / torch.repeat_interleave(sampling.temperatures, places, dim=0)
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    logprobs.clamp_(min=torch.finfo(torch.float32).min)
    _attach(logits_output, entropy(logprobs).view(-1, places))
    logits_output.next_token_logprobs = logprobs.gather(1, predict.long().view(-1, 1)).view(-1, places)


def sampled(result: Any, _: Any, logprobs: torch.Tensor, *__: Any) -> None:
    """AFTER `OutputLogprobProcessor.compute_logprobs`, of one token a request."""
    result.rlpipe_entropies = entropy(logprobs)


def written(_: None, result: Any, logits_output: Any) -> None:
    """AFTER `LogprobResult.write_output_to`."""
    if hasattr(result, "rlpipe_entropies"):
        _attach(logits_output, result.rlpipe_entropies)


def _attach(logits_output: Any, entropies: torch.Tensor) -> None:
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

    known = logits_output.auxiliary_device_output
    logits_output.auxiliary_device_output = append_auxiliary_output(known, Entropies(entropies))
