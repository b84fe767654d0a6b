"""Answers about time: of a training step and its parts (also in TRL), of turns, and of weight updates."""

from __future__ import annotations

from typing import Any

from answers.tables import goal, table


def against_trl(r: Any) -> str:
    """Compare the time of equal work with TRL."""
    arms, rows = r["arms"], []
    for label, ours, trl in (
        ("the recipe's prompts", "async_none", "trl"),
        ("short prompts", "short_none", "short_trl"),
    ):
        ratio = arms[trl]["median_s"] / arms[ours]["median_s"]
        tokens = round(arms[ours]["prompt_tokens"])
        rows.append(
            [
                f"{label}, {tokens} tokens",
                f"{arms[ours]['median_s']:.2f}",
                f"{arms[trl]['median_s']:.2f}",
                f"{ratio:.2f}",
            ]
        )
    held = all(float(row[3]) >= 1.8 for row in rows)
    head = ["seconds a step, median", "rlpipe, staleness 1", f"TRL {r['versions']['trl']}", "ratio"]
    return table(head, rows) + "\n\nNo drafts on either side. " + goal(held, "1.8 times")


def asynchrony_in_brief(r: Any) -> str:
    """Report how much longer a synchronous step takes."""
    return f"{r['ratios']['mean']['sync_none / async_none']:.2f}x"


def slow(r: Any) -> str:
    """Report step times with slow environments."""
    fast, sync = r["arms"]["slow_async"], r["arms"]["slow_sync"]
    ratio = sync["mean_s"] / fast["mean_s"]
    return (
        f"{ratio:.2f} times by the mean step ({fast['mean_s']:.2f} s at staleness 2, {sync['mean_s']:.2f} s "
        f"synchronous) where one episode in twenty waits 4 s before each answer. The engine is busy "
        f"{fast['utilisation']['rollout']:.0%} of the time instead of {sync['utilisation']['rollout']:.0%}. "
        + goal(ratio >= 1.5, "1.5 times")
    )


def tail(r: Any) -> str:
    """Report step times with long answers."""
    labels = {"tail200": "200 tokens", "tail300": "300 tokens"}
    rows, alone = [], []
    for key, label in labels.items():
        arms, before = r[key]["arms"], r["tail200 and tail300, before"]["arms"]
        here, apart = arms[f"{key}_async"]["mean_s"], arms[f"{key}_apart"]["mean_s"]
        both = (arms if f"{key}_sync" in arms else before)[f"{key}_sync"]["mean_s"]
        base = here if f"{key}_sync" in arms else before[f"{key}_async"]["mean_s"]
        alone.append(apart / here)
        rows.append([label, f"{here:.2f}", f"{apart / here:.2f}", f"{both / base:.2f}"])
    head = [
        "one turn in twenty longer by",
        "s a step, staleness 2",
        "gain over synchronous, same placement",
        "gain over synchronous, both cores for each phase",
    ]
    return table(head, rows) + "\n\nBy the mean step. " + goal(min(alone) >= 1.5, "1.5 times, same placement")


def overhead(r: Any) -> str:
    """Report the cost of ledger and metrics."""
    return (
        f"{r['cpu_share_percent']:.2f}% of the processor time of a step, {r['wall_share_percent']:.2f}% by "
        "the clock. " + goal(r["wall_share_percent"] < 2, "under 2%")
    )


def grading_cost(r: Any) -> str:
    """Compare grading with tests and code in two processes with grading in one process."""
    names = ("grading wall", "grading cpu", "episode wall", "episode cpu")
    rows = [[name, r[name]["here, ms"], r[name]["baseline, ms"], r[name]["ratio"]] for name in names]
    held = goal(max(row[3] for row in rows[2:]) <= 1.3, "1.3 times an episode")
    return table(["median, ms", "two processes", f"one ({r['baseline']})", "ratio"], rows) + "\n\n" + held


def agent_turns(r: Any) -> str:
    """Report the turns of agents if more agents run than an engine has rows."""
    used, rows, cpu = r["config"], [], []
    for sessions, measured in r["results"].items():
        arms = measured["arms"].values()
        cpu.append([arm["cpu_ms_per_turn"] for arm in arms])
        columns = [
            [f"{arm['turns_per_s']:.1f}" for arm in arms],
            [f"{arm['idle']:.0%}" for arm in arms],
            [f"{each:.0f}" for each in cpu[-1]],
            [f"{arm['prefill_tokens_per_turn']:.0f}" for arm in arms],
        ]
        times = f"{measured['parked / recompute']:.2f}"
        rows.append([sessions.split()[0], times, *map(" → ".join, columns)])
    head = ["sessions an engine", "times the turns, parked", "turns per second", "engine idle"]
    head += ["ms of a processor a turn", "prompt tokens a turn"]
    ratios = [measured["parked / recompute"] for measured in r["results"].values()]
    bounded = ", bounded by memory" * any("bounded / parked" in each for each in r["results"].values())
    return "\n\n".join(
        [
            f"{used['workers']} embedded engines of {used['rows']} rows; tool times as recorded in a run of "
            f"the main job, times {used['speed']}; computed again → parked{bounded.replace(', ', ' → ')}, "
            f"median of {used['repeats']}:",
            table(head, rows),
            goal(max(ratios) >= 1.5, "1.5 times the turns"),
            goal(all(each[-1] <= each[0] for each in cpu), "never more of a processor"),
            goal(min(ratios) >= 1, "never slower"),
            f"With as many rows as sessions all arms do the same. Load average "
            f"{r['load_average_before'][0]:.0f} before, {r['load_average_after'][0]:.0f} after.",
        ]
    )


def sglang_turns(r: Any) -> str:
    """Report the cost of short turns on an SGLang server."""
    turns, before, load = r["results"]["turns"], r["settings"]["before"], r["machine"]
    speeds = turns["tokens_per_s"]
    ratios = [now / then for now, then in zip(speeds["now"], speeds["before"], strict=True)]
    used = {arm: sum(cpu.values()) for arm, cpu in turns["cpu_ms_per_1000_tokens"].items()}
    lines = [
        f"64 trajectories, {turns['tokens_a_turn']:.0f} tokens a turn, {len(ratios)} runs: "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} times the tokens per second of {before}, and "
        f"{used['now']:.0f} ms of processor time per 1,000 tokens instead of {used['before']:.0f}, server "
        "and worker. " + goal(min(ratios) >= 1.3, "1.3 times in each")
    ]
    cells = r["results"]["answers"]
    rows = [
        [cell, *(f"{values['cpu_ms_per_1000_tokens'][arm]:.1f}" for arm in ("lists", "before", "now"))]
        for cell, values in cells.items()
    ]
    head = ["worker, ms per 1,000 tokens", "SGLang's lists", f"packed, {before}", "now"]
    worst = max(values["now / lists"] for values in cells.values())
    lines += [table(head, rows), goal(worst <= 1 / 3, "a third of the lists'")]
    lines += [f"Load average {load['load_before']:.0f} before and {load['load_after']:.0f} after."]
    return "\n\n".join(lines)


def weight_sync(r: Any) -> str:
    """Tabulate the seconds of one update of two servers, for each transport."""
    labels = {
        "tensor": "in request bodies (removed since): each worker to its server",
        "shared": "`shared`: each worker to its server",
        "collective": "gloo: each worker to its server",
        "disk": "`disk`: each worker for its server",
        "trainer": "`collective`: the trainer to both at once",
    }
    rows = [
        [
            labels[way],
            f"{v['median_s']:.2f} ({min(v['all_s']):.2f} to {max(v['all_s']):.2f})",
            f"{v['bytes_handed_over'] / 1e6:.1f}",
        ]
        for way, v in r["results"].items()
    ]
    return table(["way", "seconds, median and range", "MB handed over"], rows) + (
        f"\n\n{r['weights_bytes'] / 1e6:.1f} MB of weights to two SGLang servers. The machine was very busy "
        f"(load average {r['load_average_before'][0]:.0f}), so only the order says something."
    )


def delta_bytes(r: Any) -> str:
    """Tabulate elements and bytes of the delta of each step."""
    rows = [
        [
            arm,
            str(row["step"]),
            f"{row['share']:.2%}",
            "in full" if row["delta_bytes"] is None else f"{row['delta_bytes'] / row['whole_bytes']:.1%}",
        ]
        for arm, steps in r["results"].items()
        for row in steps
    ]
    return table(["training", "step", "elements with other bits", "bytes sent, of a full update"], rows)


def revisions(r: Any) -> str:
    """Report how many values of each recipe are equal over each span of commits, and why others differ."""
    recipes = list(r["settings"])
    rows = []
    for part in r["spans"]:
        found = part["recipes"]
        cells = [f"{found[n]['equal']} of {found[n]['of']}" if n in found else "" for n in recipes]
        rows.append([f"{part['before']} to {part['after']}", *cells])
    return table(["commits", *recipes], rows) + (
        "\n\nEvery difference is on purpose. A batch without a signal leaves policy, optimizer and learning "
        "rate alone (6a9b81d) and counts no trained token (4993450); agent_rl and reasoning_rl have such "
        "batches. Softmax denominators are exact (983aea2), shared prefixes go through flash attention "
        "(e7d7a94), logprobs come from hidden states (d013196): gradients are rounded otherwise. Between "
        "these all is equal, except for the hit rate of a sandbox's memory, a race. jackpot failed from "
        "d013196 to a98a5de, where it begins again."
    )
