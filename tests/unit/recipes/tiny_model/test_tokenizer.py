"""The tokenizer: template equals its pieces, text survives, both splitters agree."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from recipes.tiny_model.demonstrators import Demonstrator, demonstrate
from recipes.tiny_model.families import HELD_OUT_FAMILIES, TRAIN_FAMILIES
from recipes.tiny_model.generate import make_instance
from recipes.tiny_model.tokenizer import END, PIECES, save_tokenizer, splitter, train_bpe

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def chats():
    rng = random.Random(0)
    records = [make_instance(rng, TRAIN_FAMILIES | HELD_OUT_FAMILIES) for _ in range(150)]
    return [demonstrate(rng, r, kind) for r in records for kind in (Demonstrator.CAREFUL, Demonstrator.RETRY)]


@pytest.fixture(scope="module")
def tokenizer(chats, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    Path(path / "config.json").write_text('{"model_type": "qwen2"}')  # as in a checkpoint
    bpe = train_bpe((m["content"] for chat in chats for m in chat), 1024)
    save_tokenizer(bpe, path, 1024)
    return AutoTokenizer.from_pretrained(path)


def test_a_conversation_tokenises_as_the_concatenation_of_its_pieces(tokenizer, chats):
    for chat in chats[:100]:
        whole = tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]
        pieces = []
        for message in chat:
            for text in (f"<|{message['role']}|>", message["content"], END):
                pieces += tokenizer.encode(text, add_special_tokens=False)
        assert whole == pieces
        assert tokenizer.decode(whole) == tokenizer.apply_chat_template(chat, tokenize=False)


def test_the_generation_prompt_opens_the_assistant_turn(tokenizer, chats):
    text = tokenizer.apply_chat_template(chats[0][:1], tokenize=False, add_generation_prompt=True)
    assert text == f"<|user|>{chats[0][0]['content']}<|end|><|assistant|>"


def test_words_are_one_token_and_digits_and_punctuation_stand_alone(tokenizer):
    tokens = tokenizer.tokenize("    return [v * 8 for v in items]")
    assert tokens == ["ĠĠĠ", "Ġreturn", "Ġ[", "v", "Ġ*", "Ġ", "8", "Ġfor", "Ġv", "Ġin", "Ġitems", "]"]


def test_the_saved_splitter_gives_the_tokens_of_the_pieces_merges_were_learnt_on(tokenizer, chats):
    by_pieces = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    by_pieces.pre_tokenizer = splitter(PIECES)
    for chat in chats[:100]:
        for message in chat:
            expected = by_pieces.encode(message["content"]).ids
            assert tokenizer.encode(message["content"], add_special_tokens=False) == expected


def test_loading_adds_no_token(tokenizer):
    vocabulary = tokenizer.get_vocab()
    assert len(tokenizer) == len(vocabulary) == max(vocabulary.values()) + 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
