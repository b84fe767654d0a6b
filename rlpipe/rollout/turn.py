"""Turns, whichever engine generates them: what they ask for, their seeds, the joining of their results."""

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
    """One turn to generate, however many requests of an engine it takes.

    key: differs for each turn of an attempt, and decides its seeds. prompt: int32 ids of all tokens before
    it. budget: tokens that it may have. session_id: of the conversation. stop_token_ids: end it.
    top_logprobs: of each token. routes: of the tokens before it.
    """

    key: object
    prompt: np.ndarray
    budget: int
    session_id: str
    stop_token_ids: tuple[int, ...]
    top_logprobs: int = 0
    routes: np.ndarray | None = None


def stream_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends only on the parts, equal in every process.

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
    """Return the first token whose experts are not recorded yet.

    before: routes of the tokens before a turn, [tokens, layers, k]. turn: what has been generated of it.
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

    # The second result ended the turn, so its finish reason is that of the turn.
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
    """Return the first tokens of a turn. Counts of drafts stay: the work was done."""
    columns = {name: getattr(result, name)[:tokens] for name in GenerateResult.COLUMNS}
    return replace(
        result,
        **columns,
        top_logprobs=None if result.top_logprobs is None else result.top_logprobs[:tokens],
        drafts=None if result.drafts is None else [d for d in result.drafts if d.position < tokens],
    )
