"""The engine Protocol: the methods of a decoding engine that the collector and the controller call.

Owns the contract, and the check for requests that every engine refuses. `embedded` implements it in-process,
`sglang` over HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlpipe.config.spec import SpecMode
from rlpipe.types import GenerateRequest, GenerateResult, SpecCounts
from rlpipe.weights.protocols import ReceivesWeights


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Sums since the start; differences of two readings give rates.

    running, waiting: current requests. generated_tokens, prefill_tokens: totals. busy_seconds: time spent in
    forward passes and sampling. row_steps: decode steps, summed over rows. decode_seconds: time of steps with
    drafts and without a new prompt (only if gamma is chosen from measured costs). plain_seconds: time that
    the same tokens would take without drafts, by these costs. predicted_seconds: the policy's estimate of
    decode_seconds. kv_rows: number of conversations of any length that the engine can store. kv_tokens:
    number of tokens of further conversations that it can store in addition; 0 if unknown.
    costs: measured seconds of a decode step by (batch, gamma), if the engine measures them. sync: values of
    the last weight update by metric name, if the engine measures them itself. server: values of the engine's
    server by metric name; `{k}` in a name stands for the worker's number.
    """

    policy_version: int = 0
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    busy_seconds: float = 0.0
    row_steps: int = 0
    kv_rows: int = 0
    kv_tokens: int = 0
    decode_seconds: float = 0.0
    plain_seconds: float = 0.0
    predicted_seconds: float = 0.0
    spec: SpecCounts = field(default_factory=SpecCounts)
    costs: Mapping[tuple[int, int], float] = field(default_factory=dict)
    sync: dict[str, float] = field(default_factory=dict)
    server: dict[str, float] = field(default_factory=dict)


class Engine(ReceivesWeights, Protocol):
    """A decoding engine. `generate` may be called concurrently from one event loop."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn; returns partial output with finish_reason ABORT after `abort`."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort some requests (None: all); their `generate` calls return the tokens so far."""

    def end_session(self, session_id: str) -> None:
        """Free the cache of a conversation."""

    def pause(self) -> None:
        """Stop decoding after the current step; returns once no step is running."""

    def resume(self) -> None:
        """Continue decoding."""

    def stats(self) -> EngineStats:
        """Return counters since start."""
        ...

    def close(self) -> None:
        """Stop the engine; pending requests end with ABORT."""


def check_request(request: GenerateRequest, vocab: int, mode: SpecMode) -> None:
    """Raise ValueError for a request that no engine can serve; vocab: vocabulary size of the model."""
    ids, sampling = request.prompt_ids, request.sampling
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab:
        what = "is empty" if not len(ids) else f"has token ids outside 0..{vocab - 1}"
        raise ValueError(
            f"prompt_ids of request {request.request_id!r} {what}: use the tokenizer of the model."
        )
    if mode is SpecMode.GREEDY and sampling.temperature != 0:
        raise ValueError(
            f"request {request.request_id!r}: temperature={sampling.temperature}, but spec.mode=greedy "
            "decodes the argmax: set the temperature to 0, or spec.mode=rejection to sample."
        )
    if sampling.max_new_tokens < 1 or sampling.temperature < 0 or sampling.top_logprobs < 0:
        raise ValueError(
            f"sampling of request {request.request_id!r} is impossible: {sampling}. "
            "max_new_tokens must be at least 1, temperature and top_logprobs at least 0."
        )
