"""Advice: each rule speaks where it should, is silent where it should be, and does not repeat itself."""

from dataclasses import asdict

import pytest

from rlpipe.config.run import Config
from rlpipe.diagnosis.advice import (
    Advisor,
    Setup,
    advise,
    better_drafter,
    better_gamma,
    better_objective,
    better_rule,
    cut_answers,
    equal_groups,
    few_workers,
)

pytestmark = pytest.mark.unit
from_settings = Setup.from_settings


def lengths(rejection, target_only):
    return {
        "probe/fixed/acceptance_length/rejection": rejection,
        "probe/fixed/acceptance_length/target_only": target_only,
    }


def setup(online=False, draft_cost=0.1, **spec):
    metrics = {"advice": {"draft_cost": draft_cost}}
    return from_settings(
        {"spec": spec, "draft": {"train": "online" if online else "off"}, "metrics": metrics}
    )


def rates(*by_depth):
    return {f"spec/acceptance_rate/depth_{k}": rate for k, rate in enumerate(by_depth, 1)}


@pytest.mark.parametrize(
    ("mode", "found", "said"),
    [
        ("target_only", (3.21, 3.0), "set spec.mode=rejection"),
        ("rejection", (3.0, 3.21), "set spec.mode=target_only"),
        ("block", (3.0, 3.21), "set spec.mode=target_only"),
        ("target_only", (3.05, 3.0), None),
        ("rejection", (3.21, 3.0), None),
        ("tree", (3.0, 3.9), None),
        ("none", (3.9, 3.0), None),
    ],
)
def test_the_better_rule_is_named_when_it_gains_enough(mode, found, said):
    text = better_rule(setup(mode=mode, gamma=3), [lengths(*found)])
    assert (said in text) if said else text is None


@pytest.mark.parametrize(("share", "speaks"), [(0.6, True), (0.4, False), (None, False)])
def test_answers_that_are_mostly_cut_off_name_the_limits(share, speaks):
    records = [{} if share is None else {"env/truncated": share}] * 3
    text = cut_answers(from_settings({"rollout": {"max_context": 64}}), records)
    assert (text is not None) == speaks
    assert not speaks or ("60% of the attempts" in text and "rollout.max_context=64" in text)


@pytest.mark.parametrize(
    ("by_depth", "cost", "gamma"),
    [
        ((0.98, 0.98, 0.98), 0.1, 4),
        ((0.6, 0.3, 0.2), 0.1, 2),
        ((0.8, 0.75, 0.7), 0.1, None),
        ((0.98, 0.98, 0.98), 2.0, 0),
    ],
)
def test_gamma_is_judged_by_tokens_per_cost(by_depth, cost, gamma):
    text = better_gamma(setup(mode="rejection", gamma=3, draft_cost=cost), [rates(*by_depth)] * 3)
    if gamma is None:
        assert text is None
    elif gamma == 0:
        assert "spec.mode=none" in text
    else:
        assert f"spec.gamma={gamma}" in text and ("large" if gamma < 3 else "small") in text


def seconds(batch, *by_gamma):
    return {f"spec/step_seconds/batch_{batch}/gamma_{gamma}": s for gamma, s in by_gamma}


@pytest.mark.parametrize(
    ("batch_8", "said"),
    [
        # 3.88 tokens become 4.80, and steps last 1.4 / 1.3 as long at 1 row, 1.8 / 1.6 as long at 8 rows.
        (
            ((0, 2.0), (1, 2.4), (3, 3.2)),
            "10% to 15% faster by the step times measured at batch size 1 to 8 and gamma 0 to 3: ",
        ),
        (((0, 2.0), (1, 6.0), (3, 14.0)), None),  # at 8 rows a fourth draft makes decoding slower
        (((0, 2.0),), "15% faster by the step times measured at batch size 1 and gamma 0 to 3: "),
    ],
)
def test_gamma_is_judged_by_measured_costs_at_every_batch_size(batch_8, said):
    first = seconds(1, (0, 1.0), (1, 1.1), (3, 1.3)) | seconds(8, *batch_8)
    text = better_gamma(setup(mode="rejection", gamma=3), [first, *[rates(0.98, 0.98, 0.98)] * 3])
    assert (said in text and "if a draft costs" not in text) if said else text is None


def test_drafts_that_are_measured_to_cost_more_than_they_bring_are_advised_against():
    records = [seconds(1, (0, 1.0), (1, 3.0), (3, 8.0)), *[rates(0.98, 0.98, 0.98)] * 3]
    text = better_gamma(setup(mode="rejection", gamma=3), records)
    assert (
        "set spec.mode=none" in text
        and "0.49 tokens per unit of decoding against 1 by the step times" in text
    )


def test_an_advisor_keeps_the_costs_that_only_the_first_record_has():
    texts = []
    advisor = Advisor(setup(mode="rejection", gamma=3), lambda _, **fields: texts.append(fields["text"]))
    advisor.see(seconds(1, (0, 1.0), (1, 1.1), (3, 1.3)))
    for _ in range(250):
        advisor.see({})
    for _ in range(3):
        advisor.see(rates(0.98, 0.98, 0.98))
    assert len(texts) == 1 and "by the step times measured at batch size 1 " in texts[0]


@pytest.mark.parametrize(
    ("depths", "online", "said"),
    [
        (3, True, "spec.gamma=4 and draft.depths=4, or"),
        (3, False, "draft.depths=4 (where the draft is trained)"),
        (4, True, "spec.gamma=4, or"),
    ],
)
def test_gamma_is_advised_together_with_the_depths_that_the_draft_is_trained_for(depths, online, said):
    settings = {"spec": {"gamma": 3}, "draft": {"depths": depths, "train": "online" if online else "off"}}
    assert said in better_gamma(from_settings(settings), [rates(0.98, 0.98, 0.98)] * 3)


@pytest.mark.parametrize(
    ("share", "filtered", "said"),
    [(0.5, False, "2.0 times"), (0.5, True, None), (0.3, False, None), (0.95, False, None)],
)
def test_groups_without_signal_are_to_be_filtered(share, filtered, said):
    given = from_settings({"pipeline": {"filter_equal_rewards": filtered}})
    text = equal_groups(given, [{"env/no_signal": share}] * 3)
    assert (text is None) if said is None else (said in text and "pipeline.filter_equal_rewards=true" in text)


@pytest.mark.parametrize(
    ("waiting", "busy", "said"), [(8.3, 0.9, True), (3.0, 0.9, False), (8.3, 0.4, False)]
)
def test_more_workers_are_advised_where_busy_engines_bound_the_run(waiting, busy, said):
    record = {"timing_s/wait_rollout": waiting, "timing_s/step": 10.0, "perf/utilisation/rollout": busy}
    text = few_workers(from_settings({"rollout": {"workers": 2}}), [record] * 3)
    assert (text is not None) is said
    if said:  # a third of the wait goes: 8.3 s -> 5.5 s
        assert ": raise rollout.workers=2" in text and "up to 38% more steps" in text


def test_one_process_is_advised_to_leave_that_mode_before_it_adds_workers():
    record = {"timing_s/wait_rollout": 8.3, "timing_s/step": 10.0, "perf/utilisation/rollout": 0.9}
    settings = {"rollout": {"workers": 1}, "cluster": {"mode": "inline"}}
    assert ": set cluster=ray and raise rollout.workers=1" in few_workers(
        from_settings(settings), [record] * 3
    )


@pytest.mark.parametrize(
    ("period", "spec", "speaks"),
    [(3, {}, True), (40, {}, False), (3, {"drafter": "suffix"}, False), (3, {"mode": "tree"}, False)],
)
def test_lookups_are_advised_where_the_text_repeats(period, spec, speaks):
    """The layer's drafts are accepted once in two steps; of a text with a period lookups guess all."""
    record = {
        "tokens": [i % period for i in range(40)],
        "policy_versions": [[-1, 4], [0, 36]],
        "drafts": [[position, position % 2, [], [], []] for position in range(8, 36, 3)],
    }
    text = better_drafter(setup(**{"mode": "rejection", "gamma": 2} | spec), [record] * 4)
    assert (
        (text is not None and "3.00 tokens per verify step instead of 1.50" in text) if speaks else not text
    )


@pytest.mark.parametrize(
    ("objective", "mode", "online", "steps", "speaks"),
    [
        ("hard_ce", "rejection", True, 10, True),
        ("hard_ce", "rejection", True, 9, False),
        ("hard_ce", "target_only", True, 10, False),
        ("hard_ce", "block", False, 10, False),
        ("e2e_tv", "rejection", True, 10, False),
    ],
)
def test_sampled_tokens_are_no_teacher_where_rejection_verifies(objective, mode, online, steps, speaks):
    train = {"train": "online" if online else "off", "objective": objective}
    settings = from_settings({"spec": {"mode": mode}, "draft": train})
    text = better_objective(settings, [{"spec/acceptance_rate": 0.4}] * steps)
    assert ("draft.objective=e2e_tv" in text) if speaks else text is None


def test_adaptive_gamma_is_left_alone():
    assert better_gamma(setup(mode="rejection", gamma=3, adaptive=True), [rates(0.9, 0.9, 0.9)] * 3) is None


def probe(alpha, entropy):
    return {"probe/fixed/rejection/depth_1": alpha, "probe/fixed/target_entropy/depth_1": entropy}


@pytest.mark.parametrize(
    ("alpha", "entropy", "online", "said"),
    [
        ((0.9, 0.8), (0.5, 0.5), False, "draft.train=online"),
        ((0.9, 0.8), (0.5, 0.5), True, "raise draft.lr"),
        ((0.9, 0.8), (0.5, 1.4), False, None),  # entropy explains it
        ((0.9, 0.89), (0.5, 0.5), False, None),
    ],
)
def test_a_draft_that_no_longer_fits_is_told_apart_from_entropy(alpha, entropy, online, said):
    draft = setup(mode="rejection", gamma=3, online=online)
    text = advise(draft, [probe(*pair) for pair in zip(alpha, entropy, strict=True)]).get("stale_draft")
    assert (said in text) if said else text is None


@pytest.mark.parametrize(
    ("gap", "error", "speaks"), [(-0.1, 0.01, True), (-0.1, 0.1, False), (0.0, 0.01, False)]
)
def test_stale_engines_are_named_when_it_is_more_than_chance(gap, error, speaks):
    found = advise(
        setup(mode="rejection", gamma=3), [{"probe/staleness": gap, "probe/staleness_se": error}] * 3
    )
    assert ("stale_engine" in found) is speaks


@pytest.mark.parametrize("limit", [0, 2])
def test_a_staleness_limit_is_only_to_be_lowered_where_it_can_be(limit):
    settings = from_settings({"pipeline": {"max_staleness": limit}})
    text = advise(settings, [{"probe/staleness": -0.1, "probe/staleness_se": 0.01}] * 3)["stale_engine"]
    assert ("lower pipeline.max_staleness=2" in text) == (limit > 0) and "canary_failed" in text


@pytest.mark.parametrize(("observed", "speaks"), [(0.8, True), (1.2, False)])
def test_speculation_that_slows_down_is_advised_against(observed, speaks):
    found = advise(setup(mode="rejection", gamma=3), [{"spec/speedup_observed": observed}] * 3)
    assert ("no_speedup" in found) is speaks


@pytest.mark.parametrize(
    ("waited", "ran", "busy", "speaks"),
    [(9.0, 1.0, 0.3, True), (9.0, 1.0, 0.9, False), (1.5, 1.0, 0.3, False), (3.0, 1.0, 0.3, False)],
)
def test_a_queue_for_the_environments_threads_is_named_when_engines_are_idle(waited, ran, busy, speaks):
    threads = from_settings({"env": {"threads": 2}})
    seen = {
        "timing_s/sandbox": waited,
        "env/sandbox/seconds/mean": ran,
        "perf/utilisation/rollout": busy,
    }
    text = advise(threads, [seen] * 3).get("few_env_threads")
    assert (text is not None) == speaks
    assert text is None or "waits 8.0 s for one of env.threads=2 and runs 1.0 s in it" in text


@pytest.mark.parametrize(
    ("train_settings", "online"),
    [
        ({"train": "online", "objective": "ppow"}, True),
        ({"train": "ppow", "loss": "kl"}, True),  # a run from before draft.objective
        ({"train": "off"}, False),
        ({"train": "frozen"}, False),
        ({}, False),
    ],
)
def test_a_draft_that_learns_by_ppow_is_trained_online(train_settings, online):
    draft = from_settings({"spec": {"mode": "rejection", "gamma": 3}, "draft": train_settings})
    text = advise(draft, [probe(0.9, 0.5), probe(0.8, 0.5)])["stale_draft"]
    assert ("raise draft.lr" if online else "draft.train=online") in text


def test_the_advisor_speaks_once_and_again_after_silence():
    said = []
    advisor = Advisor(
        setup(mode="target_only", gamma=3), lambda kind, **fields: said.append((kind, fields["rule"]))
    )
    for found in [(3.5, 3.0)] * 3 + [(3.0, 3.0)] * 6 + [(4.5, 3.0)]:
        advisor.see(lengths(*found))
    assert said == [("advice", "better_rule")] * 2


def test_what_a_run_does_not_say_is_as_in_a_new_run():
    config = Config()
    config.metrics.advice.draft_cost, config.spec.gamma = 0.25, 5
    assert from_settings({}) == from_settings(asdict(Config()))
    assert from_settings(
        {"spec": {"gamma": 5}, "metrics": {"advice": {"draft_cost": 0.25}}}
    ) == from_settings(asdict(config))
    assert (from_settings({}).env_threads, from_settings({}).mode) == (
        Config().env.threads,
        Config().spec.mode,
    )


def drafting(rate, steps):
    return {"spec/acceptance_rate": rate, "spec/verify_steps": steps}


@pytest.mark.parametrize(
    ("spec", "record", "speaks"),
    [
        ({"mode": "rejection"}, drafting(0.01, 400), True),
        ({"mode": "rejection"}, drafting(0.01, 100), False),  # too few to say
        ({"mode": "rejection"}, drafting(0.08, 400), False),
        ({"mode": "rejection", "drafter": "eagle3"}, drafting(0.01, 400), False),
        ({"mode": "none"}, {}, False),
    ],
)
def test_a_layer_without_acceptance_is_called_untrained(spec, record, speaks):
    text = advise(setup(**spec), [record] * 3).get("untrained_layer")
    assert (text is not None and "rlpipe graft" in text) if speaks else text is None
