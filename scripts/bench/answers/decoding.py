"""Speed and exactness of decoding on a CPU, with and without drafts."""

from __future__ import annotations

from statistics import median
from typing import Any

from answers.tables import goal, pm, table, with_interval


def rollout_speed(r: Any) -> str:
    """Compare the embedded engine's speed with transformers'."""
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
    """Tabulate acceptance length by rule and temperature."""
    cells = r["results"]["acceptance"]
    rules = list(dict.fromkeys(name.split(" T=")[0] for name in cells))
    temperatures = list(dict.fromkeys(name.split(" T=")[1] for name in cells))
    rows = [[rule, *(pm(cells[f"{rule} T={t}"]["length"], 3) for t in temperatures)] for rule in rules]
    return table(["acceptance length", *(f"T = {t}" for t in temperatures)], rows) + (
        "\n\nOf 4 possible (three drafts and one token of the model), the shipped model on its own tasks."
    )


def adaptive(r: Any) -> str:
    """Compare adaptive gamma with the best fixed gamma."""
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
    """Compare a server's adaptive number of drafts with each fixed number."""
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
    """Compare servers with the plugin with stock servers."""
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
        + "\n\nMedian and range over repeated batches, with the arms in alternation; load average "
        + f"{r['machine']['load']:.1f} at the end. "
        + goal(held, "1.15 at batch 8, never below 1")
    )


def verify(r: Any) -> str:
    """Report the time of verification on a CPU at a real vocabulary."""
    ratios = {cell: value["ratios"]["python loop / torch"] for cell, value in r["results"].items()}
    batches = list(dict.fromkeys(cell.split(", gamma")[0].split("batch ")[1] for cell in ratios))
    gammas = list(dict.fromkeys(cell.split("gamma ")[1] for cell in ratios))
    rows = [
        [b, *(next(v for c, v in ratios.items() if f"batch {b}, gamma {g}" in c) for g in gammas)]
        for b in batches
    ]
    held = sum(ratio >= 3 for ratio in ratios.values())
    return table(["batch", *(f"gamma {g}" for g in gammas)], rows) + (
        f"\n\nTimes as fast as a Python loop over rows, V = 151,936, chain rule. Goal: 3 times, **met in "
        f"{held} of {len(ratios)}** cells."
    )


def verify_vocabularies(r: Any) -> str:
    """Report the time of verification on a CPU by vocabulary size."""
    rows = []
    for vocab in sorted(r["config"]["vocabs"]):
        cells = {c: v["ratios"] for c, v in r["results"].items() if c.startswith(f"chain, vocab {vocab},")}
        for batch in r["config"]["batches"]:
            ratios = [v for c, v in cells.items() if f"batch {batch}," in c]
            kinds = ("python loop / torch", "plain torch / torch")
            rows.append([f"{vocab:,}", batch, *(" and ".join(f"{v[k]:.2f}" for v in ratios) for k in kinds)])
    head = ["vocabulary", "batch", "against a Python loop, gamma 1 and 3", "against plain torch"]
    return table(head, rows) + "\n\nTimes as fast, chain rule. Below 1 the loop is faster."


def drafts_pay(r: Any) -> str:
    """Report a real model's speed with drafts over no drafts, and the acceptance that each batch needs."""
    rows, ratios = [], {}
    for cell, row in r["results"].items():
        temperature, batch = cell.removeprefix("T=").split(", batch ")
        over = row["over none"]
        best, gain = _best_gamma(row)
        acceptance = row["arms"][best].get("acceptance_by_depth", [])
        need = r["break_even_acceptance"].get(f"batch {batch}, {best}")
        ratios[batch, temperature] = gain, over["adaptive"]
        ends = row.get("adaptive over none, 95% interval")
        interval = f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else ""
        rows.append(
            [
                batch,
                temperature,
                f"{best}: {gain:.2f}",
                f"{over['adaptive']:.2f}{interval}",
                ", ".join(f"{value:.2f}" for value in acceptance if value is not None),
                "" if need is None else f"{need:.2f}",
            ]
        )
    one = [best for (batch, _), (best, _) in ratios.items() if batch == "1"]
    four = [best for (batch, _), (best, _) in ratios.items() if batch == "4"]
    adaptive = [value for _, value in ratios.values()]
    goals = [goal(min(one) >= 1.3, f"1.3 at batch 1 (lowest: {min(one):.2f})")] if one else []
    goals += [goal(min(four) >= 1.1, f"1.1 at batch 4 (lowest: {min(four):.2f})")] if four else []
    goals.append(goal(min(adaptive) >= 0.99, f"adaptive never below .99 (lowest: {min(adaptive):.3f})"))
    head = ["batch", "temperature", "best gamma, over none", "adaptive, over none", "acceptance by depth"]
    return table([*head, "acceptance that this gamma needs"], rows) + "\n\n" + " ".join(goals)


def drafts_pay_in_brief(r: Any) -> str:
    """Report a real model's speed with the best gamma over no drafts, at batch 1 and 4."""
    return ", ".join(f"{_range(_best_gains(r, batch), 'x')} at batch {batch}" for batch in (1, 4))


def drafts_pay_by_batch(r: Any) -> str:
    """Report a real model's speed over no drafts at each batch, by the best gamma and adaptive drafts."""
    best, adaptive = [], []
    for batch in r["config"]["batches"]:
        best.append(f"{_range(_best_gains(r, batch))} at batch {batch}")
        adaptive.append(_range([row["over none"]["adaptive"] for row in _cells_of(r, batch)]))
    return f"{', '.join(best)} (adaptive: {', '.join(adaptive)})"


def _cells_of(r: Any, batch: int) -> list[Any]:
    return [row for cell, row in r["results"].items() if cell.endswith(f", batch {batch}")]


def _best_gains(r: Any, batch: int) -> list[float]:
    """Return the speed of the best gamma over no drafts, for each temperature."""
    return [_best_gamma(row)[1] for row in _cells_of(r, batch)]


def _range(values: list[float], unit: str = "") -> str:
    return f"{min(values):.2f}{unit} to {max(values):.2f}{unit}"


def _best_gamma(row: Any) -> tuple[str, float]:
    """Return the arm with the fastest fixed gamma, and its speed over no drafts."""
    fixed = [(arm, ratio) for arm, ratio in row["over none"].items() if arm.startswith("gamma")]
    return max(fixed, key=lambda one: one[1])


def generation_speed(r: Any) -> str:
    """Tabulate tokens per second of a real model, by engine."""
    names = {name for row in r["results"].values() for name in row["arms"]}
    arms = [
        name
        for name in ("none", "drafts", "transformers", "sglang", "sglang with plugin", "llama.cpp")
        if name in names
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
    if "llama.cpp" in names:
        against = [row["ratios"]["none / llama.cpp"] for row in r["results"].values()]
        text += " none / llama.cpp: " + ", ".join(f"{ratio:.2f}" for ratio in against) + "."
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
    """Compare greedy tokens of a real model with transformers' tokens."""
    texts = []
    for name, result in r["results"].items():
        gaps = [one["logit_gap"] for one in result["different"]]
        beside = f" (where not, the two best logits differ by at most {max(gaps):.1e})" if gaps else ""
        label = {"none": "without drafts"}.get(name, f"with {name}")
        texts.append(f"{label} {result['equal']} of {result['prompts']} prompts are equal{beside}")
    held = all(result["equal"] == result["prompts"] for result in r["results"].values())
    tokens = r["config"]["tokens"]
    return f"{tokens} tokens each, float32: {'; '.join(texts)}. {goal(held, 'all, token for token')}"


def real_first_tokens(r: Any) -> str:
    """Report G-tests of a real model's tokens, by mode."""
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
        f"a wrong distribution, as the test's power. {goal(held, 'none above')}"
    )


def by_entropy(r: Any) -> str:
    """Tabulate acceptance of the first draft under two rules, and its slope against the target's entropy."""
    rows = [
        [
            held_out.removeprefix("user."),
            temperature,
            f"{row['entropy']:.2f}",
            *(f"{row[rule]['acceptance'][0]:.2f}" for rule in ("rejection", "target-only")),
            *(with_interval(row[rule]["slope_per_context"]) for rule in ("rejection", "target-only")),
        ]
        for temperature, by_set in r["temperatures"].items()
        for held_out, row in by_set.items()
    ]
    head = ["set", "temperature", "entropy, nats", "rejection", "target-only"]
    head += ["rejection, per nat", "target-only, per nat"]
    return (
        table(head, rows)
        + "\n\nComputed from exact probabilities at each context, without sampling; 95% intervals, clustered "
        "by prompt."
    )


def certificates(r: Any) -> str:
    """Tabulate what `rlpipe certify` reports for each server, the lines that it judged, and its minutes."""
    names = {
        "plain": "stock SGLang, no drafts",
        "stock": "stock SGLang, MTP drafts, rejection sampling",
        "stock_greedy": "stock SGLang, MTP drafts, its default verification",
        "plugin": "SGLang with rlpipe's plugin, MTP drafts, rejection sampling",
        "stale_draft": "the same, noise of 30% on the draft's weights",
        "other_weights": "the same, noise of 3% on the model's weights",
        "transformers": "`transformers serve`",
        "transformers_sampling": "`transformers serve`, sampling switched on",
        "vllm": "vLLM",
        "vllm_processed": "vLLM, `--logprobs-mode processed_logprobs`",
        "vllm_mtp": "the same, one MTP draft",
        "llama_cpp": "llama.cpp's `llama-server`",
        "llama_cpp_all_tokens": "the same, asked for the whole distribution",
        "llama_cpp_drafts": "the same, three drafts by the same model",
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
