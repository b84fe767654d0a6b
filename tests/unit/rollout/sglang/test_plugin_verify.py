"""The plugin's drafts and verification without a server: the exact law, what is kept of q, who judges."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlpipe.spec.verify import Verdict, verify_chain
from tests.helpers.cli import ROOT
from tests.helpers.verification_law import PremiseBroken, Process, emitted_law

pytestmark = pytest.mark.unit
PLUGIN = ROOT / "sglang_env" / "plugin"
TEMPERATURE, ALL = 0.7, 1 << 30
SPEC = {
    "speculative_use_rejection_sampling": True,
    "speculative_use_block_verification": False,
    "enable_multi_layer_eagle": False,
}


@pytest.fixture
def plugin(monkeypatch):
    """Loads a module of the plugin; `spec` are the server's settings of speculation."""
    monkeypatch.syspath_prepend(str(PLUGIN))

    def module(name, **content):
        made = ModuleType(f"sglang{name}")
        made.__dict__.update(content, __path__=[])
        monkeypatch.setitem(sys.modules, made.__name__, made)

    spec = SimpleNamespace(**SPEC)
    group = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    apart = SimpleNamespace(disaggregation_mode="null")
    for name in ("", ".srt", ".srt.layers", ".srt.utils", ".srt.sampling", ".srt.model_executor"):
        module(name)
    module(".srt.sampling.sampling_params", TOP_K_ALL=ALL)
    modes = SimpleNamespace(FULL="full", LAST="last")
    module(".srt.model_executor.forward_batch_info", CaptureHiddenMode=modes)
    module(".srt.speculative", spec_utils=SimpleNamespace(SIMULATE_ACC_LEN=-1))
    contexts = {"get_spec": lambda: spec, "get_parallel": lambda: group, "get_disagg": lambda: apart}
    module(".srt.runtime_context", **contexts)
    module(".srt.layers.dp_attention", is_dp_attention_enabled=lambda: False)
    module(".srt.utils.async_probe", sanitize_nan_logits=lambda logits, _: None)

    def load(name):
        return importlib.import_module(f"rlpipe_sglang.{name}")

    load.spec = spec
    yield load
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        del sys.modules[name]


def judging(verify, given=lambda *arguments: arguments):
    """A verifier of probabilities, as rlpipe's, from one of logits. given: changes what it is called with."""

    def judge(tokens, q, p, coins, uniforms):
        temperatures = torch.full((len(tokens), 1), TEMPERATURE, dtype=torch.float64)
        found = verify(*given(tokens, q.log(), p.log() * TEMPERATURE, temperatures, coins, uniforms))
        last = found.tokens.gather(1, found.accepted[:, None])[:, 0]
        return Verdict(num_accepted=found.accepted, next_token=last, accept_prob=found.p)

    return judge


def law_error(verifier, vocab, gamma, seed=5, zeros=0.0):
    target = Process.random(vocab, gamma + 1, seed, zeros=zeros)
    draft = Process.random(vocab, gamma, seed + 100, zeros=zeros)
    joint = draft.joint(gamma)
    try:
        law = emitted_law(verifier, target, draft, lambda drafts: joint[tuple(drafts.T)])
    except PremiseBroken:
        return float("inf")
    return (law - target.joint(gamma + 1)).abs().max().item()


@pytest.mark.parametrize(("vocab", "gamma", "zeros"), [(2, 3, 0.0), (3, 2, 0.3), (5, 2, 0.0), (8, 1, 0.3)])
def test_tokens_have_exactly_the_targets_law(plugin, vocab, gamma, zeros):
    verifier = judging(plugin("verify").verify)
    assert max(law_error(verifier, vocab, gamma, seed, zeros) for seed in (5, 6)) < 1e-12


def moved(index, change):
    """Change one argument: 0 drafts, 1 draft logits, 2 target logits, 3 temperatures, 4 coins, 5 uniforms."""
    return lambda *given: (*given[:index], change(given[index]), *given[index + 1 :])


CALLERS = {
    "stale_q": moved(1, lambda z: z.roll(1, 0)),
    "q_of_another_depth": moved(1, lambda z: z.flip(1)),
    "probabilities_for_logits": moved(1, lambda z: z.softmax(-1)),
    "temperature_twice_in_q": moved(1, lambda z: z / TEMPERATURE),
    "temperature_missing_in_q": moved(1, lambda z: z * TEMPERATURE),
    "padded_rows_in_front": moved(1, lambda z: torch.cat([torch.zeros_like(z[:1]), z[:-1]])),
    "half_precision_q": moved(1, lambda z: z.bfloat16().double()),
    "temperature_twice": moved(2, lambda logits: logits / TEMPERATURE),
    "temperature_missing": moved(3, torch.ones_like),
    "wrong_target_row_after_a_merge": moved(2, lambda logits: logits.roll(1, 0)),
    "reused_coins": lambda *given: (*given[:5], given[4][:, 0]),
    "one_coin_for_all_depths": moved(4, lambda coins: coins[:, :1].expand_as(coins)),
}
SOURCE = {
    "accepts_by_p_alone": ("coins * q < p", "coins < p"),
    "accepts_after_a_rejection": ("< p).cumprod(1, dtype=torch.int64)", "< p).long()"),
    "residual_of_the_first_row": ("proposals[rows, at]", "proposals[rows, 0]"),
    "residual_of_another_request": ("proposals[rows, at]", "proposals[rows.flip(0), at]"),
    "q_normalized_over_depths": ("draft.softmax(-1)", "draft.softmax(1)"),
    "no_residual": ("torch.where(partial, rest, whole)", "whole"),
    "bonus_from_the_residual": ("(accepted < depths) & ", ""),
    "q_not_normalized": ("draft.softmax(-1)", "draft.exp()"),
}


@pytest.mark.parametrize("mutant", [*CALLERS, *SOURCE])
def test_planted_bugs_are_caught_by_the_law(plugin, mutant):
    given = CALLERS.get(mutant, lambda *arguments: arguments)
    module = plugin("verify")
    if mutant in SOURCE:
        text, (right, wrong) = (PLUGIN / "rlpipe_sglang" / "verify.py").read_text(), SOURCE[mutant]
        assert text.count(right) == 1
        module = ModuleType("mutant")
        sys.modules["mutant"] = module
        exec(text.replace(right, wrong), module.__dict__)
        del sys.modules["mutant"]

    def verify(*arguments):
        return module.verify(*arguments)

    def shifted(*arguments):  # logits are known up to a constant of their row
        drafts, z, *rest = given(*arguments)
        return drafts, z + 0.3 * (mutant == "q_not_normalized"), *rest

    assert law_error(judging(verify, shifted), 3, 2) > 1e-4


def test_numbers_beside_the_verdict_are_those_of_the_target_at_its_temperature(plugin):
    generator = torch.Generator().manual_seed(0)
    z, target = (torch.randn(4, n, 9, generator=generator, dtype=torch.float64) for n in (2, 3))
    target[0, 1, 3] = float("-inf")
    temperatures = torch.tensor([[0.5], [1.0], [1.5], [2.0]], dtype=torch.float64)
    drafts = torch.randint(9, (4, 2), generator=generator)
    coins = torch.rand(4, 2, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(4, generator=generator, dtype=torch.float64)
    found = plugin("verify").verify(drafts, z, target, temperatures, coins, uniforms)
    laws = (target / temperatures[..., None]).softmax(-1)
    known = verify_chain(drafts, z.softmax(-1), laws, coins, uniforms)
    assert torch.equal(found.accepted, known.num_accepted)
    for row, count in enumerate(found.accepted.tolist()):
        emitted = found.tokens[row, : count + 1].tolist()
        assert emitted == [*drafts[row, :count].tolist(), known.next_token[row].item()]
        for place, token in enumerate(emitted):
            law = laws[row, place]
            assert found.logprobs[row, place].exp().item() == pytest.approx(law[token].item(), abs=1e-12)
            entropy = torch.special.entr(law).sum().item()
            assert found.entropies[row, place].item() == pytest.approx(entropy, abs=1e-5)
    torch.testing.assert_close((found.p / found.q).clamp(max=1), known.accept_prob)


def test_a_step_without_drafts_draws_from_the_target(plugin):
    target = torch.log(torch.tensor([[[0.25, 0.0, 0.75]], [[0.25, 0.0, 0.75]]], dtype=torch.float64))
    found = plugin("verify").verify(
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(2, 0, 3),
        target,
        torch.ones(2, 1),
        torch.zeros(2, 0, dtype=torch.float64),
        torch.tensor([0.2, 0.3], dtype=torch.float64),
    )
    assert found.accepted.tolist() == [0, 0] and found.tokens.tolist() == [[0], [2]]


def never(*_, **__):
    raise AssertionError("SGLang's own function was called")


def test_a_draft_is_drawn_from_exactly_the_numbers_that_are_kept(plugin):
    """The kept z decides the draft again, bit for bit, and is no view of the logits, which SGLang reuses."""
    drafts = plugin("drafts")
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    temperatures = torch.linspace(0.5, 2.0, 64)[:, None]
    sampling = SimpleNamespace(temperatures=temperatures, top_ks=None)
    torch.manual_seed(1)
    kept = drafts.prefilled(never, logits, sampling, True)
    _, first = drafts.drawn(never, kept, num_samples=1)
    z, _, later = drafts.proposed(never, logits, temperatures, torch.full((64,), 50))
    torch.manual_seed(1)
    before = z.clone()
    assert torch.equal(drafts.draw(kept, None)[1], first)
    assert torch.equal(drafts.draw(z, None)[1], later)
    logits.zero_()
    assert torch.equal(z, before) and torch.equal(kept, before)
    assert not torch.equal(first, later)
    sampling.top_ks = torch.ones(64)
    greedy = drafts.proposed(never, before, torch.ones(64, 1), sampling.top_ks)[2]
    prefilled = drafts.drawn(never, drafts.prefilled(never, before, sampling, True))[1]
    assert torch.equal(greedy[:, 0], before.argmax(-1)) and torch.equal(greedy, prefilled)


def test_a_draft_of_a_part_of_the_vocabulary_is_kept_over_all_of_it(plugin):
    """Bit for bit at the tokens that it knows, in their order, and no mass elsewhere; q is read from it."""
    drafts, ids = plugin("drafts"), torch.tensor([4, 0, 2])
    worker = SimpleNamespace(
        hot_token_id=None, target_worker=SimpleNamespace(model_config=SimpleNamespace(vocab_size=6))
    )

    def refused(worker):
        worker.hot_token_id = ids
        raise ValueError("requires the draft and target to share one vocab")

    drafts.allocated(refused, worker)
    logits = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    temperatures = torch.linspace(0.5, 2.0, 64)[:, None]
    sampling = SimpleNamespace(temperatures=temperatures, top_ks=None)
    torch.manual_seed(1)
    kept = drafts.prefilled(never, logits, sampling, True)
    first = drafts.drawn(never, kept, num_samples=1)[1]
    z, _, second = drafts.proposed(never, logits, temperatures)
    torch.manual_seed(1)
    for law, places in ((kept, first), (z, second)):
        assert torch.equal(law[:, ids], logits / temperatures)
        assert (law[:, [1, 3, 5]] == float("-inf")).all()
        assert torch.equal(drafts.draw(law[:, ids], None)[1], places)
        found = plugin("verify").verify(
            ids[places],
            law[:, None],
            torch.randn(64, 2, 6, generator=torch.Generator().manual_seed(2)),
            temperatures,
            torch.zeros(64, 1, dtype=torch.float64),
            torch.full((64,), 0.5, dtype=torch.float64),
        )
        torch.testing.assert_close(found.q, (logits / temperatures).softmax(-1).gather(1, places))
        assert found.entropies.isfinite().all() and (found.accepted == 1).all()
    sampling.top_ks = torch.ones(64)
    greedy = drafts.proposed(never, logits, temperatures, sampling.top_ks)[2]
    prefilled = drafts.drawn(never, drafts.prefilled(never, logits, sampling, True))[1]
    assert torch.equal(greedy[:, 0], logits.argmax(-1)) and torch.equal(greedy, prefilled)


def test_what_else_sglang_refuses_of_a_draft_stays_refused(plugin):
    drafts, worker = plugin("drafts"), SimpleNamespace(hot_token_id=None)

    def refused(worker):
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        drafts.allocated(refused, worker)
    plugin.spec.enable_multi_layer_eagle, worker.hot_token_id = True, torch.tensor([0])
    with pytest.raises(ValueError, match="no memory"):
        drafts.allocated(refused, worker)
    assert drafts.Known.ids is None


def test_requests_judged_a_few_at_a_time_are_judged_alike(plugin, monkeypatch):
    verify, generator = plugin("verify"), torch.Generator().manual_seed(0)
    z, target = (torch.randn(7, n, 9, generator=generator) for n in (2, 3))
    drafts = torch.randint(9, (7, 2), generator=generator)
    coins = torch.rand(7, 2, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(7, generator=generator, dtype=torch.float64)
    given = drafts, z, target, torch.linspace(0.5, 2, 7)[:, None], coins, uniforms
    together = verify.verify(*given)
    monkeypatch.setattr(verify, "TOGETHER", 60)  # two requests
    for one, other in zip(verify.verify(*given), together, strict=True):
        torch.testing.assert_close(one, other)


def test_drafts_have_the_law_that_is_kept(plugin):
    """Pearson's test, 40,000 drafts, 7 degrees of freedom, alpha 1e-4 (29.9), fixed seed.

    Power: drafts at a temperature a tenth higher must fail.
    """
    drafts = plugin("drafts")
    torch.manual_seed(0)
    logits = torch.randn(1, 8) * 1.5

    def score(temperature):
        z = drafts.scaled(logits.expand(40_000, 8), torch.full((40_000, 1), TEMPERATURE))
        expected = drafts.scaled(logits, torch.tensor([[temperature]])).softmax(-1)[0] * 40_000
        return (
            ((drafts.draw(z, None)[1].flatten().bincount(minlength=8) - expected) ** 2 / expected)
            .sum()
            .item()
        )

    assert score(TEMPERATURE) < 29.9 < score(TEMPERATURE * 1.1)


def test_two_drafts_of_one_row_are_independent(plugin):
    """A replay must not repeat the races: Pearson's test of pairs, 63 degrees, alpha 1e-4 (115.7)."""
    drafts = plugin("drafts")
    torch.manual_seed(0)
    z = torch.randn(1, 8).expand(40_000, 8)
    first, second = drafts.draw(z, None)[1][:, 0], drafts.draw(z, None)[1][:, 0]
    law = z[0].softmax(-1)
    expected = torch.outer(law, law).flatten() * len(z)

    def score(one, other):
        counts = (one * 8 + other).bincount(minlength=64)
        return ((counts - expected) ** 2 / expected).sum().item()

    assert score(first, second) < 115.7 < score(first, first)


@pytest.mark.parametrize("graph", [None, "graph"])
def test_without_a_graph_the_head_reads_each_requests_last_token_alone(plugin, graph):
    drafts, states, taken = plugin("drafts"), torch.arange(12), []
    idle = SimpleNamespace(is_idle=lambda: False)
    worker = SimpleNamespace(cuda_graph_runner_for_draft_extend=graph, seed_dsa_topk_from_draft_extend=False)
    result = SimpleNamespace(
        accept_lens=torch.tensor([1, 4, 2], dtype=torch.int32),
        next_token_ids=torch.zeros(12, dtype=torch.int32),
        prepared_draft_extend_inputs=None,
    )

    def theirs(*given, kv_loc_plan):
        assert given == (worker, SimpleNamespace(forward_mode=idle), result) and kv_loc_plan == "plan"
        kept, rows, tokens = result.prepared_draft_extend_inputs or (
            result.accept_lens - 1, torch.tensor([0, 7, 9]), result.next_token_ids.long(),
        )  # fmt: skip
        forward = SimpleNamespace(capture_hidden_mode="full")
        extend = SimpleNamespace(select_index=None, num_correct_drafts=kept)
        drafts.selected(forward, extend, given[1], tokens, 4, "runner", graph, kv_loc_plan=kv_loc_plan)
        assert (extend.select_index is None, forward.capture_hidden_mode) == (
            (True, "full") if graph else (False, "last")
        )
        read = states if extend.select_index is None else states[extend.select_index]
        taken.extend([len(read), read[rows].tolist(), kept.tolist()])

    drafts.extended(theirs, worker, SimpleNamespace(forward_mode=idle), result, kv_loc_plan="plan")
    assert taken == [12 if graph else 3, [0, 7, 9], [0, 3, 1]]


def test_a_draft_law_that_is_no_number_leaves_the_target_alone(plugin):
    """Nothing is accepted, and the last token is drawn from all of p."""
    generator = torch.Generator().manual_seed(0)
    z, target = (
        torch.full((50, 1, 7), float("nan")),
        torch.randn(1, 2, 7, generator=generator).expand(50, -1, -1),
    )
    uniforms = (torch.arange(50, dtype=torch.float64) + 0.5) / 50
    coins = torch.zeros(50, 1, dtype=torch.float64)
    found = plugin("verify").verify(
        torch.zeros(50, 1, dtype=torch.int64), z, target, torch.ones(50, 1), coins, uniforms
    )
    edges = target[0, 0].double().softmax(-1).cumsum(-1)
    assert not found.accepted.any()
    assert found.tokens[:, 0].tolist() == torch.searchsorted(edges, uniforms, right=True).tolist()


def test_seeds_probabilities_and_other_workers_are_drawn_by_sglang(plugin):
    drafts, seeds = plugin("drafts"), torch.tensor([1, 2])
    logits, temperatures = torch.randn(2, 5), torch.ones(2, 1)
    theirs = torch.tensor([[3], [4]])
    z, _, drawn = drafts.proposed(
        lambda *_, **__: ("q", "p", theirs), logits, temperatures, sampling_seed=seeds, positions=seeds
    )
    assert torch.equal(z, logits) and drawn is theirs
    sampling = SimpleNamespace(temperatures=temperatures, top_ks=None)
    kept = drafts.prefilled(never, logits, sampling, True)
    (seen,) = drafts.drawn(lambda probs, **_: (probs,), kept, num_samples=1, sampling_seed=seeds)
    torch.testing.assert_close(seen, logits.softmax(-1))
    assert drafts.drawn(lambda probs, **_: probs, logits, num_samples=1) is logits
    assert drafts.prefilled(lambda *given: given, logits, None, False) == (logits, None, False)
    plugin.spec.enable_multi_layer_eagle = True
    assert drafts.proposed(lambda *given, **_: given, logits, temperatures)[0] is logits


def a_step(drafts, size=3, gamma=2, vocab=6):
    """What SGLang gives `eagle_sample` after a merge: first drafts of two decoding requests and a new one."""
    generator = torch.Generator().manual_seed(3)
    temperatures = torch.tensor([[0.5], [1.0], [2.0]])
    sampling = SimpleNamespace(
        temperatures=temperatures,
        is_all_greedy=False,
        sampling_seed=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_watermark_candidates=False,
        **dict.fromkeys(("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling"), False),
    )
    logits = [torch.randn(size, vocab, generator=generator) for _ in range(gamma)]
    decoding = drafts.proposed(never, logits[0][:2], temperatures[:2])
    joining = SimpleNamespace(temperatures=temperatures[2:], top_ks=None)
    new = drafts.prefilled(never, logits[0][2:], joining, True)
    second = drafts.proposed(never, logits[1], temperatures)
    first = torch.cat([decoding[2], drafts.drawn(never, new)[1]])
    tokens = torch.cat([torch.zeros(size, 1, dtype=torch.int64), first, second[2]], 1)
    # rows that pad a CUDA graph's batch lie behind the requests'
    kept = torch.stack([torch.cat([decoding[0], new]), second[0]], 1)
    verify_input = SimpleNamespace(
        draft_token_num=gamma + 1,
        max_tree_depth=gamma + 1,
        tree_topk=1,
        draft_token=tokens.flatten(),
        draft_probs=torch.cat([kept, torch.full_like(kept[:1], float("nan"))]),
        retrieve_index=torch.arange(size * (gamma + 1)).view(size, -1),
    )
    batch = SimpleNamespace(
        seq_lens=torch.ones(size),
        reqs=[
            SimpleNamespace(sampling_params=SimpleNamespace(top_k=ALL, custom_params=None))
            for _ in range(size)
        ],
        sampling_info=sampling,
        forward_mode=SimpleNamespace(is_idle=lambda: False),
    )
    target = torch.randn(size * (gamma + 1), vocab, generator=generator)
    q = torch.stack([(row / temperatures).softmax(-1) for row in logits], 1)
    return verify_input, batch, SimpleNamespace(next_token_logits=target), tokens[:, 1:], q


def test_merged_and_padded_requests_are_judged_as_each_alone(plugin, monkeypatch):
    verify = plugin("verify")
    torch.manual_seed(0)
    verify_input, batch, output, tokens, q = a_step(plugin("drafts"))
    seen, lengths = [], set()
    rand = torch.rand

    def remembered(*shape, **options):
        seen.append(rand(*shape, **options))
        return seen[-1]

    monkeypatch.setattr(torch, "rand", remembered)
    laws = (output.next_token_logits.view(3, 3, 6) / batch.sampling_info.temperatures[..., None]).softmax(-1)
    for _ in range(40):
        seen.clear()
        predict, emitted, index = verify.sampled(
            never, verify_input, batch, output, None, watermark_state=None
        )
        known = verify_chain(tokens, q, laws, *seen)
        assert emitted.tolist() == (known.num_accepted + 1).tolist()
        for row, count in enumerate(known.num_accepted.tolist()):
            places = index[row, : count + 1].long()
            assert places.tolist() == list(range(3 * row, 3 * row + count + 1))
            assert index[row, count + 1 :].tolist() == [-1] * (2 - count)
            wanted = [*tokens[row, :count].tolist(), known.next_token[row].item()]
            assert predict[places].tolist() == wanted
            lengths.add(count)
    assert lengths == {0, 1, 2} and verify.judged == {"rlpipe": 120}


def test_a_step_that_drafts_nothing_is_judged_whatever_row_stands_for_its_drafts(plugin):
    verify = plugin("verify")
    verify_input, batch, output, _, _ = a_step(plugin("drafts"))
    verify_input.draft_token_num = verify_input.max_tree_depth = 1
    verify_input.draft_token = torch.zeros(3, dtype=torch.int64)
    verify_input.draft_probs = torch.zeros(3, 1, 6)
    verify_input.retrieve_index = torch.arange(3)[:, None]
    output.next_token_logits = torch.tensor([[0.0, 99, 0, 0, 0, 0], [99, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 99]])
    predict, lengths, index = verify.sampled(never, verify_input, batch, output)
    assert predict.tolist() == [1, 0, 5] and lengths.tolist() == [1] * 3 and index.tolist() == [[0], [1], [2]]


def test_greedy_requests_take_the_targets_argmax_and_leave_the_others_as_they_were(plugin):
    """Drafts of request 1 are its argmax in one step and not in the other; coins must not matter to it."""
    verify = plugin("verify")
    verify_input, batch, output, _, _ = a_step(plugin("drafts"))
    target = output.next_token_logits.view(3, 3, 6)
    target[1] = torch.tensor([0.0, 0.1, 0.3, 0.2, 0.0, 0.0])  # nearly flat: sampling would leave token 2
    batch.sampling_info.temperatures[1] = 1.0
    laws = target.log_softmax(-1)
    for drafted, count in (([2, 2], 2), ([2, 3], 1), ([3, 2], 0)):
        verify_input.draft_token.view(3, 3)[1, 1:] = torch.tensor(drafted)
        for seed in range(20):
            output.next_token_logits = target.reshape(9, 6).clone()
            verdicts = []
            for greedy in (False, True):
                batch.sampling_info.need_top_k_sampling = greedy
                batch.reqs[1].sampling_params.top_k = 1 if greedy else ALL
                torch.manual_seed(seed)
                predict, lengths, index = verify.sampled(never, verify_input, batch, output)
                verdicts.append(output.rlpipe_verdict)
            assert lengths[1] == count + 1 and predict[index[1, : count + 1].long()].tolist() == [2] * (
                count + 1
            )
            torch.testing.assert_close(verdicts[1].logprobs[1, : count + 1], laws[1, : count + 1, 2])
            assert verdicts[1].p[1].tolist() == [float(x == 2) for x in drafted]
            for before, after in zip(*verdicts, strict=True):
                assert torch.equal(before[[0, 2]], after[[0, 2]])


UNCOVERED = {
    "top-p": ("sampling", "need_top_p_sampling", True),
    "top-k": ("sampling", "need_top_k_sampling", True),
    "min-p": ("sampling", "need_min_p_sampling", True),
    "greedy": ("sampling", "is_all_greedy", True),
    "seed": ("sampling", "sampling_seed", torch.ones(3)),
    "penalty": ("sampling", "acc_scaling_penalties", torch.ones(3)),
    "bias": ("sampling", "logit_bias", torch.ones(3)),
    "watermark": ("sampling", "has_watermark_candidates", True),
    "tree": ("input", "tree_topk", 2),
    "block verification": ("spec", "speculative_use_block_verification", True),
    "not rejection sampling": ("spec", "speculative_use_rejection_sampling", False),
    "grammar": (None, None, None),
    "drafts of another kind": ("spec", "enable_multi_layer_eagle", True),
}


@pytest.mark.parametrize("reason", UNCOVERED)
def test_what_is_not_covered_is_judged_by_sglang_with_probabilities_and_counted(plugin, reason):
    verify = plugin("verify")
    verify_input, batch, output, _, q = a_step(plugin("drafts"))
    given = verify_input.draft_probs[:3].clone()
    where, name, value = UNCOVERED[reason]
    if where:
        places = {"sampling": batch.sampling_info, "input": verify_input, "spec": plugin.spec}
        setattr(places[where], name, value)
    batch.reqs[1].sampling_params.top_k = 20 if reason == "top-k" else ALL
    calls = []
    verify.sampled(
        lambda *given, **_: calls.append(given), verify_input, batch, output, None if where else "grammar"
    )
    assert len(calls) == 1 and verify.judged == {reason: 3}
    kept = given if reason == "drafts of another kind" else q
    torch.testing.assert_close(calls[0][0].draft_probs[:3], kept)


def test_a_verdicts_numbers_are_taken_for_the_answer(plugin, monkeypatch):
    measure, verify = plugin("measure"), plugin("verify")
    for name, content in (
        (
            "sglang.srt.environ",
            {"envs": SimpleNamespace(SGLANG_RETURN_ORIGINAL_LOGPROB=SimpleNamespace(get=bool))},
        ),
        ("sglang.srt.managers", {"__path__": []}),
        ("sglang.srt.managers.auxiliary_output", {"append_auxiliary_output": lambda known, new: new}),
    ):
        made = ModuleType(name)
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, made)
    verify_input, batch, output, _, _ = a_step(plugin("drafts"))
    batch.top_logprobs_nums = batch.token_ids_logprobs = None
    output.auxiliary_device_output = None
    predict, lengths, index = verify.sampled(never, verify_input, batch, output)
    measure.verified(never, batch, output, predict, accept_index=index)
    ours = output.next_token_logprobs, output.auxiliary_device_output.values
    del output.rlpipe_verdict
    measure.verified(never, batch, output, predict, accept_index=index)
    kept = torch.arange(3) < lengths[:, None]
    torch.testing.assert_close(ours[0][kept], output.next_token_logprobs[kept])
    torch.testing.assert_close(ours[1][kept], output.auxiliary_device_output.values[kept])
