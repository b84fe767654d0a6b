"""Byte-level tokenizers of GGUF files divide texts as the file says."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from rlpipe.convert.gguf import correct_byte_level

pytestmark = pytest.mark.unit
MERGES = [
    ("\u0120", "\u0120"),
    ("\u010a", "\u010a"),
    ("1", "2"),
    ("12", "3"),
    ("123", "4"),
]  # spaces, line breaks


@pytest.fixture
def tokenizer() -> Tokenizer:
    """One as transformers reads it from a file of Llama's architecture."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    model = BPE({token: n for n, token in enumerate(tokens)}, MERGES, byte_fallback=True, fuse_unk=True)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " ")]
    )
    return made


@pytest.mark.parametrize(
    ("division", "number", "line_breaks"),
    [
        ("gpt-2", "_ _ 1234", "; ;"),
        ("smollm", "__ 1 2 3 4", "; ;"),
        ("llama-bpe", "_ _ 123 4", ";;"),
        ("qwen2", "_ _ 1 2 3 4", ";;"),
    ],
)
def test_a_number_and_line_breaks_are_divided_as_the_file_says(tokenizer, division, number, line_breaks):
    """Two spaces and two line breaks stand before what follows; tokens are written with _ and ; for them."""
    correct_byte_level(tokenizer, division)
    for text, wanted in (("a  1234", number), ("a\n\nb", f"{line_breaks} b")):
        tokens = tokenizer.encode(text).tokens
        assert " ".join(tokens).replace("\u0120", "_").replace("\u010a", ";") == f"a {wanted}"


def test_all_bytes_come_back(tokenizer):
    text = "".join(map(chr, range(1, 0x300))) + "\u2581 \U0001f600"
    correct_byte_level(tokenizer, "smollm")
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_division_that_is_not_known_is_refused_with_the_remedy(tokenizer):
    with pytest.raises(ValueError, match=r"tekken.*Hugging Face repository"):
        correct_byte_level(tokenizer, "tekken")
