"""The plugin's attention against the textbook's, over caches in which each request lies scattered."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
SCALE = 0.3


@pytest.fixture
def attention(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "sglang_env" / "plugin"))
    from rlpipe_sglang import attention

    yield attention
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        del sys.modules[name]


def a_batch(before, new, heads=4, groups=2, size=8):
    """Arguments that both passes have; slots of no request hold NaN."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(before) + torch.tensor(new)
    context, places = int(lengths.max()) + 3, torch.randperm(1000, generator=generator)
    slots = places[: len(new) * context].view(len(new), context).int()
    query = torch.randn(sum(new), heads, size, generator=generator, dtype=torch.float64)
    keys, values = (torch.full((1000, groups, size), float("nan"), dtype=torch.float64) for _ in "kv")
    for row, length in enumerate(lengths.tolist()):
        for cache in (keys, values):
            cache[slots[row, :length].long()] = torch.randn(
                length, groups, size, generator=generator, dtype=torch.float64
            )
    requests = torch.arange(len(new)).flip(0)
    slots = slots[requests]  # request r's slots lie in row requests[r] of SGLang's table
    return query, torch.zeros_like(query), keys, values, slots, requests, lengths


def textbook(query, _, keys, values, slots, requests, lengths, new):
    """Each query alone over the keys up to its position."""
    rows, groups = [], query.shape[1] // keys.shape[1]
    at = 0
    for request, length, count in zip(requests.tolist(), lengths.tolist(), new, strict=True):
        for back in range(count - 1, -1, -1):
            seen = slots[request, : length - back].long()
            k, v = (cache[seen].repeat_interleave(groups, 1) for cache in (keys, values))
            weights = (torch.einsum("hd,lhd->hl", query[at], k) * SCALE).softmax(-1)
            rows.append(torch.einsum("hl,lhd->hd", weights, v))
            at += 1
    return torch.stack(rows)


def never(*_, **__):
    raise AssertionError("SGLang's own attention was called")


@pytest.mark.parametrize(
    ("before", "new"),
    [
        ([5, 9, 7], [4, 4, 4]),  # a verify step
        ([0, 0, 0], [3, 7, 1]),  # a prefill
        ([2, 40, 0], [4, 4, 4]),  # contexts too unlike to be padded
        ([6], [2]),
        ([4, 0, 11], [1, 5, 2]),
        ([20, 18], [40, 40]),  # too many queries for heads that share keys to be taken together
        ([3, 0, 1], [40, 21, 1]),
        ([4, 0, 11, 5, 0, 30, 3], [1, 5, 2, 1, 6, 3, 33]),  # turns that join
    ],
)
def test_queries_attend_to_their_request_up_to_themselves(attention, before, new):
    given = a_batch(before, new)
    found = attention.extended(
        never, SimpleNamespace(), *given, torch.tensor(before), torch.tensor(new), None,
        scaling=SCALE, enable_gqa=True, causal=True, is_cross_attn=False, sliding_window_size=None,
    )  # fmt: skip
    torch.testing.assert_close(found, textbook(*given, new))
    assert found is given[1]


def test_latent_vectors_are_keys_and_their_first_numbers_are_values(attention):
    """One head of keys for all; a value buffer is a view of the keys' (SGLang's MLA cache)."""
    query, _, keys, _, *rest = a_batch([5, 0, 7], [4, 3, 1], groups=1)
    given = query, torch.zeros_like(query[..., :6]), keys, keys[..., :6], *rest
    found = attention.extended(
        never, SimpleNamespace(), *given, torch.tensor([5, 0, 7]), torch.tensor([4, 3, 1]),
        scaling=SCALE, causal=True,
    )  # fmt: skip
    torch.testing.assert_close(found, textbook(*given, [4, 3, 1]))


@pytest.mark.parametrize("before", [[5, 9, 7], [1, 60, 2], [4, 4, 4], [6]])
def test_decoding_rows_attend_to_their_whole_context(attention, before):
    given = a_batch(before, [1] * 3)
    found = attention.decoded(
        never, SimpleNamespace(), *given, None,
        scaling=SCALE, enable_gqa=True, causal=False, is_cross_attn=False, sliding_window_size=None,
    )  # fmt: skip
    torch.testing.assert_close(found, textbook(*given, [1] * 3))


@pytest.mark.parametrize("unlike", [{"causal": False}, {"sliding_window_size": 5}, {"encoder_lens": "any"}])
def test_other_attention_is_sglangs(attention, unlike):
    given = a_batch([5], [4])
    how = {"causal": True, "scaling": SCALE, "is_cross_attn": False} | unlike
    last = how.pop("encoder_lens", None)

    def theirs(*received, **options):
        return received, options

    received, options = attention.extended(theirs, "self", *given, given[6], given[6], last, **how)
    assert received[0] == "self" and len(received) == 11 and received[1] is given[0]
    assert options == {"sliding_window_size": None} | how


def test_layers_share_what_a_pass_was_found_to_be_and_the_next_pass_does_not(attention, monkeypatch):
    found, look = [], attention.together
    monkeypatch.setattr(attention, "together", lambda *given: found.append(given) or look(*given))
    before, new, backend = torch.tensor([5, 9]), torch.tensor([4, 4]), SimpleNamespace()
    given = a_batch(before.tolist(), new.tolist())
    second = (given[0], torch.zeros_like(given[0]), given[2].clone(), given[3].clone(), *given[4:])
    moved = torch.randperm(1000)
    elsewhere = (given[0], torch.zeros_like(given[0]), given[2], given[3], moved[given[4].long()], *given[5:])
    kept = given[2].clone(), given[3].clone()

    def attend(batch):
        return attention.extended(
            never, backend, *batch, before, new, None, scaling=SCALE, causal=True, sliding_window_size=None
        )

    expected = textbook(*given, new.tolist())
    for layer in (given, second):
        torch.testing.assert_close(attend(layer), expected)
    assert len(found) == 1
    for cache, was in zip(given[2:4], kept, strict=True):  # the same lengths lie in other slots
        cache[moved] = was
    torch.testing.assert_close(attend(elsewhere), expected)
    assert len(found) == 2
