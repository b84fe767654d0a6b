"""Does a revision train as an earlier revision did, bit for bit?

Runs each recipe for four synchronous steps at both revisions with the same seeds, and at the earlier revision
twice. Values that differ between the latter two runs are not reproducible (seconds, bytes) and are ignored.
Every other metric, and every number of an adaptation's `results.json`, is compared as it was written, at full
precision. Requests are decoded one after another and reuse no keys, so that no sum depends on which requests
ran together.

    python scripts/bench/compare_revisions.py 0740eb8..HEAD --json OUT

"swe_rl, SGLang" needs SGLang's environment (RLPIPE_SGLANG_VENV, an absolute path).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import bench_parser, git, load_average, provenance, write_result

COMMON = ["cluster=inline", "run.steps=4", "run.seed=1", "trainer.threads=1", "rollout.threads=1"]
RL = [
    *COMMON,
    "pipeline.max_staleness=0",
    "pipeline.prompts_per_step=2",
    "pipeline.group_size=4",
    "val.every=4",
    "val.instances=4",
]
ADAPTATION = [
    *COMMON,
    "adapt.prompts=8",
    "adapt.samples=2",
    "adapt.batch=4",
    "adapt.eval_prompts=3",
    "adapt.eval_samples=1",
]
RECIPES = dict.fromkeys(("swe_rl", "agent_rl", "reasoning_rl", "jackpot"), RL)
RECIPES |= dict.fromkeys(("mtp_adapt", "eagle3", "ppow"), ADAPTATION)
RECIPES["swe_rl, SGLang"] = [*RL, "rollout=sglang", "rollout.max_running=1"]
# The only change made to either revision; these names exist in both.
RUN = """
import asyncio, sys, weakref
from rlpipe.rollout.embedded import EmbeddedEngine
alone, generate = weakref.WeakKeyDictionary(), EmbeddedEngine.generate
async def one_at_a_time(self, request):
    lock = alone.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        result = await generate(self, request)
        self.end_session(request.session_id)
        return result
EmbeddedEngine.generate = one_at_a_time
from rlpipe.run import main
sys.exit(main())
"""


def play(tree: Path, recipe: str, out: Path) -> dict[str, Any]:
    """Run a recipe in a checkout; return every number that it wrote, by step and name."""
    keep = {n: os.environ[n] for n in ("PATH", "HOME", "RLPIPE_SGLANG_VENV") if n in os.environ}
    env = keep | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-c",
        RUN,
        f"+recipe={recipe.partition(',')[0]}",
        f"run.dir={out}",
        *RECIPES[recipe],
    ]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{recipe} at {tree}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("training/global_step")
        found |= {f"{step} {name}": value for name, value in row.items()}
    results = out / "results.json"
    return found | (leaves(json.loads(results.read_text()), "results") if results.exists() else {})


def leaves(value: Any, path: str) -> dict[str, Any]:
    """Return the numbers and strings of nested JSON, by their path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, item in items for k, v in leaves(item, f"{path}/{key}").items()}
    return {path: value}


def compare(before: dict[str, Any], again: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return how many values are equal; of each metric that differs, the first values and the largest gap.

    Values that the earlier revision does not reproduce are left out. Gaps are relative to the larger value.
    """
    steady = {name for name, value in before.items() if same(again.get(name), value)}
    shared = [name for name in before if name in steady and name in after]
    differing: dict[str, list[Any]] = {}
    for name in shared:
        if not same(before[name], after[name]):
            metric = name.partition(" ")[2] or name
            first = differing.setdefault(metric, [name.partition(" ")[0], before[name], after[name], 0.0])
            first[3] = max(first[3], gap(before[name], after[name]))
    values = sum(same(before[name], after[name]) for name in shared)
    gone = sorted({name.partition(" ")[2] or name for name in steady - after.keys()})
    return {"equal": values, "of": len(shared), "differing": differing, "gone": gone}


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal as they are written, NaN included."""
    return json.dumps(one) == json.dumps(other)


def gap(one: Any, other: Any) -> float:
    """Return the relative difference of two numbers; 1 for anything else."""
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return 1.0
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


def span(revisions: str, recipes: list[str], pool: ThreadPoolExecutor, folder: Path) -> dict[str, Any]:
    """Compare the ends of BEFORE..AFTER in separate work trees."""
    ends = [git("rev-parse", "--short", end) for end in revisions.split("..")]
    trees = [folder / f"{revisions.replace('/', '-')}-{name}" for name in ("before", "after")]
    try:
        for tree, commit in zip(trees, ends, strict=True):
            git("worktree", "add", "--detach", str(tree), commit)
        arms = {"before": trees[0], "again": trees[0], "after": trees[1]}
        runs = {
            recipe: [
                pool.submit(
                    play, tree, recipe, tree.parent / f"{revisions}-{recipe.replace(', ', '_')}-{arm}"
                )
                for arm, tree in arms.items()
            ]
            for recipe in recipes
        }
        found = {recipe: compare(*(run.result() for run in three)) for recipe, three in runs.items()}
    finally:
        for tree in trees:
            git("worktree", "remove", "--force", str(tree))
    return {"before": ends[0], "after": ends[1], "recipes": found}


def main() -> None:
    """Compare, print a line per recipe, write all."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("spans", nargs="+", metavar="BEFORE..AFTER")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    args, load = parser.parse_args(), load_average()
    results = []
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(args.workers) as pool:
        for revisions in args.spans:
            results.append(span(revisions, args.recipes, pool, Path(made)))
            for recipe, found in results[-1]["recipes"].items():
                print(f"{revisions} {recipe}: {found['equal']} of {found['of']} values equal", flush=True)
    write_result(args.json, {**provenance(args, load), "settings": RECIPES, "spans": results})


if __name__ == "__main__":
    main()
