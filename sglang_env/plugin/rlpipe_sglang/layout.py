"""Reports dtype and shape of each tensor of a server, together with the hash of its content.

SGLang's weights checker returns a string for each tensor of target and draft on each rank. Dtype and shape
are appended to the hash, "0123456789abcdef float32 128x32", so that rlpipe's canary can report how a tensor
differs and not only that it differs.
"""

from __future__ import annotations

from typing import Any

from rlpipe_sglang import vocabulary


def told(result: dict[str, Any], checker: Any, *_: Any, **__: Any) -> None:
    """After `WeightChecker._compute_checksum`: add dtype and shape to each hash."""
    tensors, hashes = dict(checker._model_state()), result["checksums"]
    vocabulary.checked(hashes)
    for name, hashed in hashes.items():
        hashes[name] = f"{hashed} {described(tensors[name])}"


def described(tensor: Any) -> str:
    """Describe dtype and shape of a tensor, in the format of `rlpipe.weights.canary`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape))}"
