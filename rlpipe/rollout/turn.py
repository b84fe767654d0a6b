"""Turns for any engine: their parameters, their seeds, and the joining of partial results."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from rlpipe.types import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SpecCounts,
    merged_routes,
    recorded,
    shifted,
)


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn to generate, which may take several requests to an engine.

    key: differs for each turn of an attempt, and determines the turn's seeds. prompt: int32 ids of all tokens
    before the turn. budget: maximum of tokens to generate. session_id: id of the conversation.
    stop_token_ids: tokens that end the turn. top_logprobs: number to record with each token. routes: experts
    of the tokens before the turn.
    """

    key: object
    prompt: np.ndarray
    budget: int
    session_id: str
    stop_token_ids: tuple[int, ...]
    top_logprobs: int = 0
    routes: np.ndarray | None = None


def stream_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends only on the parts; it is equal in every process.

    >>> stream_seed(1, 2) == stream_seed(1, 2) != stream_seed(2, 1)
    True
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def empty_result(request: GenerateRequest, reason: FinishReason) -> GenerateResult:
    """Return the result of a turn without tokens."""
    return GenerateResult(
        request_id=request.request_id,
        output_ids=np.zeros(0),
        logprobs=np.zeros(0),
        entropies=np.zeros(0),
        versions=np.zeros(0),
        finish_reason=reason,
        spec=SpecCounts(),
        top_logprobs=[] if request.sampling.top_logprobs else None,
        drafts=[] if request.sampling.record_drafts else None,
    )


def next_route(before: np.ndarray | None, turn: GenerateResult | None = None) -> int:
    """Return the index of the first token without recorded experts.

    before: routes of the tokens before a turn, [tokens, layers, k]. turn: the part of it generated so far.
    """
    return max(recorded(before), turn.routes_from + recorded(turn.routes) if turn else 0)


def joined(first: GenerateResult, second: GenerateResult) -> GenerateResult:
    """Return two consecutive results of one turn as one."""
    spec, top, drafts = SpecCounts(), second.top_logprobs, second.drafts
    routes_from = second.routes_from if first.routes is None else first.routes_from
    for result in (first, second):
        spec.add(result.spec)

    columns = {
        name: np.concatenate((getattr(first, name), getattr(second, name))) for name in GenerateResult.COLUMNS
    }

    # The second result ended the turn, so use its finish reason.
    return replace(
        second,
        request_id=first.request_id,
        spec=spec,
        top_logprobs=None if top is None else (first.top_logprobs or []) + top,
        drafts=None if drafts is None else (first.drafts or []) + shifted(drafts, len(first.output_ids)),
        routes=merged_routes(first.routes, second.routes, second.routes_from - routes_from),
        routes_from=routes_from,
        **columns,
    )


def shortened(result: GenerateResult, tokens: int) -> GenerateResult:
    """Return a turn cut to its first tokens. Counts of drafts do not change, as the work was done."""
    columns = {name: getattr(result, name)[:tokens] for name in GenerateResult.COLUMNS}
    return replace(
        result,
        **columns,
        top_logprobs=None if result.top_logprobs is None else result.top_logprobs[:tokens],
        drafts=None if result.drafts is None else [d for d in result.drafts if d.position < tokens],
    )
