"""Reads the experts that a server returns with an answer, for `GenerateResult.routes`.

SGLang records experts by slot of its cache (`--enable-return-routed-experts`). So for a cached token it
returns the experts of the pass that wrote the token's keys, and the experts of a rejected draft are
overwritten together with its keys. Experts are sent in base64, as int32 for all layers and all requested
tokens except the last: 2 KB a token with 48 layers and 8 experts. A turn requests only experts of tokens that
are new since the turn before.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.models import Architecture
from rlpipe.types import routes_type
from rlpipe.weights.protocols import ServerError


def check_routes(rollout: RolloutConfig, spec: SpecConfig, *, on_gpu: bool) -> None:
    """Refuse settings whose steps would overflow the server's buffer for routes and so end its process.

    SGLang's buffer has space for `--chunked-prefill-size` tokens, or for one token a request if that is more;
    it does not include the drafts of a verify step. Raises ValueError with a hint.
    """
    if rollout.replay_routes and not on_gpu and not rollout.sglang.plugin:
        raise ValueError(
            "rollout.replay_routes=true with rollout.sglang.plugin=false on a CPU: SGLang registers the "
            "memory of routes with CUDA. Set rollout.sglang.plugin=true."
        )
    tokens = rollout.max_running * (spec.gamma + 1)
    if rollout.replay_routes and spec.mode is not SpecMode.NONE and tokens > rollout.prefill_tokens:
        raise ValueError(
            f"rollout.replay_routes=true with rollout.max_running={rollout.max_running} and spec.gamma="
            f"{spec.gamma}: a step of {tokens} tokens does not fit SGLang's buffer of rollout.prefill_tokens="
            f"{rollout.prefill_tokens}. Set rollout.prefill_tokens={tokens} or more."
        )


def read_routes(arch: Architecture, meta: Mapping[str, Any], tokens: int) -> np.ndarray | None:
    """Read the routes of the last `tokens` of an answer's prompt and output; None if the server sent none.

    Returns [tokens, layers with experts, experts per token]. The last token has no routes, which is marked by
    the largest number of the dtype. Raises ServerError for routes that do not fit this model.
    """
    packed, experts = meta.get("routed_experts"), arch.experts
    if packed is None or experts is None:
        return None

    flat = np.frombuffer(base64.b64decode(packed), np.int32)
    count, remainder = divmod(len(flat), arch.layers * experts.per_token)
    if remainder or count >= tokens:
        raise ServerError(
            f"{len(flat)} experts do not belong to {tokens} tokens of {arch.layers} layers with "
            f"{experts.per_token} experts each."
        )

    # The server also records dense layers, which have no experts to replay.
    chosen = flat.reshape(count, arch.layers, experts.per_token)[:, experts.dense :]
    if count and (chosen.min() < 0 or chosen.max() >= experts.count or _repeats(chosen[[0, -1]])):
        raise ServerError(
            f"the server's routes are none: experts {chosen.min()} to {chosen.max()} of {experts.count}, the "
            f"first {chosen[0, 0].tolist()}."
        )

    dtype = routes_type(experts.count)
    routes = np.full((tokens, *chosen.shape[1:]), np.iinfo(dtype).max, dtype)
    routes[:count] = chosen
    return routes


def _repeats(chosen: np.ndarray) -> bool:
    """Return whether a token has an expert twice, as in a buffer of zeros that was never written."""
    return bool((np.diff(np.sort(chosen, -1), axis=-1) == 0).any())
