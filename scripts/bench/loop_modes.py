"""How long is a training step of the full loop with drafts and without, and how is its time spent?

    python scripts/bench/loop_modes.py --json OUT --model DIR [--modes rejection none] [--steps 3] [KEY=VALUE]

The main job (swe_rl) runs by the real command line: trainer, rollout worker and, by default, an SGLang server
on one GPU (`cluster=one_gpu`). Every turn decodes 256 extra tokens, which are thrown away, as the turns of
the shipped model are too short for a measurement. The first step warms up; figures are medians over the other
steps. Modes run one after the other, and the file is written after each. If a mode fails, the file names it
and the exit status is 1. The less obvious figures:

`logprob_diff`  mean |p_rollout - p_trainer| of the tokens that are trained on
`without_kernels`  share of verify steps that a GPU server computed in torch because its kernels failed
`generated_tokens_per_s`  counting only the time in which the engine was busy
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from harness import ROOT, bench_parser, load_average, provenance, write_result

ON_ONE_GPU = [
    *("cluster=one_gpu", "rollout=sglang"),
    "rollout.sglang.extra_arguments=[--disable-prefill-cuda-graph]",  # saves a minute of each start
]
WORK = [
    *("injection.long_turn_share=1", "injection.long_turn_tokens=256", "val.every=0", "trainer.lr=1e-12"),
    *("pipeline.prompts_per_step=4", "rollout.max_context=1024"),
]
QUIET = ["metrics.console=false", "metrics.report=false", "metrics.wandb=off"]
METRICS: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "step_s": ("timing_s/step", median),
    "update_actor_s": ("timing_s/update_actor", median),
    "update_weights_s": ("timing_s/update_weights", median),
    "sync_s": ("weights/sync_seconds", median),
    "canary_failures": ("weights/canary_failures", max),
    "generated_tokens_per_s": ("perf/tokens_per_s/rollout", median),
    "logprob_diff": ("training/rollout_probs_diff_mean", fmean),
    "without_kernels": ("spec/verified_without_kernels", max),
}


def summary(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of a run from its metrics; metrics that it never emitted are left out.

    >>> summary([{"timing_s/step": 9.0}, {"timing_s/step": 2.0}, {"timing_s/step": 4.0}])
    {'step_s': 3.0}
    """
    figures = {}
    for name, (metric, reduced) in METRICS.items():
        values = [record[metric] for record in records if metric in record]
        if values:
            figures[name] = round(reduced(values[1:] or values), 6)
    return figures


def step_ratios(modes: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the step time of each other mode over that of the first mode.

    >>> step_ratios({"rejection": {"step_s": 2.0}, "none": {"step_s": 3.0}})
    {'none / rejection': 1.5}
    """
    first, *others = [name for name, result in modes.items() if "step_s" in result] or [""]
    return {f"{name} / {first}": round(modes[name]["step_s"] / modes[first]["step_s"], 3) for name in others}


def measure(mode: str, model: Path, steps: int, settings: Sequence[str]) -> dict[str, float]:
    """Run the main job in one mode and return its figures. Raises RuntimeError with the last output."""
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        given = [f"model.path={model}", f"run.dir={run}", f"run.steps={steps}", f"spec.mode={mode}"]
        command = [sys.executable, "-m", "rlpipe.run", "+recipe=swe_rl", *given, *WORK, *QUIET, *settings]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-800:]}")
        lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return summary([json.loads(line) for line in lines])


def main() -> int:
    """Measure all modes and write one JSON; return the exit status."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", default=["rejection", "none"])
    parser.add_argument("--steps", type=int, default=3, help="the first of them warms up")
    parser.add_argument("--device", default="cpu", help="named in the result")
    parser.add_argument("settings", nargs="*", default=[], help=f"default: {' '.join(ON_ONE_GPU)}")
    given, load = parser.parse_args(), load_average()

    modes: dict[str, Any] = {}
    for mode in given.modes:
        try:
            modes[mode] = measure(mode, given.model, given.steps, given.settings or ON_ONE_GPU)
        except RuntimeError as error:
            modes[mode] = {"failed": str(error)}
        print(json.dumps({mode: modes[mode]}), flush=True)
        found = {"modes": modes, "step_ratios": step_ratios(modes)}
        write_result(given.json, provenance(given, load, device=given.device) | found)
    return int(any("failed" in result for result in modes.values()))


if __name__ == "__main__":
    sys.exit(main())
