"""Traces, loss weights and batches."""

import random
from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer

from recipes.tiny_model.data import Batches, CopyDrill, Trace, encode_all
from recipes.tiny_model.demonstrators import Demonstrator, demonstrate
from recipes.tiny_model.families import TRAIN_FAMILIES
from recipes.tiny_model.generate import make_instance
from recipes.tiny_model.settings import StageConfig
from rlpipe.config.paths import resolve

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve("shipped:models/tiny"))


def _encoded(tokenizer, who: Demonstrator, mask_wrong: bool):
    rng = random.Random(3)
    messages = demonstrate(rng, make_instance(rng, TRAIN_FAMILIES), who)
    stage = StageConfig(mix={}, mask_wrong=mask_wrong, context_weight=0.3)
    return messages, encode_all(tokenizer, [messages], stage)[0]


def _weights_of_turn(tokenizer, messages, trace, turn: int) -> set[float]:
    lengths = [len(tokenizer.encode(m["content"], add_special_tokens=False)) + 2 for m in messages]
    start = sum(lengths[:turn])
    return set(trace.weights[start + 1 : start + lengths[turn]])


def test_a_wrong_edit_has_no_weight_when_masked_and_the_right_one_after_it_has(tokenizer):
    messages, trace = _encoded(tokenizer, Demonstrator.RETRY, mask_wrong=True)
    edits = [i for i, m in enumerate(messages) if m["content"].startswith("sed")]
    assert [_weights_of_turn(tokenizer, messages, trace, i) for i in edits] == [{0.0}, {1.0}]
    assert _weights_of_turn(tokenizer, messages, trace, len(messages) - 1) == {1.0}


def test_an_untested_submission_has_no_weight_when_masked_and_all_of_it_otherwise(tokenizer):
    for masked, expected in ((True, {0.0}), (False, {1.0})):
        messages, trace = _encoded(tokenizer, Demonstrator.UNTESTED, mask_wrong=masked)
        assert _weights_of_turn(tokenizer, messages, trace, len(messages) - 1) == expected
        assert _weights_of_turn(tokenizer, messages, trace, len(messages) - 3) == expected


def test_ids_are_those_of_the_chat_template(tokenizer):
    messages, trace = _encoded(tokenizer, Demonstrator.CAREFUL, mask_wrong=False)
    assert trace.ids == tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]


def test_an_epoch_of_batches_holds_every_trace_once_within_the_token_budget():
    traces = [Trace([n] * (5 + n % 7), [1.0] * (5 + n % 7)) for n in range(1, 60)]
    batches = Batches(traces, 64, seed=0, pad=0)
    seen = Counter()
    for step in range(len(batches)):
        ids, weights = batches(step)
        assert ids.numel() <= 64 and torch.equal(ids > 0, weights > 0)
        seen.update(ids[:, 0].tolist())
    assert seen == Counter(range(1, 60))


def test_the_batch_of_a_step_does_not_depend_on_what_was_asked_before():
    traces = [Trace([n] * (5 + n % 7), [1.0] * (5 + n % 7)) for n in range(1, 60)]
    one, other = Batches(traces, 64, seed=0, pad=0), Batches(traces, 64, seed=0, pad=0)
    for step in range(40):
        one(step)
    assert torch.equal(one(33)[0], other(33)[0])


def test_the_drill_weighs_only_the_copy(tokenizer):
    traces = [Trace(list(range(20, 60)), [1.0] * 40)]
    ids, weights = CopyDrill(traces, tokenizer, 512, seed=0)(7)
    words = (ids.shape[1] - 4) // 2
    assert torch.equal(ids[:, 1 : words + 1], ids[:, words + 3 : -1])
    assert weights[:, : words + 3].sum() == 0 and weights[:, words + 3 :].min() == 1
