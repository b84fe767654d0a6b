"""The embedded engine end to end on random checkpoints: what it returns is what transformers computes."""

from __future__ import annotations

import asyncio

import pytest
import torch

import rlpipe.rollout.embedded.attention as attention
import rlpipe.rollout.embedded.drafting as drafting
import rlpipe.rollout.embedded.model as model
from recipes.theory import block_reach_drafted
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import MTP_PREFIX, read_weights
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.spec.sampling import Stream, request_uniforms
from rlpipe.types import FinishReason
from tests.helpers.driven_engine import GammaScript, RandomGamma, driven_engine
from tests.helpers.engines import (
    generate,
    recomputed,
    request,
    running_engine,
    transformers_logits,
    worst_logprob_error,
)
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.integration
MODES = ("none", "target_only", "rejection", "block", "tree")
DRAFTING = MODES[1:]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module")
def reference(checkpoint):
    return transformers_logits(checkpoint)


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 64, (3 + 7 * i % 23,), generator=generator).tolist() for i in range(count)]


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_unlike_lengths_attend_in_pieces(checkpoint, reference, mode, monkeypatch):
    """One request in twelve is long: it moves to the front, and what the others read is cut."""
    monkeypatch.setattr(attention, "PIECE_KEYS", 20)
    found = []

    def watched(contexts):
        found.append(pieces_of(contexts))
        return found[-1]

    pieces_of = attention.pieces_of
    monkeypatch.setattr(model, "pieces_of", watched)
    prompts = _prompts(120)
    with running_engine(checkpoint, mode, max_running=24) as engine:
        results = generate(
            engine,
            *(
                request(i, prompt, max_new_tokens=90 if i % 12 == 5 else 12, temperature=1.0)
                for i, prompt in enumerate(prompts)
            ),
        )
    errors = [worst_logprob_error(reference, *pair) for pair in zip(prompts, results, strict=True)]
    assert max(errors) < TOLERANCE
    cut = [pieces for pieces in found if len(pieces) > 1 and pieces[-1][1] >= 16]
    assert len(cut) > 20
    assert sum(pieces[0][2] == max(seen for _, _, seen in pieces) for pieces in cut) > 0.8 * len(cut)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_and_entropies_equal_transformers(checkpoint, reference, mode, temperature):
    """20 ragged requests over 8 rows, so they join and leave all the time."""
    prompts = _prompts(20)
    with running_engine(checkpoint, mode) as engine:
        results = generate(
            engine,
            *(
                request(i, prompt, max_new_tokens=10 + 3 * i, temperature=temperature)
                for i, prompt in enumerate(prompts)
            ),
        )
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert len(result.output_ids) == 10 + 3 * i
        assert result.finish_reason is FinishReason.LENGTH
        assert worst_logprob_error(reference, prompt, result, temperature or 1.0) < TOLERANCE


@pytest.mark.parametrize("mode", [*DRAFTING, "greedy"])
def test_greedy_output_is_the_same_with_and_without_speculation(checkpoint, reference, mode):
    requests = [
        request(i, prompt, max_new_tokens=40, temperature=0.0) for i, prompt in enumerate(_prompts(12))
    ]
    with running_engine(checkpoint, "none") as engine:
        plain = generate(engine, *requests)
    with running_engine(checkpoint, mode) as engine:
        speculative = generate(engine, *requests)
    assert [r.output_ids.tolist() for r in plain] == [r.output_ids.tolist() for r in speculative]
    ids = [*requests[0].prompt_ids.tolist(), *plain[0].output_ids.tolist()]
    assert (
        reference(ids).argmax(-1)[len(requests[0].prompt_ids) - 1 : -1].tolist()
        == plain[0].output_ids.tolist()
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_requests_output_depends_on_its_seed_and_not_on_what_else_runs(checkpoint, mode):
    prompts = _prompts(13)
    requests = [request(i, prompt, max_new_tokens=24, seed=i % 5) for i, prompt in enumerate(prompts)]
    with running_engine(checkpoint, mode) as engine:
        together = generate(engine, *requests)
    with running_engine(checkpoint, mode, max_running=1) as engine:
        alone = [generate(engine, one)[0] for one in requests]
    for one, other in zip(together, alone, strict=True):
        assert one.output_ids.tolist() == other.output_ids.tolist()
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=TOLERANCE)
    with running_engine(checkpoint, mode) as engine:
        (reseeded,) = generate(engine, request(0, prompts[0], max_new_tokens=24, seed=99))
    assert reseeded.output_ids.tolist() != together[0].output_ids.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_siblings_of_one_prompt_are_prefilled_once_and_differ_by_seed(checkpoint, reference, mode):
    prompt = _prompts(1)[0] * 5
    with running_engine(checkpoint, mode) as engine:
        engine.pause()

        async def run():
            tasks = [
                asyncio.ensure_future(engine.generate(request(i, prompt, max_new_tokens=16)))
                for i in range(6)
            ]
            await asyncio.sleep(0)
            engine.resume()
            return await asyncio.gather(*tasks)

        results = asyncio.run(run())
        assert engine.stats().prefill_tokens == len(prompt)
    assert len({tuple(result.output_ids.tolist()) for result in results}) == 6
    assert max(worst_logprob_error(reference, prompt, result) for result in results) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_prefills_only_what_is_new(checkpoint, reference, mode):
    with running_engine(checkpoint, mode, max_running=3) as engine:
        ids = dict(zip("abc", _prompts(3), strict=True))
        processed = 0
        for turn in range(3):
            before = engine.stats().prefill_tokens
            results = generate(
                engine,
                *(
                    request(10 * turn + i, ids[name], session=name, max_new_tokens=8)
                    for i, name in enumerate(ids)
                ),
            )
            processed = engine.stats().prefill_tokens - before
            for name, result in zip(ids, results, strict=True):
                assert worst_logprob_error(reference, ids[name], result) < TOLERANCE
                ids[name] = [*ids[name], *result.output_ids.tolist(), 3, 4, 5]
        # 3 new tokens, the last sampled one, and with drafts the one before it.
        assert processed == 3 * (4 if mode == "none" else 5)


@pytest.mark.parametrize("sessions", ["ab-c", "-acb"])
@pytest.mark.parametrize("mode", MODES)
def test_conversations_of_one_prompt_join_in_one_round(checkpoint, reference, mode, sessions):
    """The prompt's start is cached for a and b; c, and one without a session, copy the keys of another."""
    prompt = _prompts(2)[1]
    with driven_engine(checkpoint, mode) as driven:
        driven.generate(*(request(name, prompt[:5], session=name, max_new_tokens=3) for name in "ab"))
        turns = [
            request(i, prompt, session=name.strip("-") or None, max_new_tokens=12)
            for i, name in enumerate(sessions)
        ]
        driven.submit(*turns)
        driven.round()
        assert driven.running == len(turns)
        driven.run()
    results = [driven.results[turn.request_id] for turn in turns]
    assert max(worst_logprob_error(reference, prompt, result) for result in results) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_that_changes_its_past_is_recomputed_from_there(checkpoint, reference, mode):
    prompt = _prompts(2)[1]
    with running_engine(checkpoint, mode) as engine:
        (first,) = generate(engine, request(0, prompt, session="s", max_new_tokens=12))
        edited = [*prompt, *first.output_ids[:5], 2, 2, 2]
        (second,) = generate(engine, request(1, edited, session="s", max_new_tokens=12))
        (shorter,) = generate(engine, request(2, edited[:4], session="s", max_new_tokens=12))
    assert worst_logprob_error(reference, edited, second) < TOLERANCE
    assert worst_logprob_error(reference, edited[:4], shorter) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_conversations_beyond_the_rows_are_parked_and_prefill_only_what_is_new(checkpoint, reference, mode):
    with running_engine(checkpoint, mode, max_running=2) as engine:
        ids = dict(enumerate(_prompts(5)))
        for turn in range(2):
            before = engine.stats().prefill_tokens
            results = generate(
                engine, *(request(10 * turn + i, ids[i], session=str(i), max_new_tokens=6) for i in ids)
            )
            processed = engine.stats().prefill_tokens - before
            for i, result in enumerate(results):
                assert worst_logprob_error(reference, ids[i], result) < TOLERANCE
                ids[i] = [*ids[i], *result.output_ids.tolist(), 9]
        assert processed == 5 * (2 if mode == "none" else 3)


def test_parked_conversations_lose_their_keys_where_there_is_no_room_for_them(checkpoint, reference):
    with running_engine(checkpoint, max_running=2) as engine:
        engine._table.max_parked_tokens = 20
        ids = dict(enumerate(_prompts(5)))
        for turn in range(2):
            results = generate(
                engine, *(request(10 * turn + i, ids[i], session=str(i), max_new_tokens=6) for i in ids)
            )
            assert engine._table.parked_tokens <= 20
            for i, result in enumerate(results):
                assert worst_logprob_error(reference, ids[i], result) < TOLERANCE
                ids[i] = [*ids[i], *result.output_ids.tolist(), 9]


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_new_weights_leave_parked_conversations_their_keys_only_where_the_run_says_so(checkpoint, policy):
    with running_engine(checkpoint, max_running=1, kv_on_update=policy) as engine:
        prompts = _prompts(2)
        generate(engine, *(request(i, prompts[i], session=str(i), max_new_tokens=4) for i in (0, 1)))
        assert engine._table.parked_tokens
        engine.update_weights(read_weights(checkpoint), 1)
        assert bool(engine._table.parked_tokens) == (policy == "keep")


def _mtp_hidden(path, ids: list[int]) -> torch.Tensor:
    """Depth-1 output of the reference MTP module at the last token but one, from transformers' hiddens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from recipes.tiny_model.layer import MtpLayer

    weights = read_weights(path)
    layer = MtpLayer(AutoConfig.from_pretrained(path))
    layer.load_state_dict({k.removeprefix(MTP_PREFIX): v for k, v in weights.items() if MTP_PREFIX in k})
    tokens = torch.tensor([ids])
    with torch.no_grad():
        hidden = AutoModelForCausalLM.from_pretrained(path).model(tokens[:, :-1]).last_hidden_state
        positions, count = torch.arange(len(ids) - 1)[None], len(ids) - 1
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        return layer(hidden, weights["model.embed_tokens.weight"][tokens[:, 1:]], positions, mask)[0, -1]


@pytest.mark.parametrize("mode", DRAFTING)
def test_drafts_start_from_true_hidden_states_after_steps_and_turns(checkpoint, mode):
    """The state from which depth 1 is drafted equals the reference module over the whole sequence.

    It is read from the row after two turns of a conversation: prefill, delta prefill and catch-up after
    partial acceptance all left their mark on the draft's keys.
    """
    with running_engine(checkpoint, mode) as engine:
        prompt = _prompts(2)[1]
        (first,) = generate(engine, request(0, prompt, session="s", max_new_tokens=17))
        second_prompt = [*prompt, *first.output_ids.tolist(), 7, 8]
        steps = engine.stats().spec.verify_steps
        (second,) = generate(engine, request(1, second_prompt, session="s", max_new_tokens=1))
        assert engine.stats().spec.verify_steps == steps  # one token: straight from the prefill
        row = engine._table.idle_row("s")
        ids = [*second_prompt, *second.output_ids.tolist()]
        assert (engine._table.hidden[row] - _mtp_hidden(checkpoint, ids)).abs().max() < TOLERANCE
        # And after steps: the state is the one of the last token only if nothing was cut off.
        for seed in range(20):
            (third,) = generate(
                engine, request(f"t{seed}", second_prompt, session="s", max_new_tokens=9, seed=seed)
            )
            spec = third.spec
            if 1 + spec.verify_steps + sum(spec.accepted) == 9:
                ids = [*second_prompt, *third.output_ids.tolist()]
                row = engine._table.idle_row("s")
                assert (engine._table.hidden[row] - _mtp_hidden(checkpoint, ids)).abs().max() < TOLERANCE
                return
    pytest.fail("no step ended exactly at the limit")


def _wrong_state(driven, checkpoint, row: int = 0) -> float:
    """How far the state that depth 1 is drafted from is from the reference's, for a running row."""
    table = driven.engine._table
    ids = table.tokens[row, : table.total[row]].tolist()
    return (table.hidden[row] - _mtp_hidden(checkpoint, ids)).abs().max().item()


@pytest.mark.parametrize("spell", [1, 2, 7])
@pytest.mark.parametrize("before", [[3], [0], [3, 3, 1]])
def test_the_draft_is_right_again_after_a_spell_without_drafts(checkpoint, before, spell):
    """Several rows that joined before and in the spell, one of them a copy of another's keys.

    Equal states and keys draft equal tokens, so acceptance after a spell is what it would have been.
    """
    policy = GammaScript(*before, *[0] * spell, 2)
    with driven_engine(checkpoint, policy=policy) as driven:
        prompts = _prompts(4)
        for i in (0, 1):
            driven.submit(request(i, prompts[i], max_new_tokens=60))
        for _ in before:
            driven.round()
        for i, prompt in enumerate((prompts[2], prompts[3], prompts[3]), 2):
            driven.submit(request(i, prompt, max_new_tokens=60))
        for _ in range(spell):
            driven.round()
        assert driven.running == 5
        assert min(_wrong_state(driven, checkpoint, row) for row in range(5)) > 0.01  # it did fall behind
        for _ in range(2):
            driven.round()
            assert max(_wrong_state(driven, checkpoint, row) for row in range(5)) < TOLERANCE


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("second", [0, 3])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_the_draft_is_right_after_a_spell_in_a_conversation_that_goes_on_or_changes(
    checkpoint, first, second, cut
):
    """first, second: gamma of the two turns; cut: tokens of the first turn that the second one replaces."""
    policy = GammaScript(first)
    with driven_engine(checkpoint, policy=policy) as driven:
        prompt = _prompts(2)[1]
        (turn,) = driven.generate(request(0, prompt, session="s", max_new_tokens=9))
        following = [*prompt, *turn.output_ids[: 9 - cut], *[33, 44, 55][: cut + 1]]
        policy.gammas = [second]
        driven.submit(request(1, following, session="s", max_new_tokens=60))
        driven.round()
        driven.round()
        policy.gammas = [1]
        for _ in range(2):
            driven.round()
            assert _wrong_state(driven, checkpoint) < TOLERANCE


def test_the_draft_is_right_after_weights_came_in_a_spell(checkpoint, tmp_path):
    other = write_random_checkpoint(tmp_path, seed=1)
    policy = GammaScript(3, 3, 0, 0)
    with driven_engine(checkpoint, policy=policy, kv_on_update="recompute") as driven:
        driven.submit(*(request(i, prompt, max_new_tokens=60) for i, prompt in enumerate(_prompts(3))))
        for _ in range(4):
            driven.round()
        driven.update(read_weights(other), 1)
        driven.round()
        policy.gammas = [2]
        for _ in range(2):
            driven.round()
            assert max(_wrong_state(driven, other, row) for row in range(3)) < TOLERANCE


@pytest.mark.parametrize("mode", ["target_only", "rejection", "block", "greedy"])
def test_a_gamma_that_varies_leaves_logprobs_exact(checkpoint, reference, mode):
    """Conversations of three turns over few rows, gamma anew for each step."""
    temperature = 0.0 if mode == "greedy" else 0.8
    with driven_engine(checkpoint, mode, policy=RandomGamma(3), max_running=4) as driven:
        ids = dict(enumerate(_prompts(7)))
        for turn in range(3):
            results = driven.generate(
                *(
                    request(
                        10 * turn + i, ids[i], session=str(i), max_new_tokens=5 + i, temperature=temperature
                    )
                    for i in ids
                )
            )
            for i, result in enumerate(results):
                assert worst_logprob_error(reference, ids[i], result, temperature or 1.0) < TOLERANCE
                ids[i] = [*ids[i], *result.output_ids.tolist(), 9]


def test_the_adaptive_engine_chooses_for_itself_and_returns_exact_logprobs(checkpoint, reference):
    prompts = _prompts(12)
    engine = EmbeddedEngine(
        RolloutConfig(max_running=8, max_context=128, device="cpu"), SpecConfig(adaptive=True), checkpoint
    )
    try:
        results = generate(engine, *(request(i, p, max_new_tokens=30) for i, p in enumerate(prompts)))
        stats = engine.stats()
    finally:
        engine.close()
    for prompt, result in zip(prompts, results, strict=True):
        assert worst_logprob_error(reference, prompt, result) < TOLERANCE
    assert stats.decode_seconds > 0 and stats.plain_seconds > 0 and stats.predicted_seconds > 0


@pytest.fixture(scope="module")
def argmax_decoding(checkpoint):
    """(prompt, the 40 tokens that greedy `generate` of transformers continues it with) of six prompts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    prompts = _prompts(6)
    return [(p, model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist()) for p in prompts]


@pytest.mark.parametrize("mode", ["greedy", "adaptive greedy", "tree", "tree beside a row that samples"])
def test_temperature_0_equals_greedy_generate_of_transformers(checkpoint, argmax_decoding, mode):
    policy = RandomGamma(3) if mode.startswith("adaptive") else None
    requests = [
        request(i, prompt, max_new_tokens=40, temperature=0.0)
        for i, (prompt, _) in enumerate(argmax_decoding)
    ]
    with driven_engine(
        checkpoint, "tree" if "tree" in mode else "greedy", policy=policy, max_running=4
    ) as driven:
        if "beside" in mode:
            driven.submit(request(99, [7], max_new_tokens=100, temperature=1.0))
        results = driven.generate(*requests)
    assert [r.output_ids.tolist() for r in results] == [expected for _, expected in argmax_decoding]


def test_a_greedy_tree_accepts_more_drafts_than_a_greedy_chain_of_its_depth(tmp_path):
    """Its children contain the chain's drafts, and some of the further ones are the argmax."""
    path = write_random_checkpoint(tmp_path, vocab=12, hidden=16, heads=2, kv_heads=1, scale=0.3)
    accepted = {}
    for mode in ("greedy", "tree"):
        with driven_engine(path, mode, gamma=3, tree=[3, 2, 1]) as driven:
            results = driven.generate(
                *(request(i, [1, 2, 3 + i], max_new_tokens=60, temperature=0.0) for i in range(6))
            )
        steps = sum(result.spec.verify_steps for result in results)
        accepted[mode] = sum(sum(result.spec.accepted) for result in results) / steps
    assert accepted["tree"] > 1.5 * accepted["greedy"] > 0


def test_greedy_mode_refuses_to_sample(checkpoint):
    with running_engine(checkpoint, "greedy") as engine:
        with pytest.raises(
            ValueError, match=r"temperature=0\.7, but spec\.mode=greedy .* set the temperature"
        ):
            generate(engine, request(0, [2, 3], temperature=0.7))
        (result,) = generate(engine, request(1, [2, 3], temperature=0.0, max_new_tokens=3))
    assert len(result.output_ids) == 3


@pytest.mark.parametrize("mode", ["rejection", "tree"])
def test_cached_latent_vectors_serve_drafts_and_later_turns(tmp_path, mode):
    """The cache holds one vector a token, keys and values at once, and no keys of the heads."""
    path = write_random_checkpoint(tmp_path, "deepseek_v3")
    logits, prompts = transformers_logits(path), _prompts(12)
    with running_engine(path, mode, max_running=16) as engine:
        first = generate(
            engine, *(request(i, p, session=str(i), max_new_tokens=20) for i, p in enumerate(prompts))
        )
        longer = [[*p, *r.output_ids.tolist(), 7, 9] for p, r in zip(prompts, first, strict=True)]
        second = generate(
            engine, *(request(i, p, session=str(i), max_new_tokens=20) for i, p in enumerate(longer))
        )
    assert sum(sum(r.spec.accepted) for r in [*first, *second]) > 20
    for prompt, result in zip([*prompts, *longer], [*first, *second], strict=True):
        assert worst_logprob_error(logits, prompt, result) < TOLERANCE


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3"])
@pytest.mark.parametrize("moved", [True, False], ids=["keys moved", "keys left (planted bug)"])
def test_logprobs_after_many_accepted_tree_nodes_equal_transformers(tmp_path, monkeypatch, moved, family):
    """A nearly flat head accepts nearly all drafts, siblings other than the first among them.

    Its logits are small, so errors are measured against their size.
    """
    if not moved:
        monkeypatch.setattr(drafting, "rearrange_kv", lambda cache, base, source: cache)
    path = write_random_checkpoint(tmp_path, family, head_scale=0.02)
    logits, prompts = transformers_logits(path), _prompts(6)
    with driven_engine(path, "tree") as driven:
        results = driven.generate(*(request(i, p, max_new_tokens=80) for i, p in enumerate(prompts)))
    accepted = sum(sum(result.spec.accepted) for result in results)
    assert accepted > 0.6 * sum(len(result.output_ids) for result in results)
    size = logits(prompts[0]).std().item()
    worst = max(worst_logprob_error(logits, p, r) for p, r in zip(prompts, results, strict=True)) / size
    assert worst < TOLERANCE if moved else worst > 100 * TOLERANCE


@pytest.mark.parametrize("mode", [*DRAFTING, "greedy"])
def test_recorded_drafts_stand_where_they_were_drafted_with_their_p_and_q(checkpoint, reference, mode):
    temperature = 0.0 if mode == "greedy" else 0.9
    prompts = _prompts(5)
    with running_engine(checkpoint, mode) as engine:
        results = generate(
            engine,
            *(
                request(i, p, max_new_tokens=25, temperature=temperature, record_drafts=i != 1)
                for i, p in enumerate(prompts)
            ),
        )
    assert results.pop(1).drafts is None
    prompts.pop(1)
    for prompt, result in zip(prompts, results, strict=True):
        position = 1
        assert len(result.drafts) == result.spec.verify_steps
        for step in result.drafts:
            assert step.position == position
            assert len(step.tokens) == (10 if mode == "tree" else 3)
            if mode != "tree":
                ids = [*prompt, *result.output_ids[:position], *step.tokens]
                rows = reference(ids)[len(prompt) + position - 1 : -1] / (temperature or 1.0)
                p = rows.softmax(-1) if temperature else torch.eye(64)[rows.argmax(-1)]
                p = p.gather(1, torch.tensor(step.tokens).unsqueeze(1)).squeeze(1)
                assert torch.allclose(torch.tensor(step.target_probs), p, atol=TOLERANCE)
                kept = step.tokens[: step.num_accepted]
                assert (
                    kept[: len(result.output_ids) - position]
                    == result.output_ids.tolist()[position:][: len(kept)]
                )
            if mode in ("target_only", "greedy"):
                assert step.draft_probs == [1.0] * 3
            else:
                assert all(0 < q <= 1 for q in step.draft_probs)
            position += step.num_accepted + 1
        accepted = [sum(step.num_accepted > depth for step in result.drafts) for depth in range(3)]
        assert result.spec.accepted == accepted


@pytest.mark.parametrize("mode", ["target_only", "rejection", "greedy", "block"])
def test_recorded_p_and_q_and_the_requests_own_coins_explain_every_acceptance(tmp_path, mode):
    """Chain: accepted while u q < p. Block: all gamma are accepted exactly when the last u < w_gamma."""
    path = write_random_checkpoint(tmp_path, vocab=3, scale=0.3)
    temperature = 0.0 if mode == "greedy" else 0.9
    with running_engine(path, mode) as engine:
        results = generate(
            engine,
            *(
                request(
                    seed,
                    [seed % 3, 2, seed // 3],
                    max_new_tokens=60,
                    temperature=temperature,
                    record_drafts=True,
                )
                for seed in range(9)
            ),
        )
    outcomes = set()
    for seed, result in enumerate(results):
        for step in result.drafts:
            p, q = torch.tensor([step.target_probs, step.draft_probs], dtype=torch.float64)
            if mode == "block":
                coins = torch.from_numpy(request_uniforms(seed, 70, 9)).view(-1, 3, 3)[:, :, Stream.COIN]
                weight = block_reach_drafted(p, q)[-1]
                assert (coins[step.position, -1] < weight).item() == (step.num_accepted == 3)
            else:
                coins = torch.from_numpy(request_uniforms(seed, 70))[step.position :][:3, Stream.COIN]
                passed = (coins * q < p).long()
                assert step.num_accepted == passed.cumprod(0).sum()
            outcomes.add(step.num_accepted)
    assert outcomes == {0, 1, 2, 3}


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_token_ends_the_turn_even_inside_accepted_drafts(checkpoint, mode):
    prompts = _prompts(16)
    with running_engine(checkpoint, mode) as engine:
        free = generate(engine, *(request(i, p, max_new_tokens=40) for i, p in enumerate(prompts)))
        stopped = generate(
            engine,
            *(
                request(i, p, max_new_tokens=40, stop_token_ids=(5, 17, 30, 41))
                for i, p in enumerate(prompts)
            ),
        )
    cut = 0
    for whole, part in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(whole.output_ids.tolist()) if token in (5, 17, 30, 41)]
        expected = whole.output_ids.tolist()[: ends[0] + 1] if ends else whole.output_ids.tolist()
        assert part.output_ids.tolist() == expected
        assert part.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
        cut += bool(ends)
    assert cut > 5


@pytest.mark.parametrize("mode", MODES)
def test_the_context_limit_ends_the_turn(checkpoint, reference, mode):
    prompt = _prompts(2)[1]
    with running_engine(checkpoint, mode, max_context=len(prompt) + 6) as engine:
        (result,) = generate(engine, request(0, prompt, max_new_tokens=50))
        (full,) = generate(engine, request(1, [*prompt, *result.output_ids.tolist()], max_new_tokens=50))
    assert len(result.output_ids) == 6
    assert result.finish_reason is FinishReason.LENGTH
    assert worst_logprob_error(reference, prompt, result) < TOLERANCE
    assert (full.output_ids.tolist(), full.finish_reason) == ([], FinishReason.LENGTH)


@pytest.mark.parametrize("mode", MODES)
def test_top_logprobs_are_the_largest_of_the_target(checkpoint, reference, mode):
    prompt = _prompts(1)[0]
    with running_engine(checkpoint, mode) as engine:
        asked, other = generate(
            engine,
            request(0, prompt, max_new_tokens=11, top_logprobs=3),
            request(1, prompt, max_new_tokens=11),
        )
    assert other.top_logprobs is None
    rows = reference([*prompt, *asked.output_ids.tolist()])[len(prompt) - 1 : -1].log_softmax(-1)
    assert len(asked.top_logprobs) == 11
    for row, top in zip(rows, asked.top_logprobs, strict=True):
        values, ids = row.topk(3)
        assert [token for token, _ in top] == ids.tolist()
        assert torch.allclose(torch.tensor([value for _, value in top]), values, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("mode", "nodes"), [("target_only", 3), ("rejection", 3), ("block", 3), ("greedy", 3), ("tree", 10)]
)
def test_counts_add_up_to_the_emitted_tokens(checkpoint, mode, nodes):
    """All tokens but the first come from verify steps: accepted drafts plus one each."""
    sampling = {"max_new_tokens": 30, "temperature": 0.0 if mode == "greedy" else 1.0}
    with running_engine(checkpoint, mode) as engine:
        results = generate(engine, *(request(i, p, **sampling) for i, p in enumerate(_prompts(8))))
        total = engine.stats()
    for result in results:
        spec = result.spec
        assert spec.proposed == nodes * spec.verify_steps
        assert spec.drafted[0] == spec.verify_steps
        assert spec.drafted[1:] == spec.accepted[:-1]
        emitted = 1 + spec.verify_steps + sum(spec.accepted)
        assert 0 <= emitted - len(result.output_ids) <= 3  # the last step may go beyond the limit
    assert total.spec.verify_steps == sum(result.spec.verify_steps for result in results)
    assert total.spec.accepted == [sum(r.spec.accepted[k] for r in results) for k in range(3)]
    assert total.generated_tokens == sum(len(result.output_ids) for result in results)


def test_mixed_temperatures_share_a_batch(checkpoint, reference):
    temperatures = (0.0, 0.5, 1.0, 2.0)
    prompts = _prompts(4)
    with running_engine(checkpoint) as engine:
        mixed = generate(
            engine,
            *(
                request(i, p, max_new_tokens=20, temperature=t)
                for i, (p, t) in enumerate(zip(prompts, temperatures, strict=True))
            ),
        )
        (alone,) = generate(engine, request(0, prompts[0], max_new_tokens=20, temperature=0.0))
    assert alone.output_ids.tolist() == mixed[0].output_ids.tolist()
    for prompt, result, temperature in zip(prompts, mixed, temperatures, strict=True):
        assert worst_logprob_error(reference, prompt, result, temperature or 1.0) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_runs_and_stays_near_its_own_transformers_model(tmp_path, mode):
    path = write_random_checkpoint(tmp_path, dtype=torch.bfloat16, hidden=64)
    prompt = _prompts(1)[0]
    with running_engine(path, mode, dtype="bfloat16") as engine:
        (result,) = generate(engine, request(0, prompt, max_new_tokens=24))
    logprobs, _ = recomputed(transformers_logits(path), prompt, result)
    assert (logprobs - torch.tensor(result.logprobs)).abs().max() < 0.1
