"""Trains the tokenizer of the tiny model and saves it as a Hugging Face fast tokenizer.

Byte-level BPE whose merges stay inside short pieces, so that traces are short and every literal can be
copied: a word with its leading space is one token; digits and punctuation marks are one token each. Owns the
special tokens and the chat template `<|role|>content<|end|>`.

The saved file splits text as Qwen2 does, because transformers puts that splitter on every tokenizer of a
`qwen2` checkpoint, whatever the file says. Qwen2's pieces are unions of ours and no merge crosses ours,
so both splitters give the same tokens (except for contractions such as "it's").
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>", "<|system|>")
PIECES = r" ?[A-Za-z]+|[0-9]| ?[^A-Za-z0-9\s]|\n| +(?= )| +|\s"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` tokens; fewer when every piece has become one token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = splitter(PIECES)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = splitter(PRETOKENIZE_REGEX)
    return bpe


def splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Isolates the matches of `pattern`, then maps bytes to characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def save_tokenizer(
    bpe: Tokenizer, path: Path, max_length: int, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerBase:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; return it as loaded again.

    The tokenizer class in them is known to every version of transformers, so that other engines load it too.
    """
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=chat_template,
    )
    fast.save_pretrained(path)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return AutoTokenizer.from_pretrained(path)
