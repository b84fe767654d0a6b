"""The CPU kernels of a decode step against torch in float32, and a model that uses them against one without.

They exist only on CPUs with AVX-512; elsewhere the engine uses torch's operations, which other tests compare.
The code for each kind of CPU is tested on every one of them: instructions that it lacks are functions in C.
"""

from __future__ import annotations

import ctypes
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rlpipe.config.draft_vocab import write_table
from rlpipe.config.openmp import release_threads
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.rollout.embedded import cpu_kernels
from rlpipe.rollout.embedded.huge_pages import HugePages
from rlpipe.rollout.embedded.model import Model
from rlpipe.spec.sampling import sample_cdf
from rlpipe.spec.verify import verify_chain
from tests.helpers.cli import ROOT
from tests.helpers.driven_engine import driven_engine
from tests.helpers.engines import request
from tests.helpers.kernel_cases import random_case
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.verification_law import PremiseBroken, Process, emitted_law
from tests.helpers.wrong_verifiers import CHAIN_MUTANTS

pytestmark = pytest.mark.unit
HAS_KERNELS = torch.cpu._is_avx512_supported()
AVX512 = ["-march=skylake-avx512"]


def _in_software(instructions: str) -> list[str]:
    return [*AVX512, "-include", str(ROOT / "tests" / "helpers" / f"{instructions}_in_software.h")]


HAS_BF16, HAS_AMX = torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()
FLAGS = {
    "avx512": AVX512,
    "bf16": ["-march=cooperlake"] if HAS_BF16 else _in_software("bf16"),
    "amx": ["-march=sapphirerapids"] if HAS_AMX else _in_software("amx"),
}
ROUNDING = 2**-8  # relative, of bfloat16


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> dict[str, cpu_kernels.Kernels]:
    """The kernels for each kind of CPU."""
    folder, made = tmp_path_factory.mktemp("kernels"), {}
    for name, flags in FLAGS.items():
        path = folder / f"{name}.so"
        cpu_kernels._compile(path, flags)
        made[name] = cpu_kernels.Kernels(ctypes.CDLL(str(path)))
    return made


@pytest.fixture(params=FLAGS)
def compiled(request, monkeypatch):
    """Let the engine use the kernels for one kind of CPU."""
    if not HAS_KERNELS:
        pytest.skip("this CPU has no AVX-512")
    library = request.getfixturevalue("libraries")[request.param]
    monkeypatch.setattr(cpu_kernels, "kernels", lambda: library)


with_kernels = pytest.mark.usefixtures("compiled")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _assert_rounded_once(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Allow the error of one rounding, and the float32 error of a sum."""
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), exact, rtol=ROUNDING, atol=1e-4)


@with_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (50, 64), (96, 576), (71, 1536)])
def test_products_equal_float32(outputs, inputs, threads):
    weight, bias = HugePages().copy(_random(outputs, inputs)), _random(outputs, seed=1)
    with _threads(threads):
        for rows in (1, 2, 15, 16, 17, 31, 32, 33, 48, 50, cpu_kernels.MANY_ROWS, 300):
            x = _random(rows, inputs, seed=rows)
            for added in (None, bias):
                ours = cpu_kernels.kernels().linear(x, weight, added)
                _assert_rounded_once(
                    ours, F.linear(x.float(), weight.float(), added if added is None else added.float())
                )


@with_kernels
def test_a_row_does_not_depend_on_the_rows_beside_it():
    weight, x = _random(64, 96), _random(40, 96, seed=1)
    every = cpu_kernels.kernels().linear(x, weight, None)
    for row in (0, 17, 39):
        assert torch.equal(cpu_kernels.kernels().linear(x[row : row + 1], weight, None)[0], every[row])


@with_kernels
@pytest.mark.parametrize("rows", [1, 40])
def test_norm_and_gate_equal_float32(rows):
    x, weight = _random(rows, 576) * 3, _random(576, seed=1)
    exact = F.rms_norm(x.float(), (576,), weight.float(), 1e-5)
    _assert_rounded_once(cpu_kernels.kernels().rms_norm(x, weight, 1e-5), exact)

    both = torch.cat((_random(rows, 512) * 8, _random(rows, 512, seed=2)), -1)
    both[0, :4] = torch.tensor([0.0, -90.0, 90.0, -3e38])
    gate, up = both.float().chunk(2, -1)
    _assert_rounded_once(cpu_kernels.kernels().gate(both), F.silu(gate) * up)


@with_kernels
@pytest.mark.parametrize("partial", [False, True])
def test_keys_and_values_are_rotated_and_stored(partial):
    rows, heads, kv_heads, size = 5, 4, 2, 64
    qkv, cache = _random(rows, heads + 2 * kv_heads, size), torch.zeros(40, size, dtype=torch.bfloat16)
    width = 32 if partial else size
    angles = torch.rand(rows, 1, width // 2, generator=torch.Generator().manual_seed(1)) * 6
    rotation = torch.polar(torch.ones_like(angles), angles)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(2))[: rows * 2 * kv_heads]

    exact = qkv.float()
    turned = torch.view_as_complex(exact[:, :6, :width].unflatten(-1, (-1, 2)).contiguous()) * rotation
    exact[:, :6, :width] = torch.view_as_real(turned).flatten(-2)
    cpu_kernels.kernels().rotate_and_store(qkv, rotation, slots, cache, heads=heads, turned=heads + kv_heads)
    _assert_rounded_once(qkv, exact)
    assert torch.equal(cache[slots], qkv[:, heads:].reshape(-1, size))
    assert (cache != 0).any(1).sum() == len(slots)


@with_kernels
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("width", [1, 2, 8, 37])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_attention_equals_float32(size, width, group):
    """Rows of unlike lengths, with slots in the middle that are hidden, and NaN beyond what a row reads."""
    kv_heads, contexts = 2, torch.tensor([40, 17, 33, 16])
    cache = _random(2, 4, kv_heads, 50, size)
    for row, context in enumerate(contexts.tolist()):
        cache[:, row, :, context:] = float("nan")
    keys, values = cache[0, :, :, :40], cache[1, :, :, :40]
    every = _random(4 * width, kv_heads * (group + 2), size, seed=1)
    query = every[:, : kv_heads * group]

    seen = torch.rand(4, width, 40, generator=torch.Generator().manual_seed(2)) < 0.7
    seen[..., 0] = True
    seen &= torch.arange(40) < contexts[:, None, None]
    mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    ours = cpu_kernels.kernels().attend(query, keys, values, mask=mask, contexts=contexts, scale=0.2)

    scores = torch.einsum(
        "bqhgd,bhld->bhgql", query.float().view(4, width, kv_heads, group, size), keys.float()
    )
    weights = (0.2 * scores).masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    exact = torch.einsum("bhgql,bhld->bqhgd", weights, values.float().nan_to_num())
    torch.testing.assert_close(ours.float(), exact.reshape(4 * width, -1), rtol=2 * ROUNDING, atol=2e-3)


@with_kernels
def test_a_nan_is_not_hidden():
    cache, query = _random(2, 1, 1, 20, 32), _random(1, 2, 32, seed=1)
    cache[0, 0, 0, 5] = float("nan")  # a key
    limits = {"mask": torch.zeros(1, 1, 20), "contexts": torch.tensor([20]), "scale": 1.0}
    assert cpu_kernels.kernels().attend(query, cache[0], cache[1], **limits).isnan().all()
    assert cpu_kernels.kernels().gate(torch.full((1, 64), float("nan"), dtype=torch.bfloat16)).isnan().all()


@with_kernels
@pytest.mark.parametrize("temperatures", [None, [0.7, 1.0, 3.0]])
@pytest.mark.parametrize("vocab", [16, 4112])
def test_distributions_equal_float64(vocab, temperatures):
    logits = _random(3, vocab) * torch.tensor([1.0, 8.0, 100.0]).bfloat16()[:, None]
    divisor = None if temperatures is None else torch.tensor(temperatures)
    log_p, p, entropies = cpu_kernels.kernels().distributions(logits, divisor)
    scaled = logits.double() / (1.0 if divisor is None else divisor.double()[:, None])
    exact = scaled.log_softmax(-1)
    torch.testing.assert_close(log_p.double(), exact, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(p.double(), exact.exp(), rtol=2e-5, atol=1e-12)
    torch.testing.assert_close(entropies.double(), -(exact.exp() * exact).sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(cpu_kernels.kernels().softmax(logits, divisor), p)
    second = None if divisor is None else divisor[1:2]
    assert torch.equal(cpu_kernels.kernels().softmax(logits[1:2], second)[0], p[1])


@with_kernels
@pytest.mark.parametrize("vocab", [16, 1024, 3088])
def test_both_ends_of_every_interval_of_a_cdf_give_its_token(vocab):
    """A third of the tokens has no weight, the first and last ones too."""
    weights = torch.rand(vocab, generator=torch.Generator().manual_seed(0)) + 0.01
    weights[::3] = 0
    weights[-2:] = 0
    cdf, tokens = weights.double().cumsum(0) / weights.double().sum(), weights.nonzero().flatten()
    starts = torch.cat((torch.zeros(1, dtype=torch.float64), cdf[tokens[:-1]] + 1e-11))
    for uniforms in (starts, cdf[tokens] - 1e-11):
        rows = weights.expand(len(tokens), -1)
        assert torch.equal(cpu_kernels.kernels().sample(rows, uniforms), tokens)
        assert torch.equal(cpu_kernels.kernels().sample(rows, uniforms), sample_cdf(rows, uniforms))
    ends = torch.tensor([1.0, 1 - 2**-53], dtype=torch.float64)
    assert cpu_kernels.kernels().sample(weights.expand(2, -1), ends).tolist() == [tokens[-1]] * 2


@with_kernels
def test_a_nan_among_logits_or_weights_is_not_hidden():
    logits = _random(1, 64)
    logits[0, 5] = float("nan")
    assert all(column.isnan().all() for column in cpu_kernels.kernels().distributions(logits, None))
    weights = torch.ones(1, 2048)
    weights[0, 1500] = float("nan")
    for bad in (weights, torch.zeros(1, 16)):
        with pytest.raises(RuntimeError, match="1 distributions have no mass or a NaN"):
            cpu_kernels.kernels().sample(bad, torch.tensor([0.1], dtype=torch.float64))


def _chain(drafts, q, p, coins, residual, *, ids=None):
    """Verify with the kernel: the vocabulary is padded to a multiple of 16, and q restricted to `ids`."""
    p, q = F.pad(p.float(), (0, -p.shape[-1] % 16)), q.float()
    if ids is None:
        q = F.pad(q, (0, p.shape[-1] - q.shape[-1]))
    else:
        q, drafts = q[..., ids].contiguous(), torch.searchsorted(ids, drafts).clamp(max=len(ids) - 1)
    return cpu_kernels.kernels().verify_chain(drafts, q, p, coins, residual, ids=ids)


def _dyadic(vocab: int, depths: int, seed: int, among: list[int] | None = None) -> Process:
    """Laws of multiples of 1/64, with which the kernel's float32 computes exactly; some tokens have none."""
    generator, probs = torch.Generator().manual_seed(seed), []
    for depth in range(depths):
        shape = [vocab] * depth
        weights = (
            torch.ones(vocab) if among is None else torch.zeros(vocab).index_fill_(0, torch.tensor(among), 1)
        )
        weights = weights.expand(*shape, vocab).reshape(-1, vocab) * torch.rand(vocab, generator=generator)
        drawn = torch.multinomial(weights, 64, replacement=True, generator=generator)
        probs.append(F.one_hot(drawn, vocab).sum(1).double().div(64).view(*shape, vocab))
    return Process(probs)


@with_kernels
@pytest.mark.parametrize(("vocab", "gamma"), [(5, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("reduced", [False, True])
def test_the_chain_kernel_emits_exactly_the_joint_law_of_the_target(vocab, gamma, reduced):
    """reduced: the draft can propose only some tokens."""
    ids = torch.tensor([0, 2]) if reduced else None
    target, draft = _dyadic(vocab, gamma + 1, 1), _dyadic(vocab, gamma, 2, [0, 2] if reduced else None)
    joint = draft.joint(gamma)
    law = emitted_law(partial(_chain, ids=ids), target, draft, lambda drafts: joint[tuple(drafts.T)])
    assert (law - target.joint(gamma + 1)).abs().max() < 1e-12


@with_kernels
@pytest.mark.parametrize("mutant", sorted(CHAIN_MUTANTS.keys() - {"bfloat16_q"}))
def test_the_exact_law_catches_a_wrong_rule_with_these_laws(mutant):
    """But for one that rounds to bfloat16, which holds multiples of 1/64."""
    target, draft = _dyadic(3, 3, 1), _dyadic(3, 2, 2)
    joint = draft.joint(2)
    try:
        law = emitted_law(CHAIN_MUTANTS[mutant], target, draft, lambda drafts: joint[tuple(drafts.T)])
    except PremiseBroken:
        return
    assert (law - target.joint(3)).abs().max() > 1e-4


@with_kernels
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("batch", "gamma", "vocab"), [(200, 3, 64), (7, 2, 4112)])
def test_the_chain_kernel_gives_the_verdicts_of_torch(batch, gamma, vocab, reduced):
    case, ids = random_case(batch, gamma, vocab), None
    case.residual_uniforms = (torch.arange(batch, dtype=torch.float64) + 0.5) / batch  # off ties
    case.accept_uniforms[0] = 0.0  # all accepted
    if reduced:
        ids = torch.arange(1, vocab, 3)
        inside = torch.zeros(vocab).index_fill_(0, ids, 1)
        case.draft_probs = case.draft_probs * inside
        case.draft_probs /= case.draft_probs.sum(-1, keepdim=True)
        case.draft_tokens = case.draft_probs.argmax(-1)
    ours, wanted = (
        _chain(*case.arguments("verify_chain"), ids=ids),
        verify_chain(*case.arguments("verify_chain")),
    )
    assert torch.equal(ours.num_accepted, wanted.num_accepted) and wanted.num_accepted.unique().numel() > 1
    assert torch.equal(ours.next_token, wanted.next_token)
    assert torch.equal(ours.accept_prob, wanted.accept_prob)


@with_kernels
@pytest.mark.parametrize(("p", "q"), [(0.5, float("nan")), (float("nan"), 0.5), (0.5, 0.0), (0.0, 0.5)])
def test_the_chain_kernel_gives_the_verdicts_of_torch_at_the_ends(p, q):
    """NaN is never accepted, nor p = 0; a residual without mass falls back to the target."""
    rest = (1 - p if p == p else 0.5) / 15
    target = torch.full((1, 2, 16), rest)
    target[0, 0, 0] = p
    draft = torch.full((1, 1, 16), rest)
    draft[0, 0, 0] = q
    for coin in (0.0, 0.5, 1.0):
        coins, residual = torch.full((1, 1), coin).double(), torch.tensor([0.9], dtype=torch.float64)
        arguments = torch.zeros(1, 1, dtype=torch.int64), draft, target, coins, residual
        if p != p:
            with pytest.raises(RuntimeError, match="1 distributions"):
                _chain(*arguments)
            continue
        ours, wanted = _chain(*arguments), verify_chain(*arguments)
        assert torch.equal(ours.num_accepted, wanted.num_accepted)
        assert torch.equal(ours.accept_prob, wanted.accept_prob)
        assert torch.equal(ours.next_token, wanted.next_token)


FAMILIES = {
    "grouped heads": {"family": "llama"},
    "biases": {"family": "qwen2"},
    "normed queries and keys": {"family": "qwen3"},
    "experts": {"family": "qwen3_moe"},
    "latent attention": {"family": "deepseek_v3"},
    "a draft": {"family": "mimo", "tie": True},
}


@with_kernels
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_a_model_is_as_close_to_float32_as_with_the_kernels_of_torch(tmp_path, monkeypatch, name):
    """Prefill, single tokens, several tokens, and a pass that joins rows of both kinds.

    With experts the median over tokens, because rounding can change the experts of one.
    """
    sizes = {"hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 96, "dtype": torch.bfloat16}
    path = write_random_checkpoint(tmp_path, **{"head_dim": 32} | FAMILIES[name] | sizes)
    exact = _states(path, torch.float32)
    ours = _states(path, torch.bfloat16)
    monkeypatch.setattr(cpu_kernels, "kernels", lambda: None)
    torchs = _states(path, torch.bfloat16)
    for own, other, true in zip(ours, torchs, exact, strict=True):
        error, usual = ((x.float() - true).square().mean(-1) for x in (own, other))
        error, usual = ((x.median() if name == "experts" else x.mean()).sqrt() for x in (error, usual))
        assert error < 1.3 * usual + 1e-3
        assert error < 0.2 * true.square().mean().sqrt()


@with_kernels
@torch.inference_mode()
def test_verifying_several_tokens_computes_the_bits_of_one_after_the_other(tmp_path):
    """So a draft changes no distribution, not even by rounding."""
    path = write_random_checkpoint(tmp_path, "llama", hidden=128, head_dim=32, dtype=torch.bfloat16)
    arch, tokens = read_architecture(read_config(path)), torch.arange(3 * 14).view(3, 14)
    states = []
    for widths in ([1] * 14, [1, 4, 8, 1], [3, 3, 8]):
        model = Model(
            arch,
            read_weights(path),
            mtp=0,
            rows=3,
            slots=20,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
        )
        start, parts = 0, []
        for width in widths:
            positions = torch.arange(start, start + width).expand(3, width)
            hidden = model.forward(tokens[:, start : start + width].flatten(), [model.span(0, positions, 14)])
            parts.append(model.logits(hidden).view(3, width, -1))
            start += width
        states.append(torch.cat(parts, 1))
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


@with_kernels
@pytest.mark.parametrize("reduced", [False, True])
def test_greedy_turns_with_drafts_are_those_without_to_the_last_bit(tmp_path, reduced):
    """reduced: the draft can propose a third of the tokens."""
    sizes = {"hidden": 128, "head_dim": 32, "layers": 3, "dtype": torch.bfloat16}
    path, table = write_random_checkpoint(tmp_path / "model", **sizes), tmp_path / "table.json"
    write_table(table, list(range(0, 64, 3)))
    prompts, turns = [[5, 9, 33, 2, 17], [60, 3, 3, 41, 8, 11, 29, 7], [12, 50]], []
    for mode in ("none", "rejection"):
        drafts = {"draft_vocab": table} if reduced and mode != "none" else {}
        with driven_engine(path, mode, dtype="bfloat16", **drafts) as driven:
            asked = [request(i, p, max_new_tokens=60, temperature=0.0) for i, p in enumerate(prompts)]
            turns.append(driven.generate(*asked))  # which joins them in one step
    assert any(sum(turn.spec.accepted) for turn in turns[1])
    for plain, drafted in zip(*turns, strict=True):
        assert plain.output_ids.tolist() == drafted.output_ids.tolist()
        assert plain.logprobs.tobytes() == drafted.logprobs.tobytes()
        assert plain.entropies.tobytes() == drafted.entropies.tobytes()


@with_kernels
@pytest.mark.parametrize("count, gamma, reduced", [(1, 1, False), (1, 4, True), (4, 2, False), (40, 3, True)])
def test_a_chain_in_one_call_is_the_chain_of_single_calls_to_the_last_bit(
    tmp_path, monkeypatch, count, gamma, reduced
):
    """Prompts of several lengths, several temperatures. reduced: the draft can propose half of the tokens."""
    sizes = {"hidden": 128, "head_dim": 32, "layers": 3, "vocab": 96, "dtype": torch.bfloat16}
    path, table = write_random_checkpoint(tmp_path / "model", **sizes), tmp_path / "table.json"
    write_table(table, list(range(0, 96, 2 if reduced else 1)))
    prompts = [[(7 * i + k) % 96 for k in range(2 + i % 5)] for i in range(count)]
    whole, calls, turns = Model.draft_chain, [], []

    def at_once(*args, **options):
        calls.append(whole(*args, **options))
        return calls[-1]

    for chain in (at_once, lambda *_, **__: None):
        monkeypatch.setattr(Model, "draft_chain", chain)
        with driven_engine(
            path, dtype="bfloat16", gamma=gamma, draft_vocab=table if reduced else "", max_running=count
        ) as driven:
            temperatures = [1.0, 0.7, 0.0, 1.3]
            asked = [
                request(i, p, max_new_tokens=40, temperature=temperatures[i % 4])
                for i, p in enumerate(prompts)
            ]
            turns.append(driven.generate(*asked))

    assert calls and all(call is not None for call in calls)
    assert any(sum(turn.spec.accepted) for turn in turns[0])
    for ours, wanted in zip(*turns, strict=True):
        assert ours.output_ids.tolist() == wanted.output_ids.tolist()
        assert ours.logprobs.tobytes() == wanted.logprobs.tobytes()
        assert ours.spec == wanted.spec


def _states(path, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the logits of target and draft in a few passes."""
    arch = read_architecture(read_config(path))
    drafts = arch.mtp_layers > 0
    model = Model(
        arch, read_weights(path), mtp=drafts, rows=4, slots=80, device=torch.device("cpu"), dtype=dtype
    )
    tokens = torch.randint(0, 64, (3, 60), generator=torch.Generator().manual_seed(0))
    lengths, states = torch.tensor([20, 9, 14]), []

    def run(width: int, *, alone: bool = True) -> None:
        positions = lengths[:, None] + torch.arange(width)
        spans = [model.span(0, positions, (lengths + width).numpy(), decoding=True)]
        given = tokens.gather(1, positions).flatten()
        if not alone:
            spans.append(model.span(3, torch.arange(30)[None], 30))
            given = torch.cat((given, tokens[0, :30]))
        hidden = model.forward(given, spans)
        states.append(model.logits(hidden))
        if drafts:
            selects = [torch.full((span.batch,), span.width - 1) for span in spans]
            states.append(model.draft_logits(model.draft(given, hidden, spans, selects)))
            states.append(model.draft_logits(model.draft(given, hidden, spans)))
        lengths.add_(width)

    model.forward(tokens[:, :20].flatten(), [model.span(0, torch.arange(20).expand(3, 20), 20)])
    for width in (1, 1, 3, 8, 1):
        run(width)
    run(2, alone=False)
    return states


def test_without_a_compiler_the_engine_says_so_and_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    with caplog.at_level(logging.WARNING):
        assert cpu_kernels.kernels.__wrapped__() is None
    assert "no-such-compiler" in caplog.text

    monkeypatch.setenv("CC", "false")
    assert cpu_kernels.kernels.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("shape", [(3, 5), (1,), (4096, 5000)])
def test_memory_in_huge_pages_is_zeroed_and_aligned(shape):
    pages, tensors = HugePages(), []
    for value in range(3):
        tensor = pages.zeros(*shape, dtype=torch.bfloat16)
        assert tensor.shape == shape and not tensor.any() and tensor.data_ptr() % 64 == 0
        tensors.append(tensor.fill_(value))
    assert [bool((tensor == value).all()) for value, tensor in enumerate(tensors)] == [True] * 3
    assert torch.equal(pages.copy(torch.arange(6).view(2, 3).T), torch.arange(6).view(2, 3).T)


@with_kernels
def test_threads_that_end_leave_no_memory_behind():
    """The engine ends the threads of torch whenever it is idle; so the kernels keep nothing for them."""
    kernels, query, cache = cpu_kernels.kernels(), _random(16, 16, 32), _random(2, 16, 1, 4096, 32)
    limits = {"mask": torch.zeros(16, 1, 4096), "contexts": torch.full((16,), 4096), "scale": 1.0}

    def resident_after(rounds: int) -> int:
        for _ in range(rounds):
            kernels.attend(query, cache[0], cache[1], **limits)
            release_threads()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with _threads(2):
        before = resident_after(20)
        assert resident_after(100) - before < 8 << 20  # where each time one thread left its scores: 26 MB
