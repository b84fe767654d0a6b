"""vLLM's `/inference/v1/generate`, which takes and returns token ids (for renderers and verifiers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpipe.serve.chat import MAX_TOKENS
from rlpipe.serve.requests import ApiError, Reply, count_of, list_of, list_or_empty
from rlpipe.serve.session import Session


async def reply_to(session: Session, body: Mapping[str, Any]) -> Reply:
    """Generate the turn that a body requests. Raises ApiError."""
    if any(body.get(name) not in (None, []) for name in ("features", "content_parts")):
        raise ApiError(400, "features and content_parts are not supported: this model reads text only.")
    sampling = {} if body.get("sampling_params") is None else body["sampling_params"]
    if not isinstance(sampling, Mapping):
        raise ApiError(400, "sampling_params must be an object.")
    if count_of(sampling, "n", least=1, most=1 << 30) not in (None, 1):
        raise ApiError(400, "sampling_params.n must be 1.")

    return await session.tokens(
        _ids(body.get("token_ids"), "token_ids"),
        max_tokens=count_of(sampling, "max_tokens", least=1, most=MAX_TOKENS),
        stop_token_ids=_ids(
            list_or_empty(sampling, "stop_token_ids"), "sampling_params.stop_token_ids", least=0
        ),
    )


def answer(reply: Reply, name: str) -> dict[str, Any]:
    """Return the answer: the sampled ids with their logprobs."""
    ids = reply.ids.tolist()
    content = [
        {"token": f"token_id:{token}", "logprob": float(logprob), "bytes": None, "top_logprobs": []}
        for token, logprob in zip(ids, reply.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": reply.finish,
        "routed_experts": None,
    }
    return {"request_id": name, "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}


def _ids(value: Any, where: str, least: int = 1) -> list[int]:
    """Return a list of token ids. Raises ApiError for anything else."""
    ids = list_of(value, where)
    if len(ids) < least or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise ApiError(400, f"{where} must hold token ids, {least} or more.")
    return list(ids)
