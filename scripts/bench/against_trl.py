"""How fast, and how well, does rlpipe train a real model against TRL's GRPOTrainer?

Every arm trains the same checkpoint on the prompts and scores of recipes/smollm_rl, with the same numbers of
prompts, attempts, tokens and threads, and the same learning rate. The arm `rlpipe` uses the recipe's
settings, and generates the next batch while it trains if `--staleness` is 1; `trl_bf16` has weights in
bfloat16, `trl_autocast` has weights in float32 and products in bfloat16, `trl_fp32` has both in float32. All
other settings are the defaults of rlpipe and TRL. No arm uses draft tokens. Arms take turns, with one run of
each per seed, in an order that is reversed for every other seed. TRL runs in its own Python environment
(`--trl-python`).

Reported are seconds a step (the first is warm-up) and the held-out reward, mean over the tasks, at two
points. "At equal steps" is the last step that every arm took. "At equal minutes of training" is the end of
the arm that trained for the shortest time; the other arms are interpolated linearly between measurements.
TRL may take fewer steps (`--trl-steps`), so that all arms train for about as long. Sampling held-out answers
does not count as training time. With `--runs` each run is stored when it ends, and stored runs are not
repeated: TRL takes up to 12 GB, and a machine that runs out of memory then loses only one run.

    python scripts/bench/against_trl.py --json OUT --model DIR --trl-python VENV/bin/python \
        [--arms rlpipe trl_bf16] [--steps 40] [--trl-steps 10] [--val-every 5] [--val-instances 60] \
        [--repeats 3] [--runs DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import ROOT, bench_parser, load_average, provenance, spread, table, take_turns, write_result

sys.path.insert(0, str(ROOT))

from recipes.runs import over_seeds

Run = dict[str, Any]  # steps: a record of each; held_out: measurements
TRL_ARMS = ("trl_bf16", "trl_autocast", "trl_fp32")
WARM_UP = 1  # steps
HELD_OUT, TRAIN = 100, 400  # prompts of each task, as in the suite
TASKS = ("start", "short", "keywords", "largest")


def run_rlpipe(settings: argparse.Namespace, seed: int) -> Run:
    """Train with the command line, and read its metrics."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [
            "+recipe=smollm_rl",
            f"model.path={settings.model.resolve()}",
            "spec.mode=none",
            f"+env.options={{train: {TRAIN}, held_out: {HELD_OUT}}}",
            f"pipeline.prompts_per_step={settings.prompts}",
            f"pipeline.group_size={settings.group}",
            f"rollout.max_new_tokens={settings.max_new_tokens}",
            f"pipeline.max_staleness={settings.staleness}",
            f"rollout.threads={settings.threads}",
            f"trainer.threads={settings.threads}",
            f"trainer.lr={settings.lr}",
            f"trainer.warmup_steps={settings.warmup_steps}",
            f"trainer.beta2={settings.beta2}",
            f"val.every={settings.val_every}",
            f"val.instances={settings.val_instances}",
            f"run.steps={settings.steps}",
            f"run.seed={seed}",
            f"run.dir={directory}/run",
            "metrics.wandb=off",
            "metrics.report=false",
        ]
        _call([sys.executable, "-m", "rlpipe.run", *overrides])
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    return from_metrics([json.loads(line) for line in lines])


def from_metrics(records: Sequence[dict[str, Any]]) -> Run:
    """Return a run from the records of `metrics.jsonl`."""
    run: Run = {"steps": [], "held_out": []}
    names = {
        "reward": "critic/rewards/mean",
        "response_tokens": "response_length/mean",
        "entropy": "actor/entropy",
    }
    for record in records:
        if "timing_s/step" in record:
            step = {"seconds": record["timing_s/step"]}
            run["steps"].append(step | {key: record[name] for key, name in names.items() if name in record})

        rewards = {task: record[f"val/{task}/reward"] for task in TASKS if f"val/{task}/reward" in record}
        if rewards:
            seconds = sum(step["seconds"] for step in run["steps"])
            run["held_out"].append(
                {"step": len(run["steps"]), "training_seconds": seconds, "reward": rewards}
            )
    return run


def run_trl(settings: argparse.Namespace, precision: str, seed: int) -> Run:
    """Train with TRL in its environment."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run.json"
        options = {
            "out": out,
            "model": settings.model,
            "precision": precision,
            "seed": seed,
            "steps": settings.trl_steps,
            "val-every": settings.val_every,
            "val-instances": settings.val_instances,
            "held-out": HELD_OUT,
            "train": TRAIN,
            "prompts": settings.prompts,
            "group": settings.group,
            "max-new-tokens": settings.max_new_tokens,
            "threads": settings.threads,
            "lr": settings.lr,
            "warmup-steps": settings.warmup_steps,
            "beta2": settings.beta2,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        _call([str(settings.trl_python), str(Path(__file__).with_name("trl_grpo.py")), *words])
        return json.loads(out.read_text())


def _run(settings: argparse.Namespace, arm: str, seed: int) -> Run:
    """Train one arm."""
    if arm == "rlpipe":
        return run_rlpipe(settings, seed)
    return run_trl(settings, arm.removeprefix("trl_"), seed)


def _of_run(settings: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that a stored run must have had."""
    apart = ("json", "repeats", "arms", "runs", "trl_python", "model")
    return {name: value for name, value in vars(settings).items() if name not in apart}


def _stored(folder: Path | None, name: str, settings: dict[str, Any], make: Callable[[], Run]) -> Run:
    """Return a run from the folder, or make and store it. Raises ValueError if its settings differ."""
    if folder is None:
        return make()
    path = folder / f"{name}.json"
    if not path.exists():
        run = make()
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": settings, "run": run}))

    stored = json.loads(path.read_text())
    if stored["settings"] != settings:
        raise ValueError(f"{path} is a run of {stored['settings']}, not of {settings}: name another --runs.")
    return stored["run"]


def _call(command: list[str]) -> None:
    """Run a command in the checkout; show its output if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{command[:3]} failed:\n{(done.stdout + done.stderr)[-4000:]}")


def mean_reward(point: dict[str, Any]) -> float:
    """Return the mean over the tasks of a held-out measurement."""
    return statistics.fmean(point["reward"].values())


def reward_at(run: Run, axis: str, place: float) -> float:
    """Return the held-out reward at a position on an axis, interpolated linearly between measurements.

    axis: `step` or `training_seconds`.

    >>> points = [{"training_seconds": s, "reward": {"a": r}} for s, r in ((0, 0.0), (10, 1.0))]
    >>> [reward_at({"held_out": points}, "training_seconds", s) for s in (5, 99)]
    [0.5, 1.0]
    """
    points = [(point[axis], mean_reward(point)) for point in run["held_out"]]
    for (start, low), (end, high) in pairwise(points):
        if place <= end:
            return low + (high - low) * (place - start) / (end - start)
    return points[-1][1]


def summary(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Summarise the runs of each arm, one per seed: seconds, tokens, rewards at equal steps and minutes."""
    rows: dict[str, Any] = {}

    def rewards(axis: str, many: list[Run]) -> dict[str, Any]:
        # For each seed, the position on the axis at which the first of its runs ends.
        ends = [min(run["held_out"][-1][axis] for run in row) for row in zip(*runs.values(), strict=True)]
        return _each(reward_at(run, axis, end) for run, end in zip(many, ends, strict=True))

    for arm, many in runs.items():
        steps = [step for run in many for step in run["steps"][WARM_UP:]]
        minutes = statistics.fmean(run["held_out"][-1]["training_seconds"] for run in many) / 60
        rows[arm] = {
            "seconds_a_step": spread([step["seconds"] for step in steps], digits=2),
            "response_tokens": round(statistics.fmean(step["response_tokens"] for step in steps), 1),
            "steps": min(run["held_out"][-1]["step"] for run in many),
            "training_minutes": round(minutes, 2),
            "reward_before": _each(mean_reward(run["held_out"][0]) for run in many),
            "reward_at_equal_steps": rewards("step", many),
            "reward_at_equal_minutes": rewards("training_seconds", many),
        }
    return rows


def differences(rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the reward of rlpipe minus that of each TRL arm, over paired seeds, with 95% intervals."""
    found: dict[str, dict[str, Any]] = {}
    for arm in rows.keys() - {"rlpipe"}:
        found[arm] = {}
        for place in ("reward_at_equal_steps", "reward_at_equal_minutes"):
            pairs = zip(rows["rlpipe"][place]["seeds"], rows[arm][place]["seeds"], strict=True)
            one = over_seeds([ours - theirs for ours, theirs in pairs])
            interval = [round(one.interval.low, 4), round(one.interval.high, 4)]
            found[arm][place] = {"mean": round(one.value, 4), "interval": interval}
    return found


def _each(values: Any) -> dict[str, Any]:
    """Return the mean over seeds and the value of each seed."""
    seeds = [round(value, 4) for value in values]
    return {"mean": round(statistics.fmean(seeds), 4), "seeds": seeds}


def main() -> None:
    """Run the arms in turns and write one JSON."""
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with trl")
    parser.add_argument("--arms", nargs="+", choices=("rlpipe", *TRL_ARMS), default=["rlpipe", "trl_bf16"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trl-steps", type=int, help="of TRL's arms, if others")
    parser.add_argument("--val-every", type=int, default=5)
    parser.add_argument("--val-instances", type=int, default=60, help="held-out prompts of each task")
    parser.add_argument("--runs", type=Path, help="folder of finished runs with the same settings")
    parser.add_argument("--staleness", type=int, default=0, help="pipeline.max_staleness of rlpipe")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    settings = parser.parse_args()

    trl = [arm for arm in settings.arms if arm in TRL_ARMS]
    if trl and (settings.trl_python is None or not settings.trl_python.exists()):
        parser.error(f"{trl} need --trl-python: the interpreter of an environment with `pip install trl`.")
    settings.trl_steps = settings.trl_steps or settings.steps
    if min(settings.steps, settings.trl_steps) <= WARM_UP:
        parser.error(f"--steps and --trl-steps: the first {WARM_UP} is warm-up, so give more.")

    runs: dict[str, list[Run]] = {arm: [] for arm in settings.arms}

    def one(arm: str) -> None:
        # The seed is the repeat: an arm's list has one entry for each run so far.
        seed = len(runs[arm])
        make = partial(_run, settings, arm, seed)
        runs[arm].append(_stored(settings.runs, f"{arm}_{seed}", _of_run(settings), make))
        last = runs[arm][-1]["held_out"][-1]
        print(
            f"{arm} seed {seed}: held-out {mean_reward(last):.3f}, {last['training_seconds']:.0f} s",
            flush=True,
        )

    load = load_average()
    arms: dict[str, Callable[[], object]] = {arm: partial(one, arm) for arm in settings.arms}
    take_turns(arms, settings.repeats, warm_up=0)

    rows = summary(runs)
    medians = {arm: row["seconds_a_step"]["median"] for arm, row in rows.items()}
    compared = trl if "rlpipe" in rows else []
    ratios = {f"{arm} / rlpipe": round(medians[arm] / medians["rlpipe"], 2) for arm in compared}
    versions = _versions(settings.trl_python) if trl else {}
    result = {
        "question": "seconds a GRPO step and held-out reward, against TRL",
        **provenance(settings, load, packages=("torch", "transformers", "megatron-core")),
        "trl_versions": versions,
        "arms": rows,
        "ratios_of_seconds": ratios,
        "rlpipe_minus_trl": differences(rows) if compared else {},
        "runs": runs,
    }
    print(table({arm: {name: json.dumps(value) for name, value in row.items()} for arm, row in rows.items()}))
    print(ratios)
    write_result(settings.json, result)


def _versions(python: Path) -> dict[str, str]:
    """Return the package versions of TRL's environment."""
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({n: m.version(n) for n in ('trl', 'torch', 'transformers')}))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
