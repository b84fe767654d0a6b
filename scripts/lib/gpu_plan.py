"""The rows of scripts/gpu_check: what runs, at which size, and the goal of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DECODING = {  # tokens/s that one H100 gave at batch 1, 8, 32, 64 (the first run); block was not run
    "none": (150, 1106, 3976, 6249),
    "target_only": (336, 2230, 5798, 9944),
    "rejection": (387, 2006, 6017, 8134),
    "block": (None, None, None, None),
}
BATCHES = 1, 8, 32, 64
LONG_TURNS = "injection.long_turn_share=1 injection.long_turn_tokens=256 val.every=0 trainer.lr=1e-12"


@dataclass(slots=True, kw_only=True)
class Row:
    """One measurement.

    command: what runs; {out} is a file or folder of its own, {grown} the checkpoint grown to 1.5B,
    {grown_7b} to 7.8B. small: the same on a CPU. read: the figure, from {out}. read_small: whether the
    small run has that figure too. over: the row whose figure this one is divided by, which must run before.
    goal: an upper bound, or a lower one without at_most; None asks only that the command succeeds. sglang:
    needs a server; sglang_small: the small run does, too.
    """

    name: str
    command: str
    small: str
    unit: str = ""
    goal: float | None = None
    at_most: bool = True
    read: Callable[[Path], float] | None = None
    read_small: bool = True
    over: str = ""
    sglang: bool = False
    sglang_small: bool = False


class Ratio(NamedTuple):
    """A figure of one server over another's. goals: by size of the model."""

    arm: str
    over: str
    key: str
    batch: int
    goals: dict[str, float]
    at_most: bool = False


RATIOS = (
    Ratio("rejection", "rejection, stock", "tokens_per_s", 64, {"1.5B": 1.25, "7.8B": 1.13}),
    Ratio("rejection", "none", "tokens_per_s", 1, {"1.5B": 2.5, "7.8B": 2.5}),
    Ratio("rejection", "none", "tokens_per_s", 64, {"1.5B": 1.5, "7.8B": 1.5}),
    Ratio("rejection", "target_only", "ms_per_step", 64, {"1.5B": 1.05, "7.8B": 1.05}, at_most=True),
)


def of_json(*keys: str | int) -> Callable[[Path], float]:
    """Reader of one figure of a bench's JSON."""

    def read(out: Path) -> float:
        value: Any = json.loads(out.read_text())
        for key in keys:
            value = value[key]
        return float(value)

    return read


def of_steps(metric: str) -> Callable[[Path], float]:
    """Reader of a run directory: the median of a metric over the steps after the first, which warms up."""

    def read(out: Path) -> float:
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        values = [record[metric] for record in records if metric in record]
        return median(values[1:] or values)

    return read


def loop(extra: str) -> str:
    """The main job on the grown checkpoint, two steps after the one that warms up."""
    return (
        "{python} -m rlpipe.run +recipe=swe_rl model.path={grown} run.dir={out} run.steps=3 "
        f"metrics.console=false metrics.report=false metrics.wandb=off {LONG_TURNS} {extra}"
    )


def plan() -> list[Row]:
    """All rows, the cheapest first."""
    tests = [
        Row(
            name=f"tests/gpu/{file.name}",
            command=f"{{python}} -m pytest -q -p no:cacheprovider tests/gpu/{file.name}",
            small=f"{{python}} -m pytest -q -p no:cacheprovider --collect-only tests/gpu/{file.name}",
        )
        for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    ]
    verify = "{python} scripts/bench/verify_kernel.py --json {out} --rules chain"
    case = "chain, vocab 151936, batch 8, gamma 3"
    loss = "{python} scripts/bench/tv_loss.py --json {out}"
    on_gpu = "rollout.device=cuda rollout.dtype=bfloat16 trainer.precision=bf16 trainer.tp=1 trainer.dp=1"
    on_cpu = "cluster=inline pipeline.prompts_per_step=2 pipeline.group_size=2 injection.long_turn_tokens=4"
    decode = "{python} scripts/bench/decoding_modes.py --json {out}"
    law = "{python} scripts/bench/first_tokens.py --json {out}"
    memory = "{python} scripts/bench/memory_estimate.py --json {out} --only"
    weights = "{python} scripts/bench/weight_path.py --json {out} --ways ipc shared"
    hashes = "{python} scripts/bench/fingerprint.py --json {out}"
    sglang = f"{on_gpu} cluster=one_node_shared rollout=sglang rollout.workers=1"
    return [
        *tests,
        Row(
            name="verification from Python, batch 8",
            unit="us",
            goal=30,
            command=f"{verify} --batches 8 --gammas 3 --vocabs 151936",
            small=f"{verify} --batches 8 --gammas 3 --vocabs 300 --quick",
            read=of_json("results", case, "arms", "triton", "us_per_call"),
            read_small=False,
        ),
        Row(
            name="TV loss, 8192 rows of 151936 logits",
            unit="ms",
            goal=3.5,
            command=loss,
            small=f"{loss} --device cpu --rows 4 --vocab 1000 --repeats 1",
            read=of_json("results", "arms", "ours", "ms"),
        ),
        Row(
            name="TV loss from hidden states of 4096",
            unit="ms",
            goal=30,
            command=loss,
            small=f"{loss} --device cpu --rows 4 --vocab 1000 --repeats 1",
            read=of_json("results", "arms", "fused", "ms"),
        ),
        Row(
            name="TV loss from hidden states of 4096, memory",
            unit="MB",
            goal=1000,
            command=loss,
            small=f"{loss} --device cpu --rows 4 --vocab 1000 --repeats 1",
            read=of_json("results", "arms", "fused", "peak_mb"),
        ),
        Row(
            name="fingerprint of 1.5B where it lies",
            unit="GB/s",
            goal=500,
            at_most=False,
            command=f"{hashes} --device cuda",
            small=f"{hashes} --device cpu --megabytes 1 --repeats 1",
            read=of_json("results", "mix", "gb_per_s"),
        ),
        Row(
            name="embedded engine, shipped model",
            unit="tokens/s",
            goal=10_000,
            at_most=False,
            command=loop(f"{on_gpu} cluster=inline model.path=shipped:models/tiny"),
            small=loop(f"{on_cpu} model.path=shipped:models/tiny run.steps=1"),
            read=of_steps("perf/tokens_per_s/rollout"),
        ),
        *(
            Row(
                name=f"embedded engine decodes, shipped model, rejection, batch {batch}",
                unit="tokens/s",
                goal=goal,
                at_most=False,
                command=f"{decode} --model models/tiny --device cuda",
                small=f"{decode} --model models/tiny --batches 1 2 --tokens 4",
                read=of_json("tokens_per_s", str(batch)),
                read_small=batch == 1,
            )
            for batch, goal in ((1, None), (8, None), (64, 10_000))
        ),
        Row(
            name="peak memory of a trainer against its estimate",
            unit="times",
            goal=1.1,
            command=f"{memory} large",
            small=f"{memory} tokens",
            read=lambda out: 1 / of_json("rows", 0, "ratio")(out),
        ),
        Row(
            name="peak memory of training 1.5B on 32768 tokens",
            unit="GB",
            goal=80,
            command=f"{memory} long",
            small=f"{memory} tokens",
            read=lambda out: of_json("rows", 0, "measured")(out) / 1e9,
        ),
        *served(
            sizes=("1.5B", "7.8B"),
            arms=("rejection", "rejection, stock", "none", "target_only"),
            ratios=RATIOS,
        ),
        *(
            Row(
                name=name,
                unit="as a standard normal score",
                goal=4.1,  # alpha 1e-4 over the four scores
                command=f"{law} --device cuda --tokens {tokens} {drafts}".strip(),
                small=f"{law} --tokens 600 {drafts}".strip(),
                read=of_json("largest_score"),
                sglang=True,
                sglang_small=True,
            )
            for name, tokens, drafts in (
                ("law of 1e6 first tokens of a server", "1_000_000", ""),
                (
                    "first tokens behind an EAGLE-3 draft of a part of the vocabulary",
                    "300_000",
                    "--reduced",
                ),
            )
        ),
        *(
            Row(
                name=f"update of {size} on one card by {way}: {what}",
                unit="s",
                goal=goal,
                command=f"{weights} --model {{{model}}} --device cuda --repeats {repeats}",
                small=f"{weights} --size tiny --repeats 1",
                read=of_json("results", way, *keys),
                sglang=True,
                sglang_small=True,
            )
            for size, model, whole, repeats in (("1.5B", "grown", 1.0, 3), ("7.8B", "grown_7b", 3.0, 1))
            for way, what, goal, *keys in (
                ("ipc", "whole", whole, "median_s"),
                ("ipc", "server paused", 0.3 if size == "1.5B" else None, "parts_s", "pause"),
                ("ipc", "hand over", None, "parts_s", "hand over"),
                ("ipc", "load", None, "parts_s", "load"),
                ("ipc", "our hash", None, "parts_s", "our hash"),
                ("ipc", "server hash", None, "parts_s", "server hash"),
                ("shared", "whole", None, "median_s"),
                ("shared", "server paused", None, "parts_s", "pause"),
            )
        ),
        *(
            Row(
                name=f"loop of 1.5B with SGLang, {mode}: {what}",
                unit="s",
                goal=goal,
                command=loop(f"{sglang} spec.mode={mode}"),
                small=loop(f"{on_cpu} spec.mode={mode} run.steps=1"),
                read=of_steps(metric),
                sglang=True,
            )
            for mode, what, metric, goal in (
                ("rejection", "weight update", "timing_s/update_weights", 1.0),
                ("rejection", "step", "timing_s/step", None),
                ("none", "step", "timing_s/step", None),
            )
        ),
        Row(
            name="loop of 1.5B with SGLang, step of none over rejection",
            unit="times",
            goal=1.6,
            at_most=False,
            command=loop(f"{sglang} spec.mode=none"),
            small=loop(f"{on_cpu} spec.mode=none run.steps=1"),
            read=of_steps("timing_s/step"),
            over="loop of 1.5B with SGLang, rejection: step",
            sglang=True,
        ),
        *served(sizes=("7.8B", "1.5B"), arms=("none, stock", "target_only, stock", "block")),
    ]


def served(*, sizes: Iterable[str], arms: Iterable[str], ratios: Iterable[Ratio] = ()) -> list[Row]:
    """Speeds of SGLang servers by mode, with rlpipe's plugin or (stock) without, then their ratios."""
    rows = []
    for size in sizes:
        made = {arm: decoded(size, arm) for arm in arms}
        rows += [row for of_arm in made.values() for row in of_arm.values()]
        for ratio in ratios:
            measured, other = (made[arm][ratio.key, ratio.batch] for arm in (ratio.arm, ratio.over))
            name = f"{measured.name} over {ratio.over}"
            goal = ratio.goals.get(size)
            rows.append(
                replace(measured, name=name, over=other.name, goal=goal, at_most=ratio.at_most, unit="times")
            )
    return rows


def decoded(size: str, arm: str) -> dict[tuple[str, int], Row]:
    """One server's rows, by key of the JSON and batch."""
    mode, _, stock = arm.partition(", ")
    model = {"1.5B": "{grown}", "7.8B": "{grown_7b}"}[size]
    decode = f"{{python}} scripts/bench/decoding_modes.py --json {{out}} --model {model} --mode {mode}"
    first = DECODING[mode] if size == "7.8B" and not stock else (None,) * len(BATCHES)
    wanted = [("tokens_per_s", batch, goal) for batch, goal in zip(BATCHES, first, strict=True)]
    return {
        (key, batch): Row(
            name=f"SGLang decodes with {size}, {arm}, batch {batch}" + ", step" * (key == "ms_per_step"),
            unit="tokens/s" if key == "tokens_per_s" else "ms",
            goal=goal,
            at_most=False,
            command=f"{decode} --engine sglang --device cuda{' --stock' * bool(stock)}",
            small=f"{decode} --batches 1 2 --tokens 4",
            read=of_json(key, str(batch)),
            read_small=batch == 1,
            sglang=True,
        )
        for key, batch, goal in (*wanted, ("ms_per_step", 64, None))
    }
