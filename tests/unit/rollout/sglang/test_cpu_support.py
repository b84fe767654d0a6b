"""The stand-ins SGLang uses without a GPU: exact verification, and cache bookkeeping of a chain."""

import importlib
import itertools
import sys

import pytest
import torch

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
SOURCE = ROOT / "sglang_env" / "cpu_support" / "src"
VOCAB, GAMMA, GRID = 3, 2, 14


@pytest.fixture(scope="module")
def load():
    """Import a module of the support package, which is installed in SGLang's environment only."""
    before = set(sys.modules)
    sys.path.insert(0, str(SOURCE))
    yield importlib.import_module
    sys.path.remove(str(SOURCE))
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("rlpipe_sglang_cpu", "sgl_kernel", "torchvision"):
            del sys.modules[name]


def first_token_law(function, target, draft, drafts, weights):
    """Law of the first emitted token and mean number of kept drafts, over all drafts and a grid of coins.

    drafts: [D, GAMMA] chains; weights: [D] their probabilities. The error of the grid is of order 1 / GRID.
    """
    coins = (torch.arange(GRID) + 0.5) / GRID
    grid = torch.tensor(list(itertools.product(coins.tolist(), repeat=GAMMA + 1)))
    rows, n = len(grid), GAMMA + 1
    law, kept = torch.zeros(VOCAB), 0.0
    for chain, weight in zip(drafts, weights, strict=True):
        predicts = torch.zeros(rows * n, dtype=torch.int32)
        accept_index = torch.full((rows, n), -1, dtype=torch.int32)
        accepted = torch.zeros(rows, dtype=torch.int32)
        function(
            predicts=predicts,
            accept_index=accept_index,
            accept_token_num=accepted,
            candidates=torch.cat([torch.zeros(1, dtype=torch.long), chain]).expand(rows, n),
            retrive_index=torch.arange(rows * n).view(rows, n),
            retrive_next_token=None,
            retrive_next_sibling=None,
            uniform_samples=grid[:, :GAMMA],
            uniform_samples_for_final_sampling=grid[:, GAMMA],
            target_probs=target.expand(rows, n, VOCAB),
            draft_probs=draft.expand(rows, GAMMA, VOCAB),
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
        )
        first = predicts.view(rows, n)[:, 0].long()
        law += weight * torch.bincount(first, minlength=VOCAB) / rows
        kept += weight * accepted.float().mean()
        assert torch.equal(accept_index.ge(0).sum(1), accepted.long() + 1)
    return law, float(kept)


TARGET = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]])
DRAFT = torch.tensor([[0.2, 0.5, 0.3], [0.5, 0.4, 0.1]])
CHAINS = torch.tensor(list(itertools.product(range(VOCAB), repeat=GAMMA)))
CHANCE = torch.stack([DRAFT[0, a] * DRAFT[1, b] for a, b in CHAINS])


def test_rejection_sampling_emits_the_target_whatever_the_draft(load):
    verify = load("rlpipe_sglang_cpu.verify")
    law, kept = first_token_law(verify.chain_speculative_sampling, TARGET, DRAFT, CHAINS, CHANCE)
    assert (law - TARGET[0]).abs().max() < 1.5 / GRID
    rate = torch.minimum(TARGET[:GAMMA], DRAFT).sum(1)
    assert abs(kept - float(rate[0] + rate[0] * rate[1])) < 2 / GRID


def test_the_law_test_catches_a_draft_that_is_misreported(load):
    verify = load("rlpipe_sglang_cpu.verify")
    uniform = torch.full_like(DRAFT, 1 / VOCAB)
    law, _ = first_token_law(verify.chain_speculative_sampling, TARGET, uniform, CHAINS, CHANCE)
    assert (law - TARGET[0]).abs().max() > 1.5 / GRID


@pytest.mark.parametrize("chain", [[0, 2], [1, 1], [2, 0]])
def test_target_only_verification_emits_the_target_for_every_draft(load, chain):
    verify = load("rlpipe_sglang_cpu.verify")
    law, kept = first_token_law(
        verify.chain_target_only_sampling, TARGET, DRAFT, torch.tensor([chain]), torch.ones(1)
    )
    assert (law - TARGET[0]).abs().max() < 1.5 / GRID
    rate = TARGET[torch.arange(GAMMA), torch.tensor(chain)]
    assert abs(kept - float(rate[0] + rate[0] * rate[1])) < 2 / GRID


def test_greedy_rows_in_a_sampled_batch_keep_only_their_argmax(load):
    verify = load("rlpipe_sglang_cpu.verify")
    kept = verify.top_k_renorm(TARGET, torch.tensor([1, 2, 3]))
    assert kept[0].tolist() == [1.0, 0.0, 0.0] and kept[1, 2] == pytest.approx(0.75)
    torch.testing.assert_close(kept[2], TARGET[2])


def test_greedy_verification_stops_at_the_first_difference(load):
    kernel = load("sgl_kernel")
    candidates = torch.tensor([[9, 4, 5], [9, 4, 6], [9, 7, 5]])
    best = torch.tensor([[4, 5, 8], [4, 5, 8], [4, 5, 8]])
    predicts, accept_index = torch.zeros(9, dtype=torch.int32), torch.full((3, 3), -1, dtype=torch.int32)
    accepted = torch.zeros(3, dtype=torch.int32)
    index = torch.arange(9).view(3, 3)
    kernel.verify_tree_greedy_cpu(predicts, accept_index, accepted, candidates, index, None, None, best)
    assert accepted.tolist() == [2, 1, 0]
    assert predicts.view(3, 3).tolist() == [[4, 5, 8], [4, 5, 0], [4, 0, 0]]
    assert accept_index.tolist() == [[0, 1, 2], [3, 4, -1], [6, -1, -1]]


def test_cache_slots_are_entered_and_read_back(load):
    kernel = load("sgl_kernel")
    table, slots = torch.zeros(3, 8, dtype=torch.int32), torch.tensor([11, 12, 13, 14, 15])
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([4, 6])
    kernel.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 8)
    assert table[2, 1:4].tolist() == [11, 12, 13] and table[0, 4:6].tolist() == [14, 15]
    read = torch.zeros(5, dtype=torch.long)
    kernel.assign_extend_cache_locs_cpu(rows, table, start, end, read, 8)
    assert read.tolist() == slots.tolist()
    drafts = torch.zeros(4, dtype=torch.long)
    kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, torch.tensor([2, 4]), drafts, 8, 1, 2)
    assert drafts.tolist() == [12, 13, 14, 15]


def test_a_chain_is_described_as_a_tree_without_branches(load):
    kernel = load("sgl_kernel")
    n, lengths = 3, torch.tensor([5, 7])
    mask, positions = torch.zeros(2 * n * n, dtype=torch.bool), torch.zeros(2 * n, dtype=torch.long)
    index, following, sibling = (torch.zeros(2, n, dtype=torch.long) for _ in range(3))
    kernel.build_tree_kernel_efficient_cpu(
        None, None, lengths, mask, positions, index, following, sibling, 1, 2, n, 1
    )
    assert positions.tolist() == [5, 6, 7, 7, 8, 9] and index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert following.tolist() == [[1, 2, -1]] * 2 and sibling.unique().tolist() == [-1]
    assert mask.view(2, n, n)[1].tolist() == torch.ones(n, n).tril().bool().tolist()


def test_token_bookkeeping(load):
    kernel = load("sgl_kernel")
    out = torch.zeros(2, dtype=torch.long)
    kernel.fill_bonus_tokens_cpu(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([2, 3]), out, 3)
    assert out.tolist() == [2, 6]
    slots = torch.zeros(3, dtype=torch.long)
    kernel.fill_accept_out_cache_loc_cpu(
        torch.tensor([[0, 1], [-1, 3]]), torch.tensor([10, 11, 12, 13]), slots
    )
    assert slots.tolist() == [10, 11, 13]
    ids = torch.tensor([1, 2, 3, 4, 5])
    kernel.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([8, 9]))
    assert ids.tolist() == [2, 3, 8, 5, 9]


def test_what_a_text_model_never_calls_says_so_when_called(load):
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.flash_mla_decode"):
        load("sgl_kernel").flash_mla_decode()
    with pytest.raises(NotImplementedError, match=r"torchvision\.transforms\.Resize"):
        load("torchvision.transforms").Resize(3)


def test_the_plugin_stays_out_where_there_is_a_gpu(load, monkeypatch, caplog):
    plugin = load("rlpipe_sglang_cpu.plugin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plugin.load()  # would fail otherwise: sglang is not installed here
    assert "stays inactive" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModuleNotFoundError, match="sglang"):
        plugin.load()
