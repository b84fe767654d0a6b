"""Converts a GGUF file (llama.cpp's format) to a Hugging Face checkpoint in bfloat16.

Transformers reads the weights and the tokenizer with the package `gguf`. Its tokenizer has two faults, which
are corrected here. It confuses the token that begins a turn with the token that ends it; special tokens are
therefore taken from config.json, which transformers fills from the metadata of the GGUF file. And of the
architecture llama, a byte-level tokenizer divides texts as GPT-2's does, whatever the file says.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MISSING = (
    "the package `gguf` is not installed, and it reads GGUF files: run `pip install gguf`, in a checkout "
    "`pip install -e '.[fetch]' -c constraints.txt`."
)
_BYTE_LEVEL = "gpt2"  # name in GGUF files of tokenizers that join bytes

# How the tokenizers of Llama 3 and Qwen2 divide a text before they join bytes; they differ in numbers.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
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
        ValueError: `gguf` is not installed, the file is broken, or its architecture or tokenizer is not
            supported.
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
            model_type, division = _tokenizer_kind(gguf)
    except Exception as error:
        raise ValueError(f"{gguf} cannot be converted: {type(error).__name__}: {error}") from error

    if model_type == _BYTE_LEVEL:
        try:
            correct_byte_level(tokenizer.backend_tokenizer, division)
        except ValueError as error:
            raise ValueError(f"{gguf} cannot be converted: {error}") from None

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


def _tokenizer_kind(gguf: Path) -> tuple[str, str]:
    """Return the type of a file's tokenizer and the name of how it divides texts; "" if the file has none."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    names = [f"tokenizer.ggml.{name}" for name in ("model", "pre")]
    model_type, division = (str(fields[name].contents()) if name in fields else "" for name in names)
    return model_type, division


def correct_byte_level(tokenizer: Tokenizer, division: str) -> None:
    """Make a byte-level tokenizer divide texts as its GGUF file says, and decode bytes only.

    Args:
        tokenizer: the tokenizer, which is changed.
        division: its name in the file, `tokenizer.ggml.pre`.

    Raises:
        ValueError: the division is not known.
    """
    from tokenizers import Regex, decoders, pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    divisions = {
        "gpt-2": [gpt2],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), gpt2],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA_3), "isolated"), bytes_only],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2), "isolated"), bytes_only],
    }
    divisions["deepseek-r1-qwen"] = divisions["qwen2"]
    if division not in divisions:
        raise ValueError(
            f"its tokenizer divides texts in an unknown way, tokenizer.ggml.pre={division!r}; "
            f"known are {', '.join(divisions)}. Use the model's Hugging Face repository."
        )

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(divisions[division])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.model.byte_fallback = tokenizer.model.fuse_unk = False
    tokenizer.model.unk_token = None
    tokenizer.model.ignore_merges = division == "llama-bpe"


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
