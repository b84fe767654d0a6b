"""Turns that do not depend on who plays them: where their randomness comes from, and parts of one joined."""

from __future__ import annotations

import hashlib

from rlpipe.types import GenerateResult, merged_routes, shifted


def stream_seed(*parts: object) -> int:
    """A 63-bit seed that depends on the parts alone, equal in every process.

    >>> stream_seed(1, 2) == stream_seed(1, 2) != stream_seed(2, 1)
    True
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def joined(first: GenerateResult, second: GenerateResult) -> GenerateResult:
    """Two parts of one turn as one."""
    first.spec.add(second.spec)
    top = first.top_logprobs
    drafts = None if second.drafts is None else shifted(second.drafts, len(first.output_ids))
    return GenerateResult(
        request_id=first.request_id,
        output_ids=first.output_ids + second.output_ids,
        logprobs=first.logprobs + second.logprobs,
        entropies=first.entropies + second.entropies,
        versions=first.versions + second.versions,
        finish_reason=second.finish_reason,
        spec=first.spec,
        top_logprobs=None if top is None else top + second.top_logprobs,
        drafts=drafts if first.drafts is None else [*first.drafts, *drafts],
        routes=merged_routes(first.routes, second.routes),
    )
