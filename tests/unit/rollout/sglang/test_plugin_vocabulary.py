"""An MTP draft over a part of the vocabulary in a server: logits, updates, the canary."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
IDS, HIDDEN, VOCAB = [0, 2, 5], 4, 7


class Processor(torch.nn.Module):
    """As SGLang's: multiplies by the head that it is given."""

    def _compute_lm_head(self, states, lm_head, bias=None, *, out=None):
        return states @ lm_head.weight.T

    def forward(self, states, lm_head):
        return self._compute_lm_head(states, lm_head, None, out=None)


class Model(torch.nn.Module):
    """A head, which draft and target share, and a processor."""

    def __init__(self, weight):
        super().__init__()
        self.lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = weight
        self.logits_processor = Processor()

    def forward(self, states):
        return self.logits_processor(states, self.lm_head)


@pytest.fixture
def vocabulary(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "sglang_env" / "plugin"))
    (tmp_path / "table.json").write_text(json.dumps({"tokens": IDS}))
    monkeypatch.setenv("RLPIPE_DRAFT_VOCAB", str(tmp_path / "table.json"))
    yield importlib.import_module("rlpipe_sglang.vocabulary")
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        del sys.modules[name]


@pytest.fixture
def pair():
    """Draft and target with one head, and states."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
    return Model(weight), Model(weight), torch.randn(5, HIDDEN, generator=generator)


def _worker(draft):
    return SimpleNamespace(draft_runner=SimpleNamespace(model=draft), hot_token_id=None)


def test_the_draft_multiplies_its_rows_and_the_target_all(vocabulary, pair):
    draft, target, states = pair
    whole, worker = target(states), _worker(draft)
    vocabulary.installed(worker)
    torch.testing.assert_close(draft(states), whole[:, IDS])
    assert torch.equal(target(states), whole)
    assert worker.hot_token_id.tolist() == IDS


def test_an_update_of_the_head_reaches_the_rows_in_place(vocabulary, pair):
    draft, target, states = pair
    vocabulary.installed(_worker(draft))
    memory = dict(draft.named_buffers())[vocabulary.BUFFER]
    with torch.no_grad():
        target.lm_head.weight.mul_(-2)
    vocabulary.updated(None)
    torch.testing.assert_close(draft(states), target(states)[:, IDS])
    assert dict(draft.named_buffers())[vocabulary.BUFFER].data_ptr() == memory.data_ptr()
    assert "lm_head.weight" in dict(draft.named_parameters())  # an update of the head fits


def test_the_canary_sees_rows_that_an_update_has_left_as_they_were(vocabulary, pair):
    draft, target, _ = pair
    vocabulary.installed(_worker(draft))
    checksums = {"lm_head.weight": "0", vocabulary.BUFFER: "1"}
    vocabulary.checked(checksums)
    assert list(checksums) == ["lm_head.weight"]

    with torch.no_grad():
        target.lm_head.weight[IDS[1]] += 1
    stale = {"lm_head.weight": "0", vocabulary.BUFFER: "1"}
    vocabulary.checked(stale)
    assert vocabulary.BUFFER in stale


def test_a_packed_head_is_refused(vocabulary, pair):
    pair[0].lm_head.use_intel_amx_backend = True
    with pytest.raises(ValueError, match="AMX"):
        vocabulary.installed(_worker(pair[0]))


def test_without_a_table_nothing_is_cut(vocabulary, pair, monkeypatch):
    monkeypatch.delenv("RLPIPE_DRAFT_VOCAB")
    worker = _worker(pair[0])
    vocabulary.installed(worker)
    assert worker.hot_token_id is None
    assert not vocabulary.cut_heads
