"""How long is a training step, asynchronous, synchronous, and with TRL's GRPOTrainer?

Every arm trains the same model on the same work: 8 prompts x 8 completions of exactly
128 sampled tokens, one optimizer step. The rlpipe arms run the real command line (Ray, Megatron, the embedded
engine) with max_staleness 1 and 0. TRL runs `GRPOTrainer` in its own process on the same conversations, with
the same system prompt and chat template; the mean length of prompts is reported and must agree. In short_*
the system prompt is one line. rlpipe computes a shared prompt only once for all siblings, so a long prompt
would favour rlpipe. The first steps of each arm are warm-up, and the last steps of rlpipe's arms start no
more rollouts; median, mean and spread of the other steps are reported.

Long tails (arms tail200_*, tail300_*, tail500_*): one turn in twenty decodes that many tokens beyond its 128.
The additional tokens are thrown away, so the trainer's work stays the same. A synchronous step waits for the
last long turn. At staleness 2 other turns continue, but a long turn must finish within two steps of its
admission. In `sync` each phase uses both cores, as if all devices changed roles; `apart` differs from the
asynchronous arm only in the staleness (each role has one core). Prompts are short in these arms, because the
answers of a reasoning model are longer than its prompts; otherwise attention to 280 tokens of prompt would
dominate the rollout. In slow_* the environment takes 4 s longer for one episode in twenty. `trained` arms are
full runs of the main job (swe_rl, one turn in fifty 200 tokens longer) that also report the reward on
held-out tasks before and after: the faster arm must not learn less. Utilisation is the share of the counted
steps' time in which an engine generated, and in which the trainer trained.

    python scripts/bench/step_time.py --json OUT [--steps 15] [--arms async sync async_none sync_none trl]
    python scripts/bench/step_time.py --json OUT --arms async_none trl short_none short_trl
    python scripts/bench/step_time.py --json OUT --arms tail300_async tail300_sync tail300_apart \
        --steps 18 --repeats 3
    python scripts/bench/step_time.py --json OUT --arms slow_async slow_sync --steps 18
    python scripts/bench/step_time.py --json OUT --arms trained_async trained_sync --steps 40 --repeats 3
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import bench_parser, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny"
WARM_UP, COOL_DOWN = 3, 3
PROMPTS, GROUP, TOKENS = 8, 8, 128
FIXED = [
    "+recipe=reasoning_rl",
    "val.every=0",
    "rollout.ignore_eos=true",
    f"rollout.max_new_tokens={TOKENS}",
    "algo.skip_zero_advantage=false",
]
SHORT = "Answer in <answer> tags."  # system prompt
SHORT_PROMPT = f"env.system_prompt='{SHORT}'"
TAIL = [SHORT_PROMPT, "rollout.max_context=1024", "spec.mode=none", "injection.long_turn_share=0.05"]
TAILS = (200, 300, 500)
SLOW = ["env.threads=64", "injection.slow_env_share=0.05", "injection.slow_env_seconds=4"]
TRAINED = [
    "+recipe=swe_rl",
    "val.every=1000000",  # before the first step and after the last
    "injection.long_turn_share=0.02",
    "injection.long_turn_tokens=200",
]
STALE_2 = ["pipeline.max_staleness=2"]
APART = ["pipeline.max_staleness=0"]  # synchronous, rollout and trainer have a core each
SYNCHRONOUS = [*APART, "rollout.threads=2", "trainer.threads=2"]
OURS = {
    "async": ["pipeline.max_staleness=1", "spec.mode=rejection"],
    "sync": ["pipeline.max_staleness=0", "spec.mode=rejection", "rollout.threads=2", "trainer.threads=2"],
    "async_none": ["pipeline.max_staleness=1", "spec.mode=none"],
    "sync_none": ["pipeline.max_staleness=0", "spec.mode=none", "rollout.threads=2", "trainer.threads=2"],
    "short_none": ["pipeline.max_staleness=1", "spec.mode=none", SHORT_PROMPT],
    **{
        f"tail{n}_{kind}": [*loop, *TAIL, f"injection.long_turn_tokens={n}"]
        for n in TAILS
        for kind, loop in (("async", STALE_2), ("sync", SYNCHRONOUS), ("apart", APART))
    },
    "slow_async": [*STALE_2, "spec.mode=none", *SLOW],
    "slow_sync": [*SYNCHRONOUS, "spec.mode=none", *SLOW],
    "trained_async": STALE_2,
    "trained_sync": APART,  # a second thread makes its short turns slower
}
RATIOS = (
    ("sync", "async"),
    ("sync_none", "async_none"),
    *((f"tail{n}_{sync}", f"tail{n}_async") for n in TAILS for sync in ("sync", "apart")),
    ("slow_sync", "slow_async"),
    ("trained_sync", "trained_async"),
    ("trl", "async"),
    ("trl", "async_none"),
    ("short_trl", "short_none"),
)
TRL = ("trl", "short_trl")


def run_ours(arm: str, steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Run the real command line and return its records."""
    trained = arm.startswith("trained")
    sizes = [f"pipeline.prompts_per_step={PROMPTS}", f"pipeline.group_size={GROUP}"]
    with tempfile.TemporaryDirectory() as directory:
        overrides = [
            *(TRAINED if trained else [*FIXED, *sizes]),
            f"run.dir={directory}/run",
            f"run.steps={steps}",
            f"run.seed={seed}",
            "run.save_every=0",
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
    records = [json.loads(line) for line in lines]
    for record in records:
        same = trained or record.get("response_length/min") == record.get("response_length/max")
        assert same and (trained or record.get("response_length/max", TOKENS) == TOKENS), "not the same work"
    return records


def run_trl(steps: int, short: bool) -> dict[str, Any]:
    """Return seconds of each GRPOTrainer step, with equal model, batch and lengths, and prompt tokens."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = Qwen2ForCausalLM.from_pretrained(MODEL)
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = tokenizer.pad_token  # practically never sampled, so completions run to TOKENS
    sys.path.insert(0, str(ROOT))
    from rlpipe.config.env import EnvConfig, EnvName
    from rlpipe.envs import make_suite

    config = EnvConfig(name=EnvName.REASONING)
    suite = make_suite(replace(config, system_prompt=SHORT) if short else config, seed=0)
    prompts = [suite.episode(i).messages() for i in suite.instance_ids("train")[:256]]
    formatted = [tokenizer.apply_chat_template(p, add_generation_prompt=True) for p in prompts]
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
            reward_funcs=lambda completions, **_: [float(len(c[-1]["content"]) % 2) for c in completions],
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
    return {"seconds": clock, "prompt_tokens": statistics.fmean(len(f["input_ids"]) for f in formatted)}


def measure(arm: str, steps: int, repeats: int) -> dict[str, Any]:
    """Run one arm; return its median and spread after warm-up. Each repeat is a run with another seed."""
    if arm in TRL:
        command = [sys.executable, __file__, "--trl-child", arm, "--steps", str(steps)]
        printed = subprocess.run(
            command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        found = json.loads(printed.stdout.splitlines()[-1])
        return {**_summary(found["seconds"][WARM_UP:]), "prompt_tokens": round(found["prompt_tokens"], 1)}
    runs = [run_ours(arm, steps, seed) for seed in range(repeats)]
    timed = [[r for r in records if "timing_s/step" in r][WARM_UP:-COOL_DOWN] for records in runs]
    kept = [record for records in timed for record in records]
    told = _summary([record["timing_s/step"] for record in kept])
    if repeats > 1:
        told["median_s_of_runs"] = [
            round(statistics.median(r["timing_s/step"] for r in records), 3) for records in timed
        ]
    whole = sum(record["timing_s/step"] for record in kept)
    told["utilisation"] = {
        who: round(sum(r[f"perf/utilisation/{who}"] * r["timing_s/step"] for r in kept) / whole, 3)
        for who in ("rollout", "trainer")
    }
    lengths = [record["prompt_length/mean"] for record in kept]
    told["prompt_tokens"] = round(statistics.fmean(lengths), 1)
    ages = [record["training/off_policy/trajectory_staleness/mean"] for record in kept]
    told["staleness_mean"] = round(statistics.fmean(ages), 3)
    if arm.startswith("trained"):
        told.pop("tokens_per_s")
        validated = [[r for r in records if "val/reward" in r] for records in runs]
        told["val_reward_before"] = [round(records[0]["val/reward"], 4) for records in validated]
        told["val_reward_after"] = [round(records[-1]["val/reward"], 4) for records in validated]
        told["val_reward_se"] = [round(records[-1]["val/reward_se"], 4) for records in validated]
    return told


def _summary(kept: list[float]) -> dict[str, Any]:
    """Return statistics of the seconds of the counted steps."""
    quartiles = statistics.quantiles(kept, n=4)
    return {
        "median_s": round(statistics.median(kept), 3),
        "mean_s": round(statistics.fmean(kept), 3),
        "quartiles_s": [round(quartiles[0], 3), round(quartiles[2], 3)],
        "steps": len(kept),
        "tokens_per_s": round(PROMPTS * GROUP * TOKENS / statistics.median(kept)),
    }


def main() -> None:
    """Run the arms one after another and write one JSON."""
    parser = bench_parser(__doc__, repeats=1)
    parser.add_argument("--steps", type=int, default=15)
    usual = ["async", "sync", "async_none", "sync_none", "trl"]
    parser.add_argument("--arms", nargs="+", choices=[*OURS, *TRL], default=usual)
    parser.add_argument("--trl-child", choices=TRL, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl_child:
        print(json.dumps(run_trl(args.steps, short=args.trl_child == "short_trl")))
        return
    arms = list(args.arms)
    if set(TRL) & set(arms) and not _installed("trl"):
        print("trl is not installed: its arms are left out (pip install trl)")
        arms = [arm for arm in arms if arm not in TRL]
    load = load_average()
    results = {arm: measure(arm, args.steps, args.repeats) for arm in arms}
    for trl, ours in RATIOS:
        if trl in TRL and {trl, ours} <= results.keys():
            lengths = [results[arm]["prompt_tokens"] for arm in (trl, ours)]
            assert max(lengths) < 1.03 * min(lengths), f"not the same work: prompts of {lengths} tokens"
    packages = ("torch", "transformers", "megatron-core", "verl", "ray", "trl")
    report = {
        "question": "seconds per training step (of all but `trained_*` arms: 64 completions of 128 tokens)",
        **provenance(args, load, packages=[name for name in packages if _installed(name)]),
        "warm_up_steps": WARM_UP,
        "cool_down_steps": COOL_DOWN,
        "overrides": {arm: OURS.get(arm, []) for arm in arms},
        "arms": results,
        "ratios": {
            kind: {
                f"{slow} / {fast}": round(results[slow][f"{kind}_s"] / results[fast][f"{kind}_s"], 3)
                for slow, fast in RATIOS
                if slow in results and fast in results
            }
            for kind in ("median", "mean")
        },
    }
    print(json.dumps(report, indent=1))
    write_result(args.json, report)


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
