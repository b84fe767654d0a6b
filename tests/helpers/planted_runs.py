"""Run directories of 60 steps in which one thing goes wrong, and the name that a verdict should give it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.metrics.bus import STEP
from rlpipe.metrics.rollouts import step_file
from rlpipe.metrics.runs import RunData, load_run
from tests.helpers.recorded_runs import recorder, tables_of

STEPS, EVERY, TABLES, CONTEXTS, FIXED = 60, 5, 12, 15, 6
SLOPE = -0.25  # acceptance per nat, of contexts and of training
PLANTED: dict[str, tuple[str, dict[str, float]]] = {
    "entropy alone": ("entropy", {"entropy": 0.5}),
    "draft stale": ("draft_stale", {"mismatch": -0.1}),
    "draft stale while entropy falls": ("draft_stale", {"mismatch": -0.12, "entropy": -0.3}),
    "mismatch by training the draft": ("draft_training", {"mismatch": -0.1, "online": 1}),
    "engines lag more and more": ("staleness", {"staleness": -0.1}),
    "engines lag from the start": ("standing_staleness", {"standing": -0.08}),
    "domain shift": ("contexts", {"contexts": -0.12}),
    "nothing": ("nothing", {}),
    "nothing, where prompts have a slope of their own": ("nothing", {"prompts": -1.2}),
    "tampering": ("reward_hacking", {"tamper": 0.3}),
    "memorised prompts": ("held_out_left_behind", {"gain": 0.5, "held_out": -0.1}),
    "slow environment": ("slow_environment", {"slow": 1}),
    "full disk": ("disk_full", {"disk": 1}),
    "too hard": ("too_hard", {"hard": 1}),
    "entropy collapse": ("entropy_collapse", {"collapse": 1, "gain": 0.0}),
    "diverging updates": ("unstable_updates", {"unstable": 1, "gain": -0.25}),
    "broken environment": ("broken_environment", {"masked": 0.3}),
    "processes die": ("dying_processes", {"dying": 1}),
}


def planted_run(directory: Path, seed: int, **given: float) -> RunData:
    """Write and read one. entropy, mismatch, ...: what changes linearly over the run, in nat or rate."""
    rng, has = np.random.default_rng(seed), given.get
    directory.mkdir(parents=True)
    shapes = [rng.uniform(0.2, 1.5, CONTEXTS) for _ in range(TABLES)]
    level = float(np.mean(shapes))
    slow, hard = bool(has("slow")), bool(has("hard"))
    records: list[dict[str, Any]] = [{STEP: 0, "time": 5.0, **_validation(rng, 0.3)}]
    for step in range(1, STEPS + 1):
        at = (step - 1) / (STEPS - 1)
        prompts = 0.06 * rng.standard_normal()
        trained = level + has("entropy", 0.0) * at
        entropy = trained + prompts
        if has("collapse"):
            entropy = 1.0 * np.exp(-4 * at) + 0.01 * rng.random()
        rate = 0.9 + SLOPE * trained + has("prompts", SLOPE) * prompts
        rate += sum(has(name, 0.0) * at for name in ("mismatch", "staleness", "contexts")) + has(
            "standing", 0.0
        )
        rate += 0.008 * rng.standard_normal()
        record = {
            STEP: step,
            "time": 5.0 + 10 * step,
            "critic/rewards/mean": 0.02 * rng.random()
            if hard
            else 0.3 + has("gain", 0.2) * at + 0.04 * rng.standard_normal(),
            "rollout/entropy": entropy,
            "timing_s/step": 10.0,
            "timing_s/wait_rollout": 8.0 if slow else 3.0,
            "timing_s/update_actor": 1.5 if slow else 6.0,
            "timing_s/gen": 9.0,
            "timing_s/sandbox": 7.5 if slow else 1.0,
            "perf/throughput": 900.0,
            "perf/utilisation/rollout": 0.15 if slow else 0.8,
            "perf/utilisation/env": 0.9 if slow else 0.2,
            "perf/utilisation/trainer": 0.2 if slow else 0.7,
            "env/tamper_solved": has("tamper", 0.0) * at,
            "env/no_signal": 0.95 if hard else 0.3,
            "env/solve_none": 0.93 if hard else 0.15,
            "env/solve_all": 0.02 if hard else 0.15,
            "env/masked_share": has("masked", 0.0),
            "actor/grad_norm": (30.0 if has("unstable") and step % 10 == 0 else 1.0) * rng.uniform(0.8, 1.2),
        }
        if not has("collapse"):
            record |= {f"spec/acceptance_rate/depth_{k}": rate - 0.02 * k for k in (1, 2)}
            record |= {"spec/acceptance_rate": rate, "spec/acceptance_length": 1 + rate + rate * rate}
            if step % EVERY == 1:
                record |= _probe(directory, rng, step, at, shapes, given)
        if step % 20 == 0:
            record |= _validation(rng, 0.3 + has("held_out", 0.0 if hard else has("gain", 0.2)) * at)
        records.append(record)
    events: list[dict[str, Any]] = [{"time": 0.0, "kind": "start", "level": "info"}]
    if has("disk"):
        events += [
            {"time": 300.0 + n, "kind": "disk_full", "level": "fault", "sink": "jsonl"} for n in range(2)
        ]
    if has("dying"):
        died = {"kind": "rollout_worker_died", "level": "fault", "error": "out of memory"}
        events += [{"time": 100.0 * n, **died} for n in range(1, 5)]
    events.append({"time": 700.0, "kind": "end", "level": "info", "outcome": "done"})
    for name, items in (("metrics", records), ("events", events)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    train = "online" if has("online") else "off"
    (directory / "config.yaml").write_text(
        f"recipe: swe_rl\nrun: {{steps: {STEPS}}}\nspec: "
        f"{{mode: rejection, gamma: 2, adaptive: true}}\ndraft: {{train: '{train}'}}\n"
    )
    return load_run(directory)


def _validation(rng: np.random.Generator, reward: float) -> dict[str, float]:
    solved = rng.binomial(200, max(0.0, reward)) / 200
    return {
        "val/reward": solved,
        "val/held/reward": solved,
        "val/reward_se": float(np.sqrt(solved * (1 - solved) / 200)),
        "val/held/instances": 100.0,
        "val/held/trajectories": 200.0,
    }


def _probe(
    directory: Path,
    rng: np.random.Generator,
    step: int,
    at: float,
    shapes: list[np.ndarray],
    given: dict[str, float],
) -> dict[str, float]:
    """One probe of fixed and visited contexts by the law of the run; its metrics."""
    has, lines = given.get, []
    for i, base in enumerate(shapes):
        fixed = i < FIXED
        own = np.random.default_rng(1000 + i)  # of the context, the same in every probe
        jitter, share = own.normal(0, 0.02, CONTEXTS), own.uniform(0.5, 1.5, CONTEXTS)
        entropy = base + has("entropy", 0.0) * at + (0.0 if fixed else 0.02 * rng.standard_normal())
        alpha = 0.9 + SLOPE * entropy + has("mismatch", 0.0) * at * share + jitter
        alpha += 0.0 if fixed else has("contexts", 0.0) * at + 0.01 * rng.standard_normal()
        p = np.full((CONTEXTS, 2, 3), 1 / 3)
        table = tables_of(p, p, np.zeros((CONTEXTS, 2), dtype=int), f"t{i}")
        table.values["target_entropy"] = np.stack([entropy, entropy], 1)
        table.values["rejection"] = table.values["target_only"] = np.clip(
            np.stack([alpha, alpha - 0.03], 1), 0, 1
        )
        lines.append(table.to_json())
    head = {"step": step, "version": step - 1, "seconds": 0.1, "fixed": FIXED}
    recorder().write(step_file(directory / "probe", step), [head, *lines])
    current = float(np.mean([np.array(line["rejection"])[:, 0].mean() for line in lines[FIXED:]]))
    lag = has("staleness", 0.0) * at + has("standing", 0.0)
    gap = lag + 0.008 * float(rng.standard_normal())
    return {
        "probe/visited/current_rate": current,
        "probe/visited/observed_rate": current + gap,
        "probe/staleness": gap,
        "probe/staleness_se": 0.008,
    }
