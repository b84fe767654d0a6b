"""Tables of the studies on SmolLM2, computed from their results; `page.py` puts them into documents.

If the interval of a difference includes 0, the table also has the number of seeds or runs with which the
interval would exclude 0, assuming the same mean and spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from answers.tables import difference, table, with_interval


def _points(estimate: Sequence[float]) -> str:
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in estimate))


def rules(r: Any) -> str:
    """Tabulate acceptance by entropy: slopes of every rule, and the first draft at other temperatures."""
    shown = [
        "rejection",
        "target-only",
        "greedy",
        "rejection, window",
        "block, window",
        "target-only, window",
    ]
    kinds = ("slope, contexts", "slope, within", "slope, between")
    rows, heated = [], []
    for name, one in r["sets"].items():
        for rule in shown:
            title = rule.replace(", window", ", of 3") if "window" in rule else f"{rule}, first draft"
            mean = "{:.3f} [{:.3f}, {:.3f}]".format(*one[rule]["mean"])
            first = f"{name}, {one['prompts']} texts" if rule == shown[0] else ""
            rows.append([first, title, mean, *(with_interval(one[rule][kind]) for kind in kinds)])

        by_temperature = one["by temperature"]
        slopes = [with_interval(by_temperature[f"{rule}, slope"]) for rule in ("rejection", "target-only")]
        for temperature, row in by_temperature.items():
            if "slope" not in temperature:
                values = (f"{row[column][0]:.3f}" for column in ("entropy", "rejection", "target-only"))
                heated.append([name, temperature, *values, *slopes])
                name, slopes = "", ["", ""]
    head = ["per nat", "rule", "accepted", "over contexts", "within texts", "between texts"]
    columns = ["entropy, nats", "rejection", "target-only", "rejection, per nat", "target-only, per nat"]
    return f"{table(head, rows)}\n\n{table(['first draft', 'temperature', *columns], heated)}"


def objectives(r: Any) -> str:
    """Tabulate objectives from one start: accepted drafts, and differences from soft KL and e2e TV."""
    rows = []
    by_result = sorted(r["table"].items(), key=lambda item: -item[1]["in domain, rejection"]["mean"][0])
    for arm, row in by_result:
        inside, outside = row["in domain, rejection"], row["out of domain, rejection"]
        rate = r["rates"][arm]
        rows.append(
            [
                arm,
                f"{rate['lr']:g}" + (" (edge)" if rate["edge"] else ""),
                f"{inside['mean'][0]:.3f}",
                difference(inside, "kl", "seeds"),
                difference(inside, "e2e_tv", "seeds"),
                difference(outside, "kl", "seeds"),
                difference(row["in domain, target_only"], "kl", "seeds"),
            ]
        )
    head = ["objective", "rate", "accepted of 3", "minus kl", "minus e2e_tv", "out of domain, minus kl"]
    depths = [
        [
            arm,
            *(_points(row[f"{held_out}, alpha, minus kl"]) for held_out in ("in domain", "out of domain")),
            *(_points(depth) for depth in row["last third minus kl, by depth"]),
            f"{row['in domain, entropy gap'][0]:+.2f}",
        ]
        for arm, row in by_result
        if arm != "kl"
    ]
    temperatures = ("T = 0", "T = 0.7")
    sets = [f"{held_out}, {t}" for held_out in ("in domain", "out of domain") for t in temperatures]
    heated = [
        [arm, *(difference(row[f"{name}, rejection"], "kl", "seeds") for name in sets)]
        for arm, row in by_result
        if arm != "kl"
    ]
    heated.append(
        ["accepted by kl", *(f"{r['table']['kl'][f'{n}, rejection']['mean'][0]:.3f}" for n in sets)]
    )
    depths_head = ["points minus kl", "first draft, held out", "out of domain"]
    depths_head += [f"depth {depth}, new texts" for depth in (1, 2, 3)]
    start, settings, correlation = r["start"], r["settings"], r["correlations"]["in domain"]
    return (
        f"{table([*head, 'target-only, minus kl'], rows)}\n\n"
        f"{table([*depths_head, 'entropy of draft minus target'], depths)}\n\n"
        f"{table(['accepted of 3, minus kl', *sets], heated)}\n\nThe start accepts "
        f"{start['in domain']['rejection']:.3f} in domain and {start['out of domain']['rejection']:.3f} out "
        f"of it; the draft of kl has {r['table']['kl']['in domain, entropy gap'][0]:.2f} nats more than the "
        f"target. {len(settings['seeds'])} seeds, {settings['steps']} steps of {settings['batch']} answers, "
        f"rates {', '.join(f'{lr:g}' for lr in settings['lrs'])}. New texts: of the last third of the steps, "
        f"before the draft learns them. Over all {r['correlations']['drafts']} drafts, in domain, acceptance "
        "of the first draft correlates with the entropy of draft minus target by "
        f"{correlation['entropy gap']:+.2f}, with KL(target ‖ draft) by "
        f"{correlation['KL(target||draft)']:+.2f}."
    )


def replay(r: Any) -> str:
    """Tabulate drafts along RL runs: at the end, half way, and the split of the frozen draft's change."""
    rows, first = [], []
    for arm, row in r["table"].items():
        rejection, target_only, alpha = row["rejection"], row["target_only"], row["alpha"]
        rate = r["rates"].get(arm)
        rows.append(
            [
                arm,
                "–" if rate is None else f"{rate['lr']:g}" + (" (edge)" if rate["edge"] else ""),
                f"{rejection['by policy'][0][0]:.3f} to {rejection['by policy'][-1][0]:.3f}",
                difference(rejection, "frozen", "runs"),
                difference(rejection, "online e2e TV", "runs"),
                f"{target_only['by policy'][0][0]:.3f} to {target_only['by policy'][-1][0]:.3f}",
                difference(target_only, "frozen", "runs"),
            ]
        )
        if arm != "frozen":
            half = rejection["minus frozen, half way"]
            others = [alpha["minus frozen"], alpha.get("minus online e2e TV")]
            points = ["–" if gap is None else _points(gap) for gap in others]
            entropy_gap = with_interval(row["draft_entropy"]["minus frozen"])
            outside = difference(row["out of domain"], "frozen", "runs")
            first.append([arm, with_interval(half), *points, outside, entropy_gap])
    head = ["draft", "rate", "rejection, of 3", "minus frozen", "minus online e2e TV", "target-only, of 3"]
    first_head = ["draft", "of 3, half way, minus frozen", "first draft, points minus frozen"]
    first_head += ["first draft, points minus online e2e TV", "out of domain, of 3, minus frozen"]
    first_head += ["entropy of the draft, minus frozen"]
    entropy = [f"{point[0]:.2f}" for point in r["table"]["frozen"]["target_entropy"]["by policy"]]
    split = [
        [
            rule,
            f"{parts['slope'][0]:+.3f}",
            *(with_interval(parts[name]) for name in ("change", "entropy", "mismatch")),
        ]
        for rule, parts in r["split"].items()
    ]
    split_head = ["frozen, first draft", "per nat before RL", "change", "of it entropy", "mismatch"]
    sweeps = [
        f"{arm} " + ", ".join(f"{value:.3f} at {lr}" for lr, value in rate["sweep"].items())
        for arm, rate in r["rates"].items()
    ]
    return (
        f"{table([*head, 'minus frozen'], rows)}\n\n{table(first_head, first)}\n\n"
        f"{table(split_head, split)}\n\n{r['runs']} RL runs; the "
        f"policy's entropy before, half way and after is {', '.join(entropy)} nats. Accepted at the end by "
        f"rate, on the sweep's answers: {'; '.join(sweeps)}."
    )


def along(r: Any) -> str:
    """Report runs with drafts that are frozen or trained during RL: acceptance, step time and the split."""
    titles = list(next(iter(r["arms"].values()))["figures"])
    rows = [
        [arm, *("{:.2f} to {:.2f}".format(*run["figures"][title]) for title in titles)]
        for arm, run in r["arms"].items()
    ]
    parts = ("total", "entropy", "mismatch", "contexts")
    split = [
        [arm, *(with_interval(run["split"][part]) if part in run["split"] else "–" for part in parts)]
        for arm, run in r["arms"].items()
    ]
    steps = next(iter(r["arms"].values()))["steps"]
    return (
        f"{table(['first to last third', *titles], rows)}\n\n{table(['change of acceptance', *parts], split)}"
        f"\n\nOne run of {steps} steps per arm; intervals of the split are over the contexts and steps of a "
        "run, not over runs."
    )


def pools(r: Any) -> str:
    """Compare pools of answers to train a draft on, with a frozen draft and with one another."""
    rows = []
    for arm, row in r["table"].items():
        rejection = row["rejection"]
        answers = row["answers"]
        rows.append(
            [
                arm,
                "–" if arm == "frozen" else f"{min(answers)} to {max(answers)}",
                f"{rejection['mean'][0]:.3f}",
                difference(rejection, "frozen", "runs"),
                difference(rejection, "e2e TV, all", "runs"),
                difference(rejection, "online", "runs"),
                difference(row["out of domain"], "frozen", "runs"),
            ]
        )
    head = ["trained on", "answers", "accepted of 3", "minus frozen", "minus e2e TV, all"]
    outside = "out of domain, minus frozen"
    settings = r["settings"]
    return (
        f"{table([*head, 'minus trained along the way', outside], rows)}\n\n{settings['steps']} steps of "
        f"{settings['batch']} answers; rejection."
    )


def corrections(r: Any) -> str:
    """Tabulate the exact distance between a stale policy and the last one that each correction leaves."""
    rows = []
    for age, by_rule in r["by age"].items():
        for name, row in by_rule.items():
            if name == "kl":
                continue
            rows.append(
                [
                    f"{age} updates, KL {by_rule['kl'][0]:.3f}" if name == "none" else "",
                    name,
                    "{:.3f} [{:.3f}, {:.3f}]".format(*row["bias"]),
                    "–" if name == "OBRS" else with_interval(row["bias, minus OBRS"]),
                    f"{row['share'][0]:.3f}",
                    f"{row['masked'][0]:.3f}",
                    f"{row['uneven'][0]:.3f}",
                ]
            )
    head = ["age", "correction", "bias", "bias, minus OBRS", "share", "masked", "uneven"]
    return f"{table(head, rows)}\n\n{r['runs']} RL runs, 95% over runs."


def advice(r: Any) -> str:
    """Tabulate the share of speed that is lost by each way of choosing rule and gamma, by batch."""
    ways = ("here", "elsewhere", "default", "never")
    rows = []
    for batch, row in r["batches"].items():
        cells = [batch, *("{:.1%} [{:.1%}, {:.1%}]".format(*row[way]) for way in ways)]
        best = [one["best speed"] for one in row["domains"].values()]
        rows.append([*cells, f"{min(best):.2f} to {max(best):.2f}"])
    head = ["batch", "measured here", "measured elsewhere", "rejection, gamma 3", "no drafts"]
    counts = r["answers"].values()
    return (
        f"{table([*head, 'speed of the best'], rows)}\n\nShare of speed lost against the best of 3 rules and "
        f"gamma 0 to 3; {len(r['answers'])} domains of {min(counts)} to {max(counts)} answers, 95% over "
        "domains."
    )


def choices(r: Any) -> str:
    """Tabulate the share lost by each way of choosing drafter and training, and where it loses most."""
    rows = []
    for question, found in r["questions"].items():
        base = found["base"]
        for way, row in found["ways"].items():
            worst = max(row["units"], key=row["units"].__getitem__)
            rows.append(
                [
                    question if way == next(iter(found["ways"])) else "",
                    way,
                    "{:.1%} [{:.1%}, {:.1%}]".format(*row["lost"]),
                    f"{row['units'][worst]:.1%}, {worst}",
                    "–"
                    if way == base
                    else difference(row, base, "units")
                    if any(row[f"minus {base}"])
                    else "same",
                ]
            )
    head = ["question", "choice", "share lost", "most, and where", "minus the choice marked –"]
    return (
        f"{table(head, rows)}\n\n"
        + "; ".join(f"{question}: {len(found['units'])} units" for question, found in r["questions"].items())
        + ". 95% over units."
    )
