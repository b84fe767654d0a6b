"""Answers about learning: held-out rewards over seeds, also against TRL and with stale or smaller actors."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from answers.tables import difference, goal, pm, table, with_interval


def quickstart(r: Any) -> str:
    """Report the seconds of a newcomer's first command."""
    if "parts" not in r:  # an old result, written without the parts
        parts, rewards = {"installation": r["installation_s"]}, [r["val_reward"]]
    else:
        parts = {name: seconds for name, seconds in r["parts"].items() if seconds}
        several = [values for name, values in r["held_out"].items() if name] or r["held_out"].values()
        rewards = [[value for value, _ in values] for values in several]
    before, after = (mean(values) for values in zip(*rewards, strict=True))
    busy = " that were busy with other work" if r["load_average_before"][0] > r["cores"] else ""
    return (
        f"{r['seconds']:.0f} s from a fresh clone with an empty HOME, on {r['cores']} cores{busy} "
        f"({', '.join(f'{name} {seconds} s' for name, seconds in parts.items())}). "
        f"Held-out reward {before:.3f} to {after:.3f}. "
        + goal(r["seconds"] < r.get("goal", 720), f"{r.get('goal', 720)} s")
    )


def swe(r: Any) -> str:
    """Tabulate the held-out reward of the main job, by seed and mode."""
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
    """Tabulate the held-out reward of a released model over seeds, by task."""
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
    """Report held-out reward before and after, and the gain, over seeds; by held-out set if several."""
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


def real_against_trl(r: Any) -> str:
    """Compare GRPO of a released model with TRL: seconds a step, and held-out reward."""
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


def real_against_trl_in_brief(r: Any) -> str:
    """Report how much longer a step of TRL's fastest arm takes, and held-out rewards after equal minutes."""
    arm, ratio = min(r["ratios_of_seconds"].items(), key=lambda one: one[1])
    ours, theirs = (
        r["arms"][name]["reward_at_equal_minutes"]["mean"]
        for name in ("rlpipe", arm.removesuffix(" / rlpipe"))
    )
    return (
        f"TRL's step takes {ratio:.1f}x as long; held-out reward after equal minutes: TRL {theirs:.2f}, "
        f"rlpipe {ours:.2f}"
    )


def staleness(r: Any) -> str:
    """Compare corrections without PPO's clip, under staleness."""
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
    """Report runs in which a smaller model generates for the policy."""
    rows = [[name, f"{v['before']:.2f} to {pm([v['after'], v['error']])}"] for name, v in r["runs"].items()]
    return table(["correction-seed", "held-out reward"], rows)


def jackpot_servers(r: Any) -> str:
    """Report OBRS and the decoupled actor with an SGLang server, one run each."""
    titles = list(dict.fromkeys(title for run in r["runs"].values() for title in run["means"]))
    rows = []
    for name, run in r["runs"].items():
        (_, before, error), (_, after, _) = run["held_out"][0], run["held_out"][-1]
        means = [f"{run['means'][title]:.3g}" if title in run["means"] else "–" for title in titles]
        rows.append([name, f"{before:.2f} to {pm([after, error])}", *means, sum(run["faults"].values())])
    steps = next(iter(r["runs"].values()))["steps"]
    return table(["run", "held-out reward", *titles, "faults"], rows) + (
        f"\n\nMeans over {steps} steps, one seed; too short to compare rewards."
    )


def obrs(r: Any) -> str:
    """Report how much closer OBRS brings distributions."""
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


def jackpot_parts(r: Any) -> str:
    """Tabulate corrections, their parts and a control: gains over none and over OBRS, by setting and rate."""
    rows = []
    for name, arms in r["groups"].items():
        if name.startswith("parts"):
            for arm, row in arms.items():
                cells = [
                    "–" if arm == other else difference(row, other, "worlds") for other in ("none", "OBRS")
                ]
                first = name.removeprefix("parts, ") if arm == "none" else ""
                rows.append([first, arm, f"{row['mean'][0]:.3f}", *cells, f"{row['mean kl'][0]:.3g}"])
    head = ["rollouts", "correction", "reward", "minus none", "minus OBRS", "KL, last half"]
    return f"{table(head, rows)}\n\nMeans of {r['seeds']} worlds, 95% over worlds."


def jackpot_worlds(r: Any) -> str:
    """Tabulate the rewards of every arm, by group, in worlds where rewards are exact."""
    lines = []
    for name, rows in r["groups"].items():
        if name.startswith("parts"):
            continue  # `jackpot_parts`
        (minus,) = {key for row in rows.values() for key in row if key.startswith("minus ")}
        cells = [
            [
                arm,
                f"{row['mean'][0]:.3f}",
                "–" if minus == f"minus {arm}" else with_interval(row[minus]),
                f"{mean(row['pass@4']):.3f}",
                f"{row['kl over steps'][0]:.3g}, {row['mean kl'][0]:.3g}",
            ]
            for arm, row in rows.items()
        ]
        lines.append(table([f"**{name}**", "reward", minus, "pass@4", "KL at the start, last half"], cells))
    return "\n\n".join([*lines, f"Means of {r['seeds']} worlds, 95% over worlds."])
