"""What each tensor of a server is, beside the hash of what is in it: dtype and shape.

SGLang's weights checker answers with a string for each tensor of target and draft on each rank. The dtype
and the shape are written behind the hash, "0123456789abcdef float32 128x32", so that rlpipe's canary knows
what a server keeps and not only that it is something else.
"""

from __future__ import annotations

from typing import Any

from rlpipe_sglang import vocabulary


def told(result: dict[str, Any], checker: Any, *_: Any, **__: Any) -> None:
    """AFTER `WeightChecker._compute_checksum`: add dtype and shape to each hash."""
    tensors, hashes = dict(checker._model_state()), result["checksums"]
    vocabulary.checked(hashes)
    for name, hashed in hashes.items():
        hashes[name] = f"{hashed} {described(tensors[name])}"


def described(tensor: Any) -> str:
    """Dtype and shape of a tensor, in words that `rlpipe.weights.canary` reads."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))}"
