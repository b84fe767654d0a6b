"""Turns that do not depend on who plays them: where their randomness comes from, and parts of one joined."""

from __future__ import annotations

import hashlib
from dataclasses import replace

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


def stream_seed(*parts: object) -> int:
    """A 63-bit seed that depends on the parts alone, equal in every process.

    >>> stream_seed(1, 2) == stream_seed(1, 2) != stream_seed(2, 1)
    True
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def nothing(request: GenerateRequest, reason: FinishReason) -> GenerateResult:
    """A turn without tokens."""
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
    """The first token without a record: of routes before a turn, and of what there is of the turn."""
    return max(recorded(before), turn.routes_from + recorded(turn.routes) if turn else 0)


def joined(first: GenerateResult, second: GenerateResult) -> GenerateResult:
    """Two parts of one turn as one."""
    spec, top, drafts = SpecCounts(), second.top_logprobs, second.drafts
    routes_from = second.routes_from if first.routes is None else first.routes_from
    for part in (first, second):
        spec.add(part.spec)
    columns = {
        name: np.concatenate((getattr(first, name), getattr(second, name))) for name in GenerateResult.COLUMNS
    }
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
