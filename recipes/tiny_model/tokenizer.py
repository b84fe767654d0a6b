"""Trains the tokenizer of the tiny model and saves it as a Hugging Face fast tokenizer.

This is byte-level BPE with merges only inside short pieces, so that traces are short and every literal can be
copied: a word with its leading space is one token, and every digit and punctuation mark is one token. The
module also defines the special tokens and the chat template `<|role|>content<|end|>`.

The saved file splits text as Qwen2 does, because transformers uses Qwen2's splitter for every tokenizer of a
`qwen2` checkpoint, whatever the file contains. Qwen2's pieces are unions of the pieces used in training, and
no merge crosses a border of the latter. So both splitters give the same tokens (except for contractions such
as "it's").
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
    """Train byte-level BPE with at most `vocab_size` tokens; fewer if every piece has become one token."""
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
    """Make a splitter that isolates the matches of `pattern`, then maps bytes to characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def save_tokenizer(
    bpe: Tokenizer, path: Path, max_length: int, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerBase:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; return the reloaded tokenizer.

    Every version of transformers knows the tokenizer class in these files, so other engines can load it too.
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
