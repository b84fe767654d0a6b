"""How the answers of docs/benchmarks.md read: from the contents of a result file to Markdown.

One function per answer that is more than a sentence with figures; `figures.toml` names them. Nothing here is
a figure: every number comes from the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean, median
from typing import Any


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def goal(held: bool, text: str) -> str:
    """What was wanted, and whether it was reached."""
    return f"Goal: {text}, {'**held**' if held else '**not held**'}."


def pm(pair: list[float], digits: int = 2) -> str:
    """A value and its standard error."""
    return f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"


def quickstart(r: Any) -> str:
    """Seconds of the newcomer's first command."""
    if "parts" not in r:  # a result of before the parts were written
        parts, rewards = {"installation": r["installation_s"]}, [r["val_reward"]]
    else:
        parts = {name: seconds for name, seconds in r["parts"].items() if seconds}
        several = [values for name, values in r["held_out"].items() if name] or r["held_out"].values()
        rewards = [[value for value, _ in values] for values in several]
    before, after = (mean(values) for values in zip(*rewards, strict=True))
    return (
        f"{r['seconds']:.0f} s from a fresh clone with an empty HOME "
        f"({', '.join(f'{name} {seconds} s' for name, seconds in parts.items())}; {r['cores']} cores, load "
        f"average {r['load_average_before'][0]:.1f} before and {r['load_average_after'][0]:.1f} after). "
        f"Held-out reward {before:.3f} to {after:.3f}. "
        + goal(r["seconds"] < r.get("goal", 720), f"{r.get('goal', 720)} s")
    )


def swe(r: Any) -> str:
    """Held-out reward of the main job, by seed and mode."""
    rows = [
        [
            name.replace("-", ", seed "),
            *(
                f"{run[kind]['before']:.3f} to {run[kind]['after']:.3f} ± {run[kind]['se_after']:.3f}"
                for kind in ("held_instances", "held_families")
            ),
        ]
        for name, run in r["runs"].items()
    ]
    return table(["run", "new instances", "new families"], rows)


def real_model(r: Any) -> str:
    """Held-out reward of a released model over seeds, by task."""
    tasks = {name: r["over_seeds"][name] for name in ("start", "short", "keywords", "largest", "mean")}
    rows = [
        [
            name,
            f"{row['before']['mean']:.3f}",
            f"{row['after']['mean']:.3f}",
            f"{row['gain']['mean']:.3f} [{row['gain']['interval'][0]:.2f}, {row['gain']['interval'][1]:.2f}]",
        ]
        for name, row in tasks.items()
    ]
    runs = r["by_seed"].values()
    minutes = ", ".join(f"{run['minutes']['run']:.1f}" for run in runs)
    parts = ("wait_rollout", "update_actor", "validate")
    generation, training, validation = (median(run["minutes"][part] for run in runs) for part in parts)
    first, last = (mean(run["entropy"][end] for run in runs) for end in (0, 1))
    gain = r["over_seeds"]["mean"]["gain"]["mean"]
    return (
        table(["task", "before", "after", "gain, 95% interval over seeds"], rows)
        + f"\n\n{len(runs)} seeds, {next(iter(runs))['steps']} steps of 64 answers. "
        f"Minutes of a run: {minutes}; of the middle one {generation:.1f} are "
        f"generation, {training:.1f} training, {validation:.1f} "
        f"validation. Entropy {first:.2f} to {last:.2f} nats a token. "
        + goal(gain >= 0.45, "a mean gain of 0.45")
    )


def over_seeds(r: Any) -> str:
    """Held-out reward before and after, and the gain, over seeds; by held-out set where there are several."""
    sets = {"": r["over_seeds"]} if "gain" in r["over_seeds"] else r["over_seeds"]
    texts = []
    for name, row in sets.items():
        low, high = row["gain"]["interval"]
        shown = "a gain" if low > 0 else "no gain is shown, the interval covers 0"
        texts.append(
            f"{name}{': ' if name else ''}{row['before']['mean']:.3f} to {row['after']['mean']:.3f}, "
            f"difference {row['gain']['mean']:.3f} [{low:.2f}, {high:.2f}] ({shown})."
        )
    minutes = ", ".join(f"{run['minutes']:.1f}" for run in r["by_seed"].values())
    return (
        " ".join(texts) + f" {len(r['by_seed'])} seeds, 95% interval over them; minutes of a run: {minutes}."
    )


def against_trl(r: Any) -> str:
    """Equal work against TRL."""
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


def slow(r: Any) -> str:
    """Slow environments."""
    fast, sync = r["arms"]["slow_async"], r["arms"]["slow_sync"]
    ratio = sync["mean_s"] / fast["mean_s"]
    return (
        f"{ratio:.2f} times by the mean step ({fast['mean_s']:.2f} s at staleness 2, {sync['mean_s']:.2f} s "
        f"synchronous) where one episode in twenty waits 4 s before each answer. The engine is busy "
        f"{fast['utilisation']['rollout']:.0%} of the time instead of {sync['utilisation']['rollout']:.0%}. "
        + goal(ratio >= 1.5, "1.5 times")
    )


def tail(r: Any) -> str:
    """Long answers."""
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
    """Ledger and metrics."""
    return (
        f"{r['cpu_share_percent']:.2f}% of the processor time of a step, {r['wall_share_percent']:.2f}% by "
        "the clock. " + goal(r["wall_share_percent"] < 2, "under 2%")
    )


def grading_cost(r: Any) -> str:
    """Tests and code in two processes against one process for both."""
    names = ("grading wall", "grading cpu", "episode wall", "episode cpu")
    rows = [[name, r[name]["here, ms"], r[name]["baseline, ms"], r[name]["ratio"]] for name in names]
    held = goal(max(row[3] for row in rows[2:]) <= 1.3, "1.3 times an episode")
    return table(["median, ms", "two processes", f"one ({r['baseline']})", "ratio"], rows) + "\n\n" + held


def rollout_speed(r: Any) -> str:
    """The embedded engine against transformers."""
    rows = []
    for cell, values in r["results"]["shipped float32"].items():
        length = values["arms"]["rejection"]["acceptance_length"]
        ratios = values["ratios"]
        rows.append(
            [cell, ratios.get("none / transformers", ""), ratios["rejection / none"], f"{length:.2f}"]
        )
    head = ["workload", "without drafts, against transformers", "drafts against none", "acceptance length"]
    text = "`fixed` decodes 128 tokens a prompt; `turns` runs real turns of about ten tokens. One thread. "
    fixed = [row for row in rows if row[0].startswith("fixed")]
    return f"{table(head, rows)}\n\n{text}" + goal(
        all(row[1] >= 1.5 for row in fixed), "1.5 times transformers"
    )


def acceptance(r: Any) -> str:
    """Acceptance length by rule and temperature."""
    cells = r["results"]["acceptance"]
    rules = list(dict.fromkeys(name.split(" T=")[0] for name in cells))
    temperatures = list(dict.fromkeys(name.split(" T=")[1] for name in cells))
    rows = [[rule, *(pm(cells[f"{rule} T={t}"]["length"], 3) for t in temperatures)] for rule in rules]
    return table(["acceptance length", *(f"T = {t}" for t in temperatures)], rows) + (
        "\n\nOf 4 possible (three drafts and one token of the model), the shipped model on its own tasks."
    )


def drafters(r: Any) -> str:
    """Acceptance length and speed by drafter."""
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


def adaptive(r: Any) -> str:
    """Adaptive gamma against the best fixed gamma."""
    cells = {cell: value for run in r["runs"] for cell, value in run["results"].items()}
    batches = sorted({int(cell.split("batch ")[1]) for cell in cells})
    rows = []
    for batch in batches:
        row: list[Any] = [batch]
        for work in ("swe", "reasoning"):
            value = cells[f"{work}, batch {batch}"]
            low, high = value["adaptive / best, 95% interval"]
            row += [value["best"], f"{value['adaptive / best']:.2f} [{low:.2f}, {high:.2f}]"]
        rows.append(row)
    lowest = min(value["adaptive / best"] for value in cells.values())
    head = ["batch", "SWE: best", "adaptive against it", "reasoning: best", "adaptive against it"]
    return table(head, rows) + "\n\n" + goal(lowest >= 0.95, "0.95 of the best fixed gamma in each cell")


def server_widths(r: Any) -> str:
    """A server's adaptive drafts against each fixed number of them."""
    rows = [
        [
            cell,
            *(value["arms"][arm]["tokens_per_s"] for arm in value["arms"]),
            f"{value['adaptive / best']:.2f} of {value['best']}",
        ]
        for cell, value in r["results"].items()
    ]
    lowest = min(value["adaptive / best"] for value in r["results"].values())
    whole = r["adaptive / fixed over the whole load"]
    times = ", ".join(f"{arm} {ratio:.2f}" for arm, ratio in whole.items())
    first = next(iter(r["results"].values()))
    return (
        table(["", *(f"{arm}, tokens/s" for arm in first["arms"]), "adaptive"], rows)
        + f"\n\nOver the whole load, times the speed of {times}. "
        + goal(
            lowest >= 0.95 and min(whole.values()) > 1,
            "0.95 of the best in each cell, above each on the whole",
        )
    )


def server_plugin(r: Any) -> str:
    """Servers with the plugin against stock ones."""
    rows, ratios = [], {}
    for batch, arms in r["batches"].items():
        ratios[batch] = arms["plugin / stock"]
        plugin, stock = arms["plugin"], arms["stock"]
        speeds = [
            f"{median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})"
            for speeds in (plugin["tokens_per_s"], stock["tokens_per_s"])
        ]
        used = [x["cpu_s_per_1000_tokens"]["scheduler"] for x in (plugin, stock)]
        rows.append([batch, *speeds, f"{ratios[batch]:.2f}", *used])
    head = [
        "batch",
        "plugin, tokens/s",
        "stock",
        "ratio",
        "plugin, scheduler's CPU s per 1,000 tokens",
        "stock",
    ]
    held = ratios.get("8", 0) >= 1.15 and min(ratios.values()) >= 1
    return (
        table(head, rows)
        + f"\n\nMedian and range of waves in turns; load average {r['machine']['load']:.1f} at the end. "
        + goal(held, "1.15 at batch 8, never below 1")
    )


def verify(r: Any) -> str:
    """Verification on a CPU at a real vocabulary."""
    ratios = {cell: value["ratios"]["python loop / torch"] for cell, value in r["results"].items()}
    batches = list(dict.fromkeys(cell.split(", gamma")[0].split("batch ")[1] for cell in ratios))
    gammas = list(dict.fromkeys(cell.split("gamma ")[1] for cell in ratios))
    rows = [
        [b, *(next(v for c, v in ratios.items() if f"batch {b}, gamma {g}" in c) for g in gammas)]
        for b in batches
    ]
    held = sum(ratio >= 3 for ratio in ratios.values())
    return table(["batch", *(f"gamma {g}" for g in gammas)], rows) + (
        f"\n\nTimes as fast as a Python loop over rows, V = 151,936, chain rule. Goal: 3 times, **held in "
        f"{held} of {len(ratios)}** cells."
    )


def agent_turns(r: Any) -> str:
    """Turns of agents where more of them are at work than an engine has rows."""
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


def certificates(r: Any) -> str:
    """What `rlpipe certify` says of servers, the lines that it judged, and its minutes."""
    names = {
        "plain": "stock SGLang, no drafts",
        "stock": "stock SGLang, MTP drafts, rejection sampling",
        "stock_greedy": "stock SGLang, MTP drafts, its default verification",
        "plugin": "SGLang with rlpipe's plugin, MTP drafts, rejection sampling",
        "stale_draft": "the same, noise of 30% on the draft's weights",
        "other_weights": "the same, noise of 3% on the model's weights",
        "transformers": "`transformers serve`",
        "transformers_sampling": "`transformers serve`, sampling switched on",
    }
    rows = []
    for server, found in r["results"].items():
        lines = found["lines"].values()
        judged = [line for line in lines if line["passed"] is not None]
        least = min(line["p"] for line in judged if line["p"] is not None)
        rows.append(
            [
                names[server],
                f"**{', '.join(found['causes'])}**" if found["causes"] else "no fault",
                f"{len(judged)} of {len(lines)}",
                f"{least:.2g}",
                f"{found['samples']:,}",
                f"{found['minutes']:.1f}",
            ]
        )
    head = ["server", "found", "lines judged", "least p of a line", "samples", "minutes"]
    return (
        table(head, rows) + "\n\nA line fails below p = .002, or where numbers differ by more than rounding."
    )


def sglang_turns(r: Any) -> str:
    """Short turns on an SGLang server."""
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
    """One update of two servers."""
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
    """Elements and bytes of the delta of each step."""
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


def adapt_objectives(r: Any) -> str:
    """Objectives of the MTP layer, as a rate of accepted drafts."""
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
    """Reinforcement learning of the draft against supervision."""
    sets = "swe.held_instances"
    rows = [[n, pm(v[sets]["rejection"]["acceptance_length"])] for n, v in r["table"].items()]
    return table(["draft", "acceptance length"], rows)


def compare(r: Any) -> str:
    """Drafters and objectives at equal steps."""
    cell = r["cells"]["swe turns, T = 1"]["arms"]
    rows = [
        [n, pm(v["acceptance_length"]), v["speed against none"]]
        for n, v in cell.items()
        if "acceptance_length" in v
    ]
    return table(["SWE turns, T = 1", "acceptance length", "speed against no drafts"], rows)


def eagle3(r: Any) -> str:
    """What makes an EAGLE-3 draft good."""
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
    """Acceptance against entropy, per token, over temperatures of one policy."""
    rows = [
        [name, f"{v['per_token']['value']:.2f} [{v['per_token']['low']:.2f}, {v['per_token']['high']:.2f}]"]
        for name, v in r["sweep"].items()
    ]
    return table(["objective / rule", "change of acceptance per nat of entropy, 95% interval"], rows)


def figure8(r: Any) -> str:
    """The split of acceptance's change during RL."""
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


def staleness(r: Any) -> str:
    """Corrections without PPO's clip."""
    arms: dict[str, list[float]] = {}
    for name, run in r["runs"].items():
        arms.setdefault(name.rsplit("-", 1)[0], []).append(run["after"])
    rows = [
        [arm, ", ".join(f"{v:.2f}" for v in values), f"{mean(values):.2f}"] for arm, values in arms.items()
    ]
    start = next(iter(r["runs"].values()))["before"]
    return table(["staleness-correction", "held-out reward of each seed", "mean"], rows) + (
        f"\n\nFrom {start:.3f}. Staleness counts optimizer steps; PPO's clip is off."
    )


def decoupled(r: Any) -> str:
    """A smaller model generates for the policy."""
    rows = [[name, f"{v['before']:.2f} to {pm([v['after'], v['error']])}"] for name, v in r["runs"].items()]
    return table(["correction-seed", "held-out reward"], rows)


def obrs(r: Any) -> str:
    """OBRS brings distributions together."""
    rows = [
        [
            f"{c['noise']}, {c['level']}",
            f"{c['kl_before']:.2g}",
            f"{c['acceptance_1.0']:.3f}",
            f"{c['kl_after_1.0']:.2g}",
        ]
        for c in r["contraction"]
    ]
    return table(["disturbance", "KL before", "accepted at lambda 1", "KL after"], rows)


def gpu_decoding(r: Any) -> str:
    """SGLang on a GPU."""
    cells = r["results"]["sglang, 7.8B, bf16, gamma 3, 200 tokens"]
    rows = [
        [batch, cell["none"]]
        + [
            f"{cell[mode]} ({cell[mode] / cell['none']:.2f} times, length {cell['acceptance_length'][mode]})"
            for mode in ("target_only", "rejection")
        ]
        for batch, cell in cells.items()
    ]
    return table(["batch", "none, tokens/s", "target_only", "rejection"], rows) + (
        "\n\n7.8B parameters grown from the shipped model, bf16, gamma 3, 200 tokens."
    )


def gpu_loop(r: Any) -> str:
    """Where the time of a step goes on a GPU."""
    arms = r["results"]["whole loop, 1.5B, one shared GPU"]
    rows = [
        [arm]
        + [" and ".join(map(str, v[key])) for key in ("generation_s", "update_weights_s", "step_s")]
        + [f"{v['tokens_per_s']:,}"]
        for arm, v in arms.items()
    ]
    ratio = mean(arms["none"]["generation_s"]) / mean(arms["rejection"]["generation_s"])
    return table(["", "generation, s", "weight update, s", "step, s", "tokens/s"], rows) + (
        f"\n\nTwo steps each, 1.5B parameters, server and trainer on one card, weights by disk. Without "
        f"drafts generation takes {ratio:.2f} times as long. Not repeated since."
    )


def gpu_verify(r: Any) -> str:
    """The verification kernel on a GPU."""
    rows = r["results"]["verification, V = 151936, chain, us"]

    def text(value: Any) -> str:
        return f"{value[0]} to {value[1]}" if isinstance(value, list) else str(value)

    ours, theirs = rows["ours, in a CUDA graph"], rows["sglang, in a CUDA graph"]
    return table(
        ["batch", "rlpipe, microseconds", "SGLang's"], ([b, text(ours[b]), text(theirs[b])] for b in ours)
    ) + (
        "\n\nIn a CUDA graph. The embedded engine verifies by these kernels on a GPU, servers by others. "
        "Called from Python rlpipe's takes "
        f"{text(rows['ours, called from Python'])} and SGLang's {text(rows['sglang, called from Python'])}."
    )


def verify_vocabularies(r: Any) -> str:
    """Verification on a CPU by vocabulary."""
    rows = []
    for vocab in sorted(r["config"]["vocabs"]):
        cells = {c: v["ratios"] for c, v in r["results"].items() if c.startswith(f"chain, vocab {vocab},")}
        for batch in r["config"]["batches"]:
            ratios = [v for c, v in cells.items() if f"batch {batch}," in c]
            kinds = ("python loop / torch", "plain torch / torch")
            rows.append([f"{vocab:,}", batch, *(" and ".join(f"{v[k]:.2f}" for v in ratios) for k in kinds)])
    head = ["vocabulary", "batch", "against a Python loop, gamma 1 and 3", "against plain torch"]
    return table(head, rows) + "\n\nTimes as fast, chain rule. Below 1 the loop is faster."


def trainer_memory(r: Any) -> str:
    """Peak memory and seconds of both arms of each part."""
    rows = []
    for row in r["rows"]:
        ours, baseline = ("parts", "masked") if row["part"] == "attention" else ("chunks", "logits")
        figures = [
            f"{row[arm][f]:,.{d}f}" for f, d in (("peak_mb", 0), ("seconds", 1)) for arm in (ours, baseline)
        ]
        rows.append([row["part"], f"{row['tokens']:,}", *figures])
    head = ["part", "tokens", "peak MB", "masked, or all logits", "seconds", "masked, or all logits"]
    return table(head, rows)


def context_parallel(r: Any) -> str:
    """Peak memory of a rank by the number of ranks, and its ratio to that of one."""
    one = r["arms"][0]["peak_mb"]
    rows = [[arm["cp"], f"{arm['peak_mb']:,.0f}", f"{arm['peak_mb'] / one:.2f}"] for arm in r["arms"]]
    return table(["trainer.cp", "peak MB of a rank", "of one rank's"], rows) + (
        f"\n\nOf a step on one conversation of {r['tokens']:,} tokens, beyond weights, gradients and the "
        "optimizer. The norm of the gradient is the same within a millionth."
    )


def memory_estimate(r: Any) -> str:
    """Measured and estimated peaks."""
    every = [*r["rows"], *r["runs"]]
    rows = [[x["name"], x["measured"] >> 20, x["estimated"] >> 20, f"{x['ratio']:.3f}"] for x in every]
    said = "\n\nOn a CPU, beyond what libraries take; a model of 60M parameters or less."
    if r["runs"]:
        said += " The last row is a whole run of SmolLM2-135M-Instruct, libraries and checkpoint included."
    return table(["process", "measured peak, MiB", "estimated", "ratio"], rows) + said


def checkpoint_peaks(r: Any) -> str:
    """Host memory of saving and resuming, against the estimate."""
    rows = [
        [x["name"], x["save"] >> 20, x["estimated"] >> 20, f"{x['ratio']:.3f}", x["resume"] >> 20]
        for x in r["rows"]
    ]
    head = ["ranks", "saving adds, MiB", "estimated", "ratio", "resuming adds, MiB"]
    off = max(x["norm_error"] for x in r["rows"])
    within = f" within {off:.0e}" if off else ""
    return table(head, rows) + (
        "\n\nOf the rank that needs the most, on gloo ranks with the distributed optimizer; a model of 60M "
        f"parameters. The gradient norm of the step after resuming is the same{within}."
    )


def revisions(r: Any) -> str:
    """Equal values of each recipe over each span of commits, and why the others differ."""
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
        "these all is equal, but for the hit rate of a sandbox's memory, a race. jackpot failed from d013196 "
        "to a98a5de, where it begins again."
    )


def drafts_pay(r: Any) -> str:
    """Tokens per second with drafts over none on a real model, and the acceptance that each batch needs."""
    rows, ratios = [], {}
    for cell, row in r["results"].items():
        temperature, batch = cell.removeprefix("T=").split(", batch ")
        over = row["over none"]
        fixed = {arm: ratio for arm, ratio in over.items() if arm.startswith("gamma")}
        best = max(fixed, key=fixed.__getitem__)
        acceptance = row["arms"][best].get("acceptance_by_depth", [])
        need = r["break_even_acceptance"].get(f"batch {batch}, {best}")
        ratios[batch, temperature] = fixed[best], over["adaptive"]
        rows.append(
            [
                batch,
                temperature,
                f"{best}: {fixed[best]:.2f}",
                f"{over['adaptive']:.2f}",
                ", ".join(f"{value:.2f}" for value in acceptance if value is not None),
                "" if need is None else f"{need:.2f}",
            ]
        )
    one = [best for (batch, _), (best, _) in ratios.items() if batch == "1"]
    four = [best for (batch, _), (best, _) in ratios.items() if batch == "4"]
    adaptive = [value for _, value in ratios.values()]
    goals = [goal(min(one) >= 1.3, f"1.3 at batch 1 (least {min(one):.2f})")] if one else []
    goals += [goal(min(four) >= 1.1, f"1.1 at batch 4 (least {min(four):.2f})")] if four else []
    goals.append(goal(min(adaptive) >= 0.99, f"adaptive never below .99 (least {min(adaptive):.2f})"))
    head = ["batch", "temperature", "best gamma, over none", "adaptive, over none", "acceptance by depth"]
    return table([*head, "acceptance that this gamma needs"], rows) + "\n\n" + " ".join(goals)


def generation_speed(r: Any) -> str:
    """Tokens per second of a real model, by engine."""
    names = {name for row in r["results"].values() for name in row["arms"]}
    arms = [
        name for name in ("none", "drafts", "transformers", "sglang", "sglang with plugin") if name in names
    ]
    rows = [
        [cell.removeprefix("batch "), *(row["arms"].get(arm, {}).get("tokens_per_s", "") for arm in arms)]
        for cell, row in r["results"].items()
    ]
    ratios = [row["ratios"].get("none / transformers") for row in r["results"].values()]
    text = "none / transformers: " + ", ".join(f"{ratio:.2f}" for ratio in ratios if ratio) + "."
    if "sglang" in names:
        against = [row["ratios"]["none / sglang"] for row in r["results"].values()]
        text += " none / SGLang: " + ", ".join(f"{ratio:.2f}" for ratio in against) + "."
    floor = r["floor"]
    first = next(iter(r["results"].values()))["ms_per_step_none"]
    return (
        table(["batch", *arms], rows)
        + f"\n\nTokens per second. {text} Reading the {floor['bytes'] / 1e6:.0f} MB of weights once "
        f"takes {floor['ms_per_step']:.1f} ms at the {floor['gb_per_s']:.0f} GB/s measured; a step at batch "
        f"1 takes {first:.1f} ms. "
        + goal(min(ratio for ratio in ratios if ratio) >= 2.5, "2.5 times transformers")
    )


def greedy_equals(r: Any) -> str:
    """Greedy tokens of a real model against transformers'."""
    texts = []
    for name, result in r["results"].items():
        gaps = [one["logit_gap"] for one in result["different"]]
        beside = f" (where not, the two best logits differ by at most {max(gaps):.1e})" if gaps else ""
        label = {"none": "without drafts"}.get(name, f"with {name}")
        texts.append(f"{label} {result['equal']} of {result['prompts']} prompts are equal{beside}")
    held = all(result["equal"] == result["prompts"] for result in r["results"].values())
    tokens = r["config"]["tokens"]
    return f"{tokens} tokens each, float32: {'; '.join(texts)}. {goal(held, 'all, token for token')}"


def real_against_trl(r: Any) -> str:
    """A GRPO run of a released model against TRL: seconds a step, and held-out reward."""
    labels = {
        "rlpipe": "rlpipe",
        "trl_bf16": "TRL, bf16",
        "trl_autocast": "TRL, autocast",
        "trl_fp32": "TRL, fp32",
    }
    rows = [
        [
            labels[arm],
            row["steps"],
            f"{row['seconds_a_step']['median']:.1f}",
            f"{row['response_tokens']:.0f}",
            f"{row['reward_before']['mean']:.3f}",
            f"{row['reward_at_equal_steps']['mean']:.3f}",
            f"{row['reward_at_equal_minutes']['mean']:.3f}",
        ]
        for arm, row in r["arms"].items()
    ]
    head = ["", "steps", "seconds a step", "tokens an answer"]
    head += ["held-out before", "at equal steps", "at equal minutes"]
    texts = []
    for arm, places in r["rlpipe_minus_trl"].items():
        for place, one in places.items():
            low, high = one["interval"]
            shown = "" if low > 0 or high < 0 else ", no difference shown"
            where = place.removeprefix("reward_").replace("_", " ")
            texts.append(f"{labels[arm]}, {where}: {one['mean']:+.3f} [{low:.2f}, {high:.2f}]{shown}")
    ratio = min(r["ratios_of_seconds"].values())
    seeds = len(r["arms"]["rlpipe"]["reward_before"]["seeds"])
    return (
        f"{table(head, rows)}\n\nNo drafts on either side; TRL {r['trl_versions']['trl']}. rlpipe's reward "
        f"minus TRL's, {seeds} paired seeds, 95% interval: {'; '.join(texts)}. TRL takes {ratio:.1f} times "
        f"as long a step. {goal(ratio >= 5, '5 times')}"
    )


def real_first_tokens(r: Any) -> str:
    """G-tests of a real model's tokens by mode."""
    rows = [
        [mode, f"{row['largest_score']:.2f}", f"{max(row['scores_of_a_wrong_law']):.1f}", row["prefixes"]]
        for mode, row in r["results"].items()
    ]
    held = all(row["largest_score"] <= r["limit"] for row in r["results"].values())
    head = ["mode", "largest score", f"at a temperature of {r['wrong_temperature']:.2f}", "contexts"]
    return (
        f"{table(head, rows)}\n\n{r['config']['turns']:,} answers of four tokens in each mode, judged by "
        "transformers' float32 distribution; scores are standard normal, five a mode, and a right engine is "
        f"above {r['limit']} once in {1 / r['alpha']:,.0f} runs. The third column judges the same tokens by "
        f"a wrong law, as the test's power. {goal(held, 'none above')}"
    )


def by_entropy(r: Any) -> str:
    """Acceptance of a model's first draft under two rules, and its slope by the target's entropy, by set."""
    rows = [
        [
            held_out.removeprefix("user."),
            temperature,
            f"{row['entropy']:.2f}",
            *(f"{row[rule]['acceptance'][0]:.2f}" for rule in ("rejection", "target-only")),
            *(_slope(row[rule]["slope_per_context"]) for rule in ("rejection", "target-only")),
        ]
        for temperature, by_set in r["temperatures"].items()
        for held_out, row in by_set.items()
    ]
    head = ["set", "temperature", "entropy, nats", "rejection", "target-only"]
    head += ["rejection, per nat", "target-only, per nat"]
    return (
        table(head, rows)
        + "\n\nExact at each context, no coin is thrown; 95% intervals, clustered by prompt."
    )


def _slope(fit: dict[str, float]) -> str:
    return f"{fit['value']:+.3f} [{fit['low']:+.3f}, {fit['high']:+.3f}]"


def _with_ends(estimate: list[float], digits: int = 3) -> str:
    """A difference with its interval."""
    value, low, high = estimate
    return f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def draft_objectives(r: Any) -> str:
    """Drafts of five objectives after equal steps, in worlds that are enumerated."""
    rows = []
    for kind, row in r["objectives"].items():
        cells = [kind]
        for where in ("in domain", "out of domain"):
            gap = row.get(f"{where}, rejection, minus kl")
            cells += [f"{row[f'{where}, rejection'][0]:.3f}", "–" if gap is None else _with_ends(gap)]
        gap = row.get("in domain, target-only, minus kl")
        cells += [f"{row['in domain, target-only'][0]:.3f}", "–" if gap is None else _with_ends(gap)]
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
    """A draft while RL lowers entropy, frozen or trained, in worlds that are enumerated."""
    rows = []
    for name, row in r["rl"].items():
        cells = [name, f"{row['rejection']['over steps'][0]:.3f}", _with_ends(row["rejection"]["change"])]
        for other in ("TV, frozen", "TV, online TV"):
            gap = row["rejection"].get(f"end minus {other}")
            cells.append("–" if gap is None else _with_ends(gap))
        cells += [f"{row['target-only']['over steps'][0]:.3f}", _with_ends(row["target-only"]["change"])]
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
    """PPOW's switch to ADAW, learning rates, candidate windows, easy and hard windows."""
    switch, rates, candidates, hardness = (r[p] for p in ("switch", "rates", "candidates", "hardness"))
    lines = [
        f"Switch to ADAW: reward {switch['reward, before'][0]:.3f} before, "
        f"{_with_ends(switch['reward, after - reward, before'])} after; KL(q‖p) "
        f"{switch['kl, before'][0]:.3f}, {_with_ends(switch['kl, after - kl, before'])}; reward by the end "
        f"{_with_ends(switch['reward, end - reward, after'])}."
    ]
    lrs = [name.split(", ")[1] for name in rates if name.startswith("kl,") and name.endswith(" end")]
    rows = [
        [
            lr,
            *(f"{rates[f'{arm}, {lr}, end'][0]:.3f}" for arm in ("kl", "ppow", "e2e_tv")),
            *(_with_ends(rates[f"{arm}, {lr}, end - kl, {lr}, end"]) for arm in ("ppow", "e2e_tv")),
            _with_ends(rates[f"kl, {lr}, end - kl, {lr}, third"]),
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
            *(_with_ends(candidates[f"{arm}, {count} - start, {count}"]) for arm in ("ppow", "e2e_tv")),
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
        ["R_dist minus without", *(_with_ends(hardness[f"ppow, R_dist, {c} - ppow, {c}"]) for c in columns)]
    )
    lines.append(table(["windows", *columns], rows))
    return "\n\n".join([*lines, f"Means of {r['worlds']} worlds, 95% over worlds."])


def jackpot_worlds(r: Any) -> str:
    """Rewards of every arm in worlds where they are exact, by group."""
    lines = []
    for name, rows in r["groups"].items():
        (difference,) = {key for row in rows.values() for key in row if key.startswith("minus ")}
        cells = [
            [
                arm,
                f"{row['mean'][0]:.3f}",
                "–" if difference == f"minus {arm}" else _with_ends(row[difference]),
                f"{mean(row['pass@4']):.3f}",
                f"{row['kl over steps'][0]:.3g}, {row['mean kl'][0]:.3g}",
            ]
            for arm, row in rows.items()
        ]
        lines.append(
            table([f"**{name}**", "reward", difference, "pass@4", "KL at the start, last half"], cells)
        )
    return "\n\n".join([*lines, f"Means of {r['seeds']} worlds, 95% over worlds."])


def linear_drafts(r: Any) -> str:
    """Acceptance of drafts that are linear in SmolLM2's features, by inputs and by texts fitted on."""
    rows = []
    for name, row in r["drafts"].items():
        cells = [
            name,
            *(f"{row[key][0]:.3f}" if key in row else "" for key in ("depth 1", "depth 2", "depth 3")),
        ]
        for key in ("depth 1", "accepted of 3"):
            gap = row.get(f"{key}, minus EAGLE")
            cells.append("–" if gap is None else _with_ends(gap))
        rows.append(cells)
    head = ["draft", "depth 1", "depth 2", "depth 3", "depth 1, minus EAGLE", "accepted of 3, minus EAGLE"]
    sizes = []
    for count, row in r["by texts"].items():
        gaps = [_with_ends(value) for key, value in row.items() if key.startswith("depth 1, minus")]
        sizes.append(f"{count}: {row['depth 1'][0]:.3f}" + "".join(f" ({gap})" for gap in gaps))
    return (
        f"{table(head, rows)}\n\nBy the number of texts fitted on, depth 1 of EAGLE, and the gain on the "
        f"fewest: {'; '.join(sizes)}. {r['held out']} held-out answers, {r['anchors'][1]} "
        "anchors, 95% over answers."
    )
