"""How long is a training step: asynchronous against synchronous, and against TRL's GRPOTrainer?

Every arm trains the same model on the same work in the same run: 8 prompts x 8 completions of exactly
128 sampled tokens, one optimizer step. Ours runs the real command line (Ray, Megatron, the embedded
engine) with max_staleness 1 and 0; TRL runs `GRPOTrainer` in its own process. The first steps of each
arm are warm-up; the median and the spread of the rest are reported.

    python scripts/bench/step_time.py --json OUT [--steps 12] [--arms async sync async_none sync_none trl]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny"
WARM_UP = 3
PROMPTS, GROUP, TOKENS = 8, 8, 128
OURS = {
    "async": ["pipeline.max_staleness=1", "spec.mode=rejection"],
    "sync": ["pipeline.max_staleness=0", "spec.mode=rejection", "rollout.threads=2", "trainer.threads=2"],
    "async_none": ["pipeline.max_staleness=1", "spec.mode=none"],
    "sync_none": ["pipeline.max_staleness=0", "spec.mode=none", "rollout.threads=2", "trainer.threads=2"],
}


def run_ours(arm: str, steps: int) -> list[float]:
    """Seconds of each step of the real main job on a fixed-length workload."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [
            "+recipe=reasoning_rl",
            f"run.dir={directory}/run",
            f"run.steps={steps}",
            "run.save_every=0",
            "val.every=0",
            "rollout.ignore_eos=true",
            f"rollout.max_new_tokens={TOKENS}",
            "algo.skip_zero_advantage=false",
            f"pipeline.prompts_per_step={PROMPTS}",
            f"pipeline.group_size={GROUP}",
            "metrics.wandb=off",
            "metrics.report=false",
            *OURS[arm],
        ]
        subprocess.run(
            [sys.executable, "-m", "rlpipe.run", *overrides],
            cwd=ROOT,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if "timing_s/step" in (record := json.loads(line))]
    for record in records:
        assert record["response_length/min"] == record["response_length/max"] == TOKENS, "not the same work"
    return [record["timing_s/step"] for record in records]


def run_trl(steps: int) -> list[float]:
    """Seconds of each GRPOTrainer step on the same model, batch and completion length."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = Qwen2ForCausalLM.from_pretrained(MODEL)
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = tokenizer.pad_token  # never sampled on purpose: completions run to TOKENS
    sys.path.insert(0, str(ROOT))
    from rlpipe.config.env import EnvConfig, EnvName
    from rlpipe.envs import make_suite

    suite = make_suite(EnvConfig(name=EnvName.REASONING), seed=0)
    prompts = [suite.episode(i).messages()[-1]["content"] for i in suite.instance_ids("train")[:256]]
    clock: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            clock.append(-time.monotonic())

        def on_step_end(self, *_: object, **__: object) -> None:
            clock[-1] += time.monotonic()

    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [float(len(c) % 2) for c in completions],
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=directory,
                per_device_train_batch_size=PROMPTS * GROUP,
                num_generations=GROUP,
                max_completion_length=TOKENS,
                max_steps=steps,
                learning_rate=1e-5,
                beta=0.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                logging_steps=1000,
                disable_tqdm=True,
            ),
        )
        trainer.train()
    return clock


def measure(arm: str, steps: int) -> dict[str, object]:
    """One arm, with its median and spread after warm-up."""
    if arm == "trl":
        command = [sys.executable, __file__, "--trl-child", "--steps", str(steps)]
        printed = subprocess.run(
            command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        seconds = json.loads(printed.stdout.splitlines()[-1])
    else:
        seconds = run_ours(arm, steps)
    kept = seconds[WARM_UP:]
    quartiles = statistics.quantiles(kept, n=4)
    return {
        "median_s": round(statistics.median(kept), 3),
        "quartiles_s": [round(quartiles[0], 3), round(quartiles[2], 3)],
        "steps": len(kept),
        "tokens_per_s": round(PROMPTS * GROUP * TOKENS / statistics.median(kept)),
    }


def main() -> None:
    """Run the arms one after another and write one JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--arms", nargs="+", choices=[*OURS, "trl"], default=[*OURS, "trl"])
    parser.add_argument("--trl-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl_child:
        print(json.dumps(run_trl(args.steps)))
        return
    arms = list(args.arms)
    if "trl" in arms and not _installed("trl"):
        print("trl is not installed: that arm is left out (pip install trl)")
        arms.remove("trl")
    results = {arm: measure(arm, args.steps) for arm in arms}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    packages = ("torch", "transformers", "megatron-core", "verl", "ray", "trl")
    report = {
        "question": "seconds per training step, 64 completions of 128 tokens",
        "commit": commit,
        "versions": {name: importlib.metadata.version(name) for name in packages if _installed(name)},
        "cores": os.cpu_count(),
        "device": "cpu",
        "warm_up_steps": WARM_UP,
        "overrides": OURS,
        "arms": results,
        "ratios": {
            f"{slow} / {fast}": round(results[slow]["median_s"] / results[fast]["median_s"], 3)
            for slow, fast in (
                ("sync", "async"),
                ("sync_none", "async_none"),
                ("trl", "async"),
                ("trl", "async_none"),
            )
            if slow in results and fast in results
        },
    }
    text = json.dumps(report, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
