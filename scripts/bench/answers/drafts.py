"""Answers about drafters and objectives, and about the reasons for which acceptance changes."""

from __future__ import annotations

from typing import Any

from answers.tables import pm, table, with_interval


def drafters(r: Any) -> str:
    """Tabulate acceptance length and speed by drafter."""
    names = {"mtp": "MTP layer", "suffix": "suffix lookup"}
    rows = [
        [
            cell,
            *(
                f"{arms[name]['acceptance_length']:.2f}, {arms[name]['speed against none']:.2f}"
                for name in names
            ),
        ]
        for cell, arms in r["results"].items()
    ]
    head = ["acceptance length, speed against no drafts", *names.values()]
    return table(head, rows) + (
        "\n\nThe MTP layer was trained on SWE turns and not on the reasoning tasks. A value "
        "below 1 is a loss."
    )


def adapt_objectives(r: Any) -> str:
    """Tabulate the rate of accepted drafts by objective of the MTP layer."""
    sets = [name for name, value in next(iter(r["table"].values())).items() if value["in_domain"]]
    best = sorted(r["table"].items(), key=lambda item: -item[1][sets[0]]["rejection"]["acceptance_rate"][0])

    def percent(pair: list[float]) -> str:
        return f"{100 * pair[0]:.1f} ± {100 * pair[1]:.1f}"

    rows = [
        [name, *(percent(v[sets[0]][rule]["acceptance_rate"]) for rule in ("rejection", "target_only"))]
        for name, v in best
    ]
    return table(["objective, % of drafts accepted", "rejection", "target-only"], rows) + (
        f"\n\nAfter {r['settings']['steps']} steps, {len(r['settings']['seeds'])} seeds, {sets[0]}; errors "
        "are of prompts, not of seeds."
    )


def ppow(r: Any) -> str:
    """Compare reinforcement learning of the draft with supervised training."""
    sets = "swe.held_instances"
    rows = [[n, pm(v[sets]["rejection"]["acceptance_length"])] for n, v in r["table"].items()]
    return table(["draft", "acceptance length"], rows)


def compare(r: Any) -> str:
    """Compare drafters and objectives after equal steps."""
    cell = r["cells"]["swe turns, T = 1"]["arms"]
    rows = [
        [n, pm(v["acceptance_length"]), v["speed against none"]]
        for n, v in cell.items()
        if "acceptance_length" in v
    ]
    return table(["SWE turns, T = 1", "acceptance length", "speed against no drafts"], rows)


def eagle3(r: Any) -> str:
    """Tabulate which parts make an EAGLE-3 draft good."""
    labels = {
        "eagle3": "all of it",
        "no_test": "without the training-time test",
        "top": "features of the top layer only",
        "small_vocab": "a reduced vocabulary",
    }
    cell = r["table"]["swe.held_instances"]
    return table(
        ["draft", "acceptance length"], ([labels[n], pm(v["acceptance_length"])] for n, v in cell.items())
    )


def slope(r: Any) -> str:
    """Report the slope of acceptance against entropy, per token, over temperatures of one policy."""
    rows = [
        [name, f"{v['per_token']['value']:.2f} [{v['per_token']['low']:.2f}, {v['per_token']['high']:.2f}]"]
        for name, v in r["sweep"].items()
    ]
    return table(["objective / rule", "change of acceptance per nat of entropy, 95% interval"], rows)


def figure8(r: Any) -> str:
    """Tabulate the split of the change of acceptance during RL."""
    rows = [
        [
            name,
            *(
                f"{v[part]['value']:+.3f} [{v[part]['low']:+.3f}, {v[part]['high']:+.3f}]"
                for part in ("total", "entropy", "mismatch")
            ),
        ]
        for name, v in r.items()
    ]
    return table(["draft", "change of acceptance", "along the slope on entropy", "the rest"], rows) + (
        "\n\n95% intervals, one seed. The slope is that between the run's own early steps, which is not what "
        "entropy itself does: see the next question."
    )


def draft_objectives(r: Any) -> str:
    """Compare drafts of five objectives after equal steps, in enumerated worlds."""
    rows = []
    for kind, row in r["objectives"].items():
        cells = [kind]
        for where in ("in domain", "out of domain"):
            gap = row.get(f"{where}, rejection, minus kl")
            cells += [f"{row[f'{where}, rejection'][0]:.3f}", "–" if gap is None else with_interval(gap)]
        gap = row.get("in domain, target-only, minus kl")
        cells += [f"{row['in domain, target-only'][0]:.3f}", "–" if gap is None else with_interval(gap)]
        cells += [f"{row[f'in domain, {name}'][0]:+.3f}" for name in ("entropy gap", "kl")]
        curve = row["acceptance by step and depth"]
        cells += [
            " / ".join(f"{x:.3f}" for x in point) for point in (curve[0], curve[len(curve) // 2], curve[-1])
        ]
        rows.append(cells)
    head = ["objective", "accepted of 3", "minus kl", "other anchors", "minus kl", "target-only", "minus kl"]
    head += ["entropy gap", "KL(p‖q)", "depths 1 / 2 / 3 at the start", "half way", "end"]
    found = r["correlations"]
    return (
        f"{table(head, rows)}\n\nMeans of {r['worlds']} worlds, 95% over worlds. Over all {found['drafts']} "
        f"drafts acceptance correlates with the entropy gap by {found['entropy gap']:+.2f}, with KL(p‖q) by "
        f"{found['kl']:+.2f}, with KL(q‖p) by {found['reverse kl']:+.2f}."
    )


def draft_in_rl(r: Any) -> str:
    """Compare a frozen and a trained draft while RL lowers entropy, in enumerated worlds."""
    rows = []
    for name, row in r["rl"].items():
        cells = [name, f"{row['rejection']['over steps'][0]:.3f}", with_interval(row["rejection"]["change"])]
        for other in ("TV, frozen", "TV, online TV"):
            gap = row["rejection"].get(f"end minus {other}")
            cells.append("–" if gap is None else with_interval(gap))
        cells += [f"{row['target-only']['over steps'][0]:.3f}", with_interval(row["target-only"]["change"])]
        cells += [" / ".join(f"{row[f'depth {k}']['change'][0]:+.3f}" for k in (1, 2, 3))]
        for figure in ("entropy gap", "kl", "alpha q>p", "alpha p>q"):
            cells.append(f"{row[figure]['over steps'][0]:.2f} to {row[figure]['end'][0]:.2f}")
        rows.append(cells)
    head = [
        "draft, during RL",
        "rejection, of 3",
        "change",
        "end minus TV, frozen",
        "end minus TV, online TV",
    ]
    head += ["target-only, of 3", "change", "change by depth", "entropy gap", "KL(p‖q)"]
    head += ["alpha, q > p", "alpha, p > q"]
    entropy = next(iter(r["rl"].values()))["entropy"]
    return (
        f"{table(head, rows)}\n\nMeans of {r['worlds']} worlds, 95% over worlds. The policy's entropy falls "
        f"from {entropy['over steps'][0]:.2f} to {entropy['end'][0]:.2f} nats."
    )


def ppow_windows(r: Any) -> str:
    """Report PPOW's switch to ADAW, learning rates, candidate windows, and easy and hard windows."""
    switch, rates, candidates, hardness = (r[p] for p in ("switch", "rates", "candidates", "hardness"))
    lines = [
        f"Switch to ADAW: reward {switch['reward, before'][0]:.3f} before, "
        f"{with_interval(switch['reward, after - reward, before'])} after; KL(q‖p) "
        f"{switch['kl, before'][0]:.3f}, {with_interval(switch['kl, after - kl, before'])}; "
        f"reward by the end {with_interval(switch['reward, end - reward, after'])}."
    ]
    lrs = [name.split(", ")[1] for name in rates if name.startswith("kl,") and name.endswith(" end")]
    rows = [
        [
            lr,
            *(f"{rates[f'{arm}, {lr}, end'][0]:.3f}" for arm in ("kl", "ppow", "e2e_tv")),
            *(with_interval(rates[f"{arm}, {lr}, end - kl, {lr}, end"]) for arm in ("ppow", "e2e_tv")),
            with_interval(rates[f"kl, {lr}, end - kl, {lr}, third"]),
        ]
        for lr in lrs
    ]
    head = [
        "learning rate",
        "KL",
        "PPOW",
        "e2e TV",
        "PPOW minus KL",
        "e2e TV minus KL",
        "KL, end minus a third",
    ]
    lines.append(table(head, rows))
    counts = [name.split(", ")[1] for name in candidates if name.startswith("start,")]
    rows = [
        [
            count,
            *(f"{candidates[f'{arm}, {count}'][0]:.3f}" for arm in ("start", "ppow", "e2e_tv")),
            *(with_interval(candidates[f"{arm}, {count} - start, {count}"]) for arm in ("ppow", "e2e_tv")),
        ]
        for count in counts
    ]
    head = ["candidate windows", "start", "PPOW", "e2e TV", "PPOW minus start", "e2e TV minus start"]
    lines.append(table(head, rows))
    columns = ["easy, accepted", "hard, accepted", "easy, nabla", "hard, nabla"]
    rows = [
        [name, *(f"{hardness[f'{name}, {column}'][0]:.3f}" for column in columns)]
        for name in ("start", "ppow", "ppow, R_dist", "kl", "e2e_tv")
    ]
    rows.append(
        [
            "R_dist minus without",
            *(with_interval(hardness[f"ppow, R_dist, {c} - ppow, {c}"]) for c in columns),
        ]
    )
    lines.append(table(["windows", *columns], rows))
    return "\n\n".join([*lines, f"Means of {r['worlds']} worlds, 95% over worlds."])


def linear_drafts(r: Any) -> str:
    """Tabulate acceptance of drafts that are linear in SmolLM2's features, by inputs and number of texts."""
    rows = []
    for name, row in r["drafts"].items():
        cells = [
            name,
            *(f"{row[key][0]:.3f}" if key in row else "" for key in ("depth 1", "depth 2", "depth 3")),
        ]
        for key in ("depth 1", "accepted of 3"):
            gap = row.get(f"{key}, minus EAGLE")
            cells.append("–" if gap is None else with_interval(gap))
        rows.append(cells)
    head = ["draft", "depth 1", "depth 2", "depth 3", "depth 1, minus EAGLE", "accepted of 3, minus EAGLE"]
    sizes = []
    for count, row in r["by texts"].items():
        gaps = [with_interval(value) for key, value in row.items() if key.startswith("depth 1, minus")]
        sizes.append(f"{count}: {row['depth 1'][0]:.3f}" + "".join(f" ({gap})" for gap in gaps))
    return (
        f"{table(head, rows)}\n\nBy the number of texts fitted on, depth 1 of EAGLE, and the gain on the "
        f"fewest: {'; '.join(sizes)}. {r['held out']} held-out answers, {r['anchors'][1]} "
        "anchors, 95% over answers."
    )
