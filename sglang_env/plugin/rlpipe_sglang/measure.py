"""Computes entropy and log-probability of each sampled token in one pass over its logits.

Both are for the distribution that the token was sampled from, p = softmax(logits / T), in nats. T is the
request's temperature, or 1 if it requested temperature 0, as in SGLang. H(p) = -sum_v p(v) ln p(v), in
float32.

SGLang computes log-probabilities in two places: after each verify step of speculative decoding, and where one
token per request is sampled (first tokens after a prefill, and all tokens without speculation). Entropies are
an auxiliary output of SGLang. Its scheduler copies such outputs to the host together with the tokens, and
then passes the tokens that each request really keeps. These exclude drafts after a stop token, and tokens of
aborted or retracted requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

KEY = "rlpipe_entropies"


def entropy(logprobs: torch.Tensor, probs: torch.Tensor | None = None) -> torch.Tensor:
    """Compute entropies [...] float32 from log-probabilities [..., V]; these must be finite.

    SGLang clamps log-probabilities. probs: the probabilities, if known; else computed with softmax, which on
    a CPU is ten times as fast as exp if many are too small for a float.

    >>> entropy(torch.tensor([[0.5, 0.25, 0.25]]).log()) / torch.tensor(2.0).log()
    tensor([1.5000])
    """
    probs = logprobs.softmax(-1) if probs is None else probs
    return -(probs * logprobs).sum(-1).float()


@dataclass(frozen=True)
class Entropies:
    """An auxiliary output of entropies. values: [B, n] or [B]; row b is for request b's tokens, in order."""

    values: torch.Tensor

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Entropies:
        """Return a copy on the host; SGLang waits for `copy` before it calls `consume`."""
        return Entropies(copy(self.values))

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Append the entropies of the tokens that each request keeps to the list that SGLang streams."""
        rows = self.values.reshape(len(self.values), -1).tolist()
        for row, (request, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is not None and request.return_logprob:
                request.customized_info = request.customized_info or {}
                noted = request.customized_info.setdefault(KEY, [])
                noted += [float("nan")] * (commit.output_index - len(noted))  # the client refuses nan
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
    """Around `compute_spec_logprobs`: measure B requests with n tokens each, of which the first are accepted.

    SGLang's function also runs if top log-probabilities or those of named tokens are requested. If
    `verify.sampled` has verified the step, it has already computed the values.
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
    """After `OutputLogprobProcessor.compute_logprobs`: add the entropies, of one token per request."""
    result.rlpipe_entropies = entropy(logprobs)


def written(_: None, result: Any, logits_output: Any) -> None:
    """After `LogprobResult.write_output_to`: pass the entropies on as an auxiliary output."""
    if hasattr(result, "rlpipe_entropies"):
        _attach(logits_output, result.rlpipe_entropies)


def _attach(logits_output: Any, entropies: torch.Tensor) -> None:
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

    known = logits_output.auxiliary_device_output
    logits_output.auxiliary_device_output = append_auxiliary_output(known, Entropies(entropies))
