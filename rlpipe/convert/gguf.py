"""Converts a GGUF file (llama.cpp's format) to a Hugging Face checkpoint in bfloat16.

Transformers reads the weights and the tokenizer with the package `gguf`. The tokenizer that it returns
confuses the token that begins a turn with the token that ends it. The special tokens are therefore taken
from config.json, which transformers fills from the metadata of the GGUF file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MISSING = (
    "the package `gguf` is not installed, and it reads GGUF files: run `pip install gguf`, in a checkout "
    "`pip install -e '.[fetch]' -c constraints.txt`."
)
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def require_gguf() -> None:
    """Raise ValueError if the package `gguf`, which reads the format, is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(MISSING)


def convert(gguf: Path, out: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face checkpoint.

    Args:
        gguf: the file.
        out: directory to write to.

    Raises:
        ValueError: `gguf` is not installed, the file is broken, or its architecture is not supported.
    """
    require_gguf()
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # With a broken file, both readers may raise any exception.
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:
        raise ValueError(f"{gguf} cannot be converted: {type(error).__name__}: {error}") from error

    out.mkdir(parents=True, exist_ok=True)
    tied = bool(model.config.tie_word_embeddings)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})

    # Leave out paths and versions of this machine, so that every machine writes equal files.
    config = json.loads(model.config.to_json_string())
    for name in ("_name_or_path", "_model_name_or_path", "transformers_version"):
        config.pop(name, None)
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    _write_json(out / "config.json", config)
    _write_json(
        out / "generation_config.json",
        {name: config[name] for name in _SPECIAL_IDS[:3] if config.get(name) is not None},
    )

    tokenizer.save_pretrained(out)
    _correct_tokenizer(out / "tokenizer_config.json", tokenizer, config)


def _correct_tokenizer(file: Path, tokenizer: Any, config: Mapping[str, Any]) -> None:
    """Write the special tokens of config.json to tokenizer_config.json; turn off the cleanup of spaces."""
    settings = json.loads(file.read_text())
    for name in ("is_local", "local_files_only", *_SPECIAL_IDS):
        settings.pop(name, None)
    for name in _SPECIAL_IDS:
        if (token := config.get(name)) is not None:
            settings[name.removesuffix("_id")] = tokenizer.convert_ids_to_tokens(token)
    settings["clean_up_tokenization_spaces"] = False
    _write_json(file, settings)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and notices of transformers; exceptions still propagate."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
