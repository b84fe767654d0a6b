"""The Triton kernels against the torch reference: interpreted on the CPU, compiled where a GPU is there.

Uniforms are chosen, not sampled, wherever a boundary can be hit; ties are judged as `launch.py` states.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from rlpipe.rollout.embedded import drafting
from rlpipe.spec import kernels, verify
from rlpipe.spec.kernels import launch
from rlpipe.spec.sampling import sample_cdf
from tests.helpers.engines import generate, request, running_engine
from tests.helpers.kernel_cases import (
    EDGE,
    RULES,
    Case,
    assert_equal_to_reference,
    lattice,
    random_case,
)
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.integration
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def runnable_kernels():
    """Fail with the remedy, not with sixty tracebacks, where triton was imported uninterpreted."""
    try:
        launch._programs(torch.device(DEVICE))
    except RuntimeError as error:
        pytest.fail(str(error))


def judge(rule, case):
    return getattr(kernels, rule)(*case.map(lambda x: x.to(DEVICE)).arguments(rule))


def two_rows(weights, draft, token, coin, residual_uniforms):
    """One draft per residual uniform; both target rows are `weights` [V], the draft's row is `draft` [V]."""
    batch, vocab = len(residual_uniforms), len(weights)
    return Case(
        draft_tokens=torch.full((batch, 1), token),
        draft_probs=draft.expand(batch, 1, vocab),
        target_probs=weights.expand(batch, 2, vocab),
        accept_uniforms=torch.full((batch, 1), coin, dtype=torch.float64),
        residual_uniforms=residual_uniforms,
    )


def one_hot(vocab, token):
    return torch.nn.functional.one_hot(torch.tensor(token), vocab).float()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("vocab", [1, 7, 257, 4097])
def test_verdicts_equal_the_reference(rule, gamma, vocab):
    case = random_case(5, gamma, vocab, seed=vocab + gamma, zeros=0.1 if vocab > 1 else 0.0)
    assert_equal_to_reference(rule, case, DEVICE)


@pytest.mark.parametrize("rule", RULES)
def test_verdicts_equal_the_reference_at_a_production_vocabulary(rule):
    case = random_case(2, 2, 151_936, padding=267)
    case.accept_uniforms[1] = 0.0  # the bonus row, once
    assert_equal_to_reference(rule, case, DEVICE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "padding"), [(7, 0), (7, 2), (257, 0), (4097, 0), (4097, 1030)])
def test_a_lattice_of_uniforms_gives_each_token_its_interval(rule, vocab, padding):
    """Both ends of the intervals of tokens at the edges of tiles, of the vocabulary, and between."""
    row = random_case(1, 1, vocab, zeros=0.2, padding=padding).target_probs[0, 0]
    near = [0, 1, 2, 3, 1022, 1023, 1024, 1025, 3071, 3072, 4095, 4096, vocab - 1, vocab - padding - 1]
    tokens = torch.tensor(sorted({t for t in near if t < vocab and row[t] > 1e-7}))
    uniforms, expected = lattice(row, tokens)
    bonus = two_rows(row, one_hot(vocab, vocab // 2), vocab // 2, 0.0, uniforms)
    ours = assert_equal_to_reference(rule, bonus, DEVICE)
    assert ours.num_accepted.tolist() == [1] * len(uniforms)
    assert ours.next_token.tolist() == expected.tolist()

    residual = row.clone()
    residual[vocab // 2] = 0.0  # what both a one-hot draft and target-only leave
    tokens = tokens[residual[tokens] > 0]
    uniforms, expected = lattice(residual, tokens)
    rejected = two_rows(row, one_hot(vocab, vocab // 2), vocab // 2, 1.0, uniforms)
    ours = assert_equal_to_reference(rule, rejected, DEVICE)
    assert ours.num_accepted.tolist() == [0] * len(uniforms)
    assert ours.next_token.tolist() == expected.tolist()


def test_every_token_of_a_large_vocabulary_has_its_own_interval():
    """Uniforms of 24 bits, or sums in float32, are off by more than the steps this takes."""
    vocab = 151_936
    row = torch.full((vocab,), 1 / vocab)
    uniforms, expected = lattice(row, torch.tensor([75_967, 151_935]))
    case = two_rows(row, row, 0, 0.0, uniforms)
    assert judge("verify_chain", case).next_token.tolist() == expected.tolist()


@pytest.mark.parametrize("rule", RULES)
def test_a_tie_gives_one_of_the_two_neighbours(rule):
    row = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5, 0.0])
    case = two_rows(row, row, 1, 0.0, torch.tensor([0.25, 0.5], dtype=torch.float64))
    first, second = judge(rule, case).next_token.tolist()
    assert first in (1, 3)
    assert second in (3, 4)


@pytest.mark.parametrize("rule", RULES)
def test_extreme_uniforms_give_the_first_and_the_last_token_of_positive_weight(rule):
    row = random_case(1, 1, 4097, zeros=0.0).target_probs[0, 0]
    row[:5], row[3000:] = 0.0, 0.0
    uniforms = torch.tensor([0.0, 1 - EDGE, 1.0], dtype=torch.float64)
    ours = judge(rule, two_rows(row, one_hot(4097, 9), 9, 0.0, uniforms))
    assert ours.next_token.tolist() == [5, 2999, 2999]
    ours = judge(rule, two_rows(row, one_hot(4097, 2999), 2999, 1.0, uniforms))
    assert ours.next_token.tolist() == [5, 2998, 2998]


@pytest.mark.parametrize("rule", RULES)
def test_coins_next_to_the_ratio_are_judged_exactly(rule):
    """gamma = 1, where all rules compare u * q with p: the coin just below, at and just above p / q."""
    case = random_case(8, 1, 7, seed=5, zeros=0.0)
    p = case.target_probs[:, :1].gather(2, case.draft_tokens[..., None])[..., 0].double()
    q = case.draft_probs.gather(2, case.draft_tokens[..., None])[..., 0].double()
    ratio = p if rule == "verify_target_only" else p / q
    for coin in (ratio.nextafter(torch.zeros_like(p)), ratio, ratio.nextafter(torch.full_like(p, 9))):
        assert_equal_to_reference(rule, case.with_(accept_uniforms=coin), DEVICE)
    below = judge(rule, case.with_(accept_uniforms=ratio * (1 - 1e-15)))
    assert below.num_accepted.tolist() == [1] * 8


def test_coins_next_to_a_blocks_threshold_are_judged_as_stated():
    """Depths between the first and the last accept below h = A / (A + 1 - w), found by bisection."""
    case = random_case(12, 3, 257, seed=3)
    inner = [case.accept_uniforms.clone() for _ in range(2)]
    for depth in (0, 1):
        low, high = torch.zeros(12, dtype=torch.float64), torch.ones(12, dtype=torch.float64)
        for _ in range(53):
            coins = torch.ones(12, 3, dtype=torch.float64)
            coins[:, depth] = (low + high) / 2
            verdict = verify.verify_block(*case.with_(accept_uniforms=coins).arguments("verify_block"))
            passed = verdict.num_accepted == depth + 1
            low, high = torch.where(passed, coins[:, depth], low), torch.where(passed, high, coins[:, depth])
        assert ((low > 0.01) & (low < 0.99)).sum() >= 2  # the test is about real thresholds
        for coins, factor in zip(inner, (1 - 1e-9, 1 + 1e-9), strict=True):
            coins[:, depth] = low * factor
    for coins in inner:
        coins[:, 2] = 1.0
        assert_equal_to_reference("verify_block", case.with_(accept_uniforms=coins), DEVICE)


@pytest.mark.parametrize("rule", RULES)
def test_a_zero_coin_does_not_accept_a_token_of_probability_zero(rule):
    row = torch.tensor([0.0, 0.5, 0.5])
    half = torch.tensor([0.6], dtype=torch.float64)
    for draft in (one_hot(3, 0), one_hot(3, 1)):  # q = 1, then q = 0 at the draft
        ours = assert_equal_to_reference(rule, two_rows(row, draft, 0, 0.0, half), DEVICE)
        assert ours.num_accepted.item() == 0
        assert ours.accept_prob.item() == 0.0


@pytest.mark.parametrize("rule", ["verify_chain", "verify_block"])
def test_a_draft_that_its_own_distribution_forbids_is_accepted_where_the_target_allows_it(rule):
    case = two_rows(
        torch.tensor([0.5, 0.5]), one_hot(2, 1), 0, 1 - EDGE, torch.tensor([0.3], dtype=torch.float64)
    )
    ours = assert_equal_to_reference(rule, case, DEVICE)
    assert (ours.num_accepted.item(), ours.accept_prob.item()) == (1, 1.0)


@pytest.mark.parametrize("rule", RULES)
def test_a_residual_without_mass_falls_back_to_the_target(rule):
    """A coin of 1 rejects although p = q, or although the target allows nothing else."""
    row = one_hot(300, 77) if rule == "verify_target_only" else random_case(1, 1, 300).target_probs[0, 0]
    uniforms = torch.tensor([0.1, 0.75, 1 - EDGE], dtype=torch.float64)
    ours = assert_equal_to_reference(rule, two_rows(row, row, 77, 1.0, uniforms), DEVICE)
    assert ours.num_accepted.tolist() == [0, 0, 0]
    assert row[ours.next_token.cpu()].min() > 0


@pytest.mark.parametrize("rule", RULES)
def test_only_the_first_rejected_row_is_resampled(rule):
    """All other rows are NaN outside the drafts; the first draft passes and the second is forbidden."""
    case = random_case(4, 3, 40, zeros=0.0)
    case.draft_tokens[:] = torch.tensor([3, 5, 7])
    case.accept_uniforms[:] = torch.tensor([0.0, 0.5, 0.0])
    draft, target = case.draft_probs, case.target_probs
    target[:, 1, 5] = 0.0
    alone = Case(
        draft_tokens=case.draft_tokens[:, 1:2],
        draft_probs=draft[:, 1:2].clone(),
        target_probs=target[:, 1:3].clone(),
        accept_uniforms=case.accept_uniforms[:, 1:2],
        residual_uniforms=case.residual_uniforms,
    )
    for row, token in ((0, 3), (2, 7)):
        draft[:, row], target[:, row] = float("nan"), float("nan")
        draft[:, row, token], target[:, row, token] = 0.01, 0.99
    target[:, 3] = float("nan")
    ours, wanted = judge(rule, case), getattr(verify, rule)(*alone.arguments(rule))
    assert ours.num_accepted.tolist() == [1] * 4
    assert ours.next_token.tolist() == wanted.next_token.tolist()


@pytest.mark.parametrize("rule", RULES)
def test_nan_is_never_accepted_and_never_a_token_outside_the_vocabulary(rule):
    case = random_case(3, 3, 2050)
    nan = float("nan")
    ours = judge(rule, case.with_(draft_probs=case.draft_probs * nan, target_probs=case.target_probs * nan))
    assert ours.num_accepted.tolist() == [0, 0, 0]
    assert ours.accept_prob.tolist() == [[0.0] * 3] * 3
    assert ours.next_token.tolist() == [0, 0, 0]
    some = case.target_probs.clone()
    some[:, :, ::3] = nan
    ours = judge(rule, case.with_(target_probs=some))
    rows = some[torch.arange(3), ours.num_accepted.cpu()]
    assert (rows[torch.arange(3), ours.next_token.cpu()] > 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_strided_probabilities_are_read_where_they_are(rule):
    case = random_case(4, 3, 257)

    def strided(probs):
        padded = torch.full((257 + 3, probs.shape[1] + 2, 2 * len(probs)), 9.0)
        view = padded.permute(2, 1, 0)[::2, 1:-1, 2:-1]
        return view.copy_(probs)

    views = case.with_(
        draft_probs=strided(case.draft_probs),
        target_probs=strided(case.target_probs),
        accept_uniforms=case.accept_uniforms.T.contiguous().T,
        draft_tokens=case.draft_tokens.T.contiguous().T,
    )
    assert not views.target_probs.is_contiguous()
    ours, plain = judge(rule, views), judge(rule, case)
    for name in ("num_accepted", "next_token", "accept_prob"):
        assert torch.equal(getattr(ours, name), getattr(plain, name))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_types_are_taken_at_their_exact_values_and_doubles_stay_doubles(rule, dtype):
    case = random_case(8, 3, 257, seed=2)
    probs = {name: getattr(case, name).to(dtype) for name in ("draft_probs", "target_probs")}
    exact = {name: value if dtype == torch.float64 else value.float() for name, value in probs.items()}
    wanted = getattr(verify, rule)(*case.with_(**exact).arguments(rule))
    ours = judge(rule, case.with_(**probs))
    assert ours.accept_prob.dtype == wanted.accept_prob.dtype
    for name in ("num_accepted", "next_token", "accept_prob"):
        assert torch.equal(getattr(ours, name).cpu(), getattr(wanted, name))


@pytest.mark.parametrize("rule", RULES)
def test_a_verdict_depends_neither_on_the_run_nor_on_the_batch_around_it(rule, monkeypatch):
    case = random_case(5, 3, 4097, seed=4)
    first, second = judge(rule, case), judge(rule, case)
    alone = judge(rule, case.map(lambda x: x[4:5]))
    monkeypatch.setattr(launch, "_span", lambda *_, **__: 2)
    other_grid = judge(rule, case)
    for name in ("num_accepted", "next_token", "accept_prob"):
        whole = getattr(first, name)
        assert torch.equal(whole, getattr(second, name))
        assert torch.equal(whole[4:5], getattr(alone, name))
        assert torch.equal(whole, getattr(other_grid, name))


@pytest.mark.parametrize("rule", RULES)
def test_without_drafts_the_bonus_row_is_sampled_and_an_empty_batch_gives_empty_verdicts(rule):
    case = random_case(6, 1, 257)
    bare = case.map(lambda x: x[:, :0] if x.dim() > 1 else x).with_(target_probs=case.target_probs[:, 1:])
    ours = judge(rule, bare)
    assert ours.num_accepted.tolist() == [0] * 6
    assert ours.accept_prob.shape == (6, 0)
    wanted = sample_cdf(case.target_probs[:, 1], case.residual_uniforms)
    assert ours.next_token.tolist() == wanted.tolist()
    empty = judge(rule, case.map(lambda x: x[:0]))
    assert (empty.num_accepted.shape, empty.next_token.shape, empty.accept_prob.shape) == ((0,), (0,), (0, 1))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("token", [-1, 257, 2**40])
def test_a_draft_outside_the_vocabulary_is_rejected(rule, token):
    case = random_case(2, 3, 257)
    case.draft_tokens[:, 0] = token
    ours = judge(rule, case.with_(accept_uniforms=torch.zeros(2, 3, dtype=torch.float64)))
    assert ours.num_accepted.tolist() == [0, 0]
    assert ((ours.next_token >= 0) & (ours.next_token < 257)).all()


# One planted bug each: the rule whose test must fail, and the change to the kernels' source.
CHAIN, BLOCK, TARGET_ONLY = RULES
MUTANTS = {
    "the token is one too far in its tile": (CHAIN, "TILE + _first_beyond(", "TILE + 1 + _first_beyond("),
    "the mass of earlier tiles is not subtracted": (CHAIN, "goal -= tl.sum(", "goal -= 0 * tl.sum("),
    "the tile's own mass is subtracted": (CHAIN, "slot == tile - 1, running", "slot == tile, running"),
    "sums in single precision": (CHAIN, "rest, 0.0).to(tl.float64)", "rest, 0.0).to(tl.float32)"),
    "a coin at the ratio accepts": (CHAIN, "tl.float64) < p.to(", "tl.float64) <= p.to("),
    "coins in single precision": (CHAIN, "~(coin * q.to(tl.float64)", "~(coin.to(tl.float32) * q"),
    "no fallback to the target": (CHAIN, "tl.where(empty, whole_mass, rest_mass)", "rest_mass"),
    "the fallback is the last of the tile": (CHAIN, "mass > 0.0, slot, 0)", "mass > -1, slot, 0)"),
    "the residual is the target": (CHAIN, "rest = p - q", "rest = p"),
    "the rejected draft keeps its mass": (TARGET_ONLY, "tl.where(v == token,", "tl.where(v < 0,"),
    "the bonus lacks the last draft": (
        TARGET_ONLY,
        "GAMMA + accepted, mask=accepted <",
        "GAMMA + tl.minimum(accepted, GAMMA - 1), mask=accepted <=",
    ),
    "the block's residual is not scaled": (BLOCK, "rest = scale.to(COMPUTE) * p", "rest = p"),
    "the block stops at its first rejection": (
        BLOCK,
        "tl.max(tl.where(passed_inner | passed_last, depth + 1, 0), 0)",
        "tl.min(tl.where((passed_inner | passed_last) | (depth >= GAMMA), GAMMA, depth), 0)",
    ),
    "the block forgets deeper weights": (BLOCK, "joint = scale *", "joint = 1.0 *"),
    "the block's mass lacks a tile": (BLOCK, "(slot < TILES), other", "(slot > 0) & (slot < TILES), other"),
}


def mutant_cases():
    """Few rows that together touch all of a kernel's decisions."""
    row = random_case(1, 1, 2050, zeros=0.0).target_probs[0, 0]
    row[2000:] = 0.0
    uniforms, _ = lattice(row, torch.tensor([3, 1023, 1024, 1999]))
    uniforms = torch.cat([uniforms, torch.tensor([1.0], dtype=torch.float64)])
    for coin in (0.5, 0.5 - EDGE):
        yield two_rows(torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5]), 0, coin, uniforms[:1])
    yield two_rows(row, one_hot(2050, 9), 9, 0.0, uniforms)
    yield two_rows(row, row, 9, 1.0, uniforms)
    # A block accepts one draft by the mass of tile 0 alone: w = 1/2, A = 1/2, h = 1/2.
    first, second = 0.5 * one_hot(2050, 0), 0.5 * one_hot(2050, 1)
    yield Case(
        draft_tokens=torch.tensor([[0, 2040]]),
        draft_probs=torch.stack([first + second, one_hot(2050, 2040)])[None],
        target_probs=torch.stack([0.5 * first + 1.5 * second, one_hot(2050, 3), one_hot(2050, 4)])[None],
        accept_uniforms=torch.tensor([[0.25, 0.5]], dtype=torch.float64),
        residual_uniforms=uniforms[:1],
    )
    yield random_case(12, 3, 2050, seed=6)


def differs(rule):
    try:
        for case in mutant_cases():
            assert_equal_to_reference(rule, case, DEVICE)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("rule", RULES)
def test_the_kernels_pass_what_the_mutants_must_fail(rule):
    assert not differs(rule)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_in_the_kernels_is_caught(mutant, tmp_path, monkeypatch):
    rule, old, new = MUTANTS[mutant]
    real, interpreted = launch._programs(torch.device(DEVICE))
    source = Path(real.__file__).read_text()
    assert old in source
    file = tmp_path / "mutant_programs.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant_programs", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(launch, "_programs", lambda _: (module, interpreted))
    assert differs(rule)


def test_kernels_verify_on_a_gpu_and_torch_elsewhere():
    assert [verify.backend_for(torch.device(name)) for name in ("cuda:1", "cpu")] == ["triton", "torch"]


@pytest.mark.parametrize("mode", ["rejection", "block", "target_only"])
def test_the_embedded_engine_generates_the_same_by_kernels(mode, tmp_path, monkeypatch):
    """As on a GPU, interpreted; the counter shows that they ran."""
    path, launched, real = write_random_checkpoint(tmp_path / "model"), [], launch._programs
    monkeypatch.setattr(launch, "_programs", lambda device: launched.append(device) or real(device))
    prompts = [[2, 5, 7], [3, 4, 5, 6]]
    results = []
    for backend in ("torch", "triton"):
        monkeypatch.setattr(drafting, "backend_for", lambda _, backend=backend: backend)
        with running_engine(path, mode, gamma=2) as engine:
            turns = generate(engine, *(request(n, p, max_new_tokens=12) for n, p in enumerate(prompts)))
        results.append([turn.output_ids.tolist() for turn in turns])
        assert bool(launched) == (backend == "triton")
    assert results[0] == results[1]
