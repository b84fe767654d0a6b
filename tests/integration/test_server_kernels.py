"""The server's Triton kernels, interpreted, against the plugin's torch code and against the exact law.

They are compiled for GPUs by test_kernels_compile.py and run on one by tests/gpu/test_server_kernels_gpu.py.
"""

import importlib.util
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.unit.rollout.sglang.test_plugin_verify import PLUGIN, judging, law_error

pytestmark = pytest.mark.integration
SOURCE = PLUGIN / "rlpipe_sglang" / "kernels.py"


@pytest.fixture
def reference(monkeypatch):
    """The plugin's torch code: modules drafts and verify."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    from rlpipe_sglang import drafts, verify

    yield drafts, verify
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        del sys.modules[name]


def kernels(file=SOURCE, tile=4):
    spec = importlib.util.spec_from_file_location(f"kernels_{tile}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TILE = tile
    return module


def a_batch(batch, depths, vocab, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    z, target = (torch.randn(batch, depths + n, vocab, generator=generator) * 2 for n in (0, 1))
    target[0, 0, 1] = float("-inf")
    drafts = torch.randint(vocab, (batch, depths), generator=generator)
    coins = torch.rand(batch, depths, generator=generator, dtype=torch.float64) ** 2
    uniforms = torch.rand(batch, generator=generator, dtype=torch.float64)
    return drafts, z.to(exact), target.to(dtype), torch.linspace(0.5, 2, batch)[:, None], coins, uniforms


def differences(module, verify, given):
    """Largest difference of the numbers beside the verdict; the verdicts must be the same."""
    known = verify.verify(*given[:2], given[2].to(given[1].dtype), *given[3:])
    found = verify.Verdict(*module.verify(*given))
    assert torch.equal(found.accepted, known.accepted) and torch.equal(found.tokens, known.tokens)
    emitted = torch.arange(found.tokens.shape[1]) <= found.accepted[:, None]
    for name in ("p", "q", "logprobs", "entropies"):
        mine, theirs = getattr(found, name), getattr(known, name)
        if name in ("logprobs", "entropies"):
            mine, theirs = mine[emitted], theirs[emitted]
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("depths", "vocab", "tile"), [(0, 7, 4), (1, 8, 4), (3, 9, 2), (2, 70, 16)])
def test_kernels_judge_as_torch_does(reference, depths, vocab, tile, dtype):
    differences(kernels(tile=tile), reference[1], a_batch(6, depths, vocab, dtype))


def test_rows_of_a_larger_batch_and_of_a_padded_vocabulary_are_read_in_place(reference):
    given = list(a_batch(4, 2, 11, torch.float32))
    wanted = differences(kernels(), reference[1], given)
    given[1] = torch.nn.functional.pad(given[1], (0, 5, 0, 1, 0, 1), value=50.0)[:4, :2, :11]
    given[2] = torch.nn.functional.pad(given[2], (0, 5), value=50.0)[..., :11]
    found = kernels().verify(*given)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_a_requests_verdict_does_not_depend_on_the_batch_it_was_merged_into(reference):
    """Bit for bit: nothing of another row, nor the order of a sum, may reach it."""
    module, first, second = kernels(), a_batch(2, 2, 11, torch.float32), a_batch(3, 2, 11, torch.float32, 1)
    merged = module.verify(*(torch.cat(pair) for pair in zip(second, first, strict=True)))
    alone = zip(module.verify(*second), module.verify(*first), strict=True)
    for together, (before, after) in zip(merged, alone, strict=True):
        joined = torch.cat([before, after], int(together.dim() == 3))
        assert torch.equal(together, joined)


def test_tokens_without_a_finite_logit_have_no_mass(reference):
    """-inf in both laws and NaN in the draft's: as far as the kernels go NaN is -inf."""
    module, (drafts, z, target, *rest) = kernels(), a_batch(4, 2, 11, torch.float64, 3)
    z[:, :, :9] = target[:, :, 2:] = float("-inf")  # drafts of tokens 9 and 10, a target of 0 and 1
    drafts = torch.full_like(drafts, 10)
    found = differences(module, reference[1], (drafts, z, target, *rest))
    assert found.accepted.tolist() == [0] * 4 and (found.p == 0).all() and (found.tokens[:, 0] <= 1).all()
    holes = torch.where(z.isinf(), float("nan"), z)
    for mine, theirs in zip(module.verify(drafts, holes, target, *rest), found, strict=True):
        assert torch.equal(mine, theirs)


def ends(threshold, off):
    """Coins right below and right above a threshold."""
    return [c for c in (threshold * (1 - off), threshold * (1 + off) + 1e-300) if 0 <= c < 1]


def test_every_threshold_of_the_float32_kernels_is_the_exact_one(reference, off=4e-6):
    """Coins on both sides of each threshold of each cell, relative distance 4e-6; float64 says which side.

    Between two thresholds a decision does not change, so the law of the emitted tokens is within the sum of
    such distances of the exact one: what float32 can promise, where 1e-12 is float64's.
    """
    vocab, depths = 5, 2
    generator = torch.Generator().manual_seed(2)
    z, target = (torch.randn(n, vocab, generator=generator) * 1.5 for n in (depths, depths + 1))
    q, p = z.double().softmax(-1), target.double().softmax(-1)
    rows = []  # drafts, coins, uniform; accepted, last token

    def cells(weights):
        """Uniforms at both ends of each token's interval, and the token."""
        edges = [0.0, *(weights / weights.sum()).cumsum(0).tolist()]
        inner = [(low * (1 + off) + 1e-9, high * (1 - off) - 1e-9) for low, high in pairwise(edges)]
        return [(u, t) for t, pair in enumerate(inner) for u in pair if weights[t] > 1e-4]

    for depth in range(depths):
        residual = cells((p[depth] - q[depth]).clamp(min=0))
        for token in range(vocab):
            threshold = (p[depth, token] / q[depth, token]).item()
            for coin in ends(min(threshold, 1), off):
                if coin < threshold:
                    rows.append(
                        ([token] * 2, [0.0] * depth + [coin, 0.0][: depths - depth], 0.5, depth + 1, None)
                    )
                    continue
                rows += [
                    ([token] * 2, [0.0] * depth + [coin] + [0.0] * (1 - depth), u, depth, t)
                    for u, t in residual
                ]
    rows += [([0, 0], [0.0, 0.0], u, 2, t) for u, t in cells(p[2])]
    drafts, coins, uniforms, accepted, last = zip(*rows, strict=True)
    size = len(rows)
    found = reference[1].Verdict(
        *kernels().verify(
            torch.tensor(drafts),
            z.expand(size, -1, -1).contiguous(),
            target.expand(size, -1, -1).contiguous(),
            torch.ones(size, 1),
            torch.tensor(coins, dtype=torch.float64),
            torch.tensor(uniforms, dtype=torch.float64),
        )
    )
    for row in range(size):
        count = found.accepted[row].item()
        if last[row] is None:
            assert count >= accepted[row], rows[row]
        else:
            assert (count, found.tokens[row, count].item()) == (accepted[row], last[row]), rows[row]
    assert size > 40 and {a for a, t in zip(accepted, last, strict=True) if t is not None} == {0, 1, 2}


def test_kernels_emit_exactly_the_targets_law(reference):
    """Of two tokens; of more the torch code is enumerated, which the kernels are compared with."""
    verify, module = reference[1], kernels(tile=2)
    verifier = judging(lambda *given: verify.Verdict(*module.verify(*given)))
    assert law_error(verifier, 2, 1) < 1e-12


MUTANTS = {
    "accepts by p alone": ("coin * q.to(tl.float64) < p", "coin < p"),
    "accepts behind a rejection": ("tl.min(tl.where(rejected, place, PLACES - 1), 0)", "PLACES - 1"),
    "residual of the first row": ("v, b, accepted, draft, draft_row", "v, b, 0, draft, draft_row"),
    "no residual": ("mass = tl.where(empty, whole, rest)\n    last", "mass = whole\n    last"),
    "temperature missing": ("return x / temperature if", "return x if"),
    "tiles weighed alike": ("total = tl.sum(s * weight, 1)", "total = tl.sum(s, 1)"),
    "normaliser of another row": ("(b * PLACES + accepted) * 2", "b * PLACES * 2"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_caught(reference, mutant, tmp_path):
    text, (right, wrong) = SOURCE.read_text(), MUTANTS[mutant]
    assert right in text
    file = tmp_path / "kernels.py"
    file.write_text(text.replace(right, wrong))
    module = kernels(file)
    with pytest.raises(AssertionError):
        for seed in range(3):
            differences(module, reference[1], a_batch(6, 3, 9, torch.float64, seed))


def philox(seed, *counter):
    """Philox4x32-10 (Salmon et al., SC 2011): four arrays of 32-bit words."""
    c = [np.asarray(x, dtype=np.uint64) for x in counter]
    keys, low = [seed & 0xFFFFFFFF, seed >> 32], np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(keys[0]),
            b & low,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(keys[1]),
            a & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def races(seed, batch, vocab, tile):
    """E [batch, vocab] float64 as the kernel's docstring has them."""
    half, every = tile // 2, np.arange(-(-vocab // tile) * tile)
    pair = (every // tile) * half + every % half
    words = philox(seed, *np.broadcast_arrays(pair, np.arange(batch)[:, None], 0, 0))
    upper = (every % tile) >= half
    high, low = np.where(upper, words[2], words[0]), np.where(upper, words[3], words[1])
    return -np.log1p(-(high * 2.0**-32 + (low + 0.5) * 2.0**-64))[:, :vocab]


def test_drafts_are_drawn_from_the_kept_logits_by_philox(reference, monkeypatch):
    """Every draft is the argmax of its row's races; the races have the law of drafts (Pearson, 29.9)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 21, generator=generator).bfloat16()
    temperatures = torch.linspace(0.5, 2, 12)[:, None]
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor([seed]))
    module, seed = kernels(), 0x1234567890ABCDEF
    z, drafts = module.draw(logits, temperatures)
    wanted = (z.double().numpy() - np.log(races(seed, 12, 21, 4))).argmax(1)
    assert (
        torch.equal(z, reference[0].scaled(logits, temperatures)) and drafts[:, 0].tolist() == wanted.tolist()
    )
    again, kept = module.draw(z, None)
    assert again is z and torch.equal(kept, drafts)
    top_ks = torch.tensor([1, 21] * 6)
    greedy = module.draw(logits, temperatures, top_ks)[1][:, 0]
    assert greedy.tolist() == torch.where(top_ks == 1, z.argmax(1), drafts[:, 0]).tolist()

    law = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005]).double()
    drawn = (law.log().numpy() - np.log(races(seed, 40_000, 8, 4))).argmax(1)
    expected = law.numpy() * 40_000
    assert ((np.bincount(drawn, minlength=8) - expected) ** 2 / expected).sum() < 29.9


def test_torch_takes_over_where_a_kernel_cannot_be_compiled(reference, monkeypatch):
    drafts, _ = reference
    broken = type(sys)("rlpipe_sglang.kernels")
    broken.draw = lambda *_: 1 / 0
    monkeypatch.setitem(sys.modules, "rlpipe_sglang.kernels", broken)
    for _ in range(2):
        assert drafts.by_kernel("draw", lambda *given: given, torch.device("cuda"), 1, 2) == (1, 2)
    assert drafts.failed == ["ZeroDivisionError: division by zero"]


def failing(monkeypatch, error):
    """A module of kernels in which drawing raises `error`."""
    broken = type(sys)("rlpipe_sglang.kernels")

    def draw(*_):
        raise error

    broken.draw = draw
    monkeypatch.setitem(sys.modules, "rlpipe_sglang.kernels", broken)


def test_a_gpu_without_memory_for_a_moment_keeps_its_kernels(reference, monkeypatch):
    drafts, _ = reference
    failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        drafts.by_kernel("draw", lambda *given: given, torch.device("cuda"), 1, 2)
    assert drafts.failed == []


@pytest.mark.parametrize(("ranks", "alone"), [(0, True), (1, True), (2, False)])
def test_no_rank_of_several_leaves_the_kernels_by_itself(reference, monkeypatch, ranks, alone):
    """Before they have compared (0) each may: then they do not start where they differ."""
    drafts, _ = reference
    failing(monkeypatch, ValueError("no such instruction"))
    monkeypatch.setattr(drafts.ranks.Compared, "ranks", ranks)
    if alone:
        assert drafts.by_kernel("draw", lambda *given: given, torch.device("cuda"), 1, 2) == (1, 2)
    else:
        with pytest.raises(RuntimeError, match=r"one of 2 ranks, .*ValueError: no such instruction"):
            drafts.by_kernel("draw", lambda *given: given, torch.device("cuda"), 1, 2)
    assert bool(drafts.failed) == alone
