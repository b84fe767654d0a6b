"""The rows of scripts/gpu_check: what runs at which size, which figures are read, and their goals.

A row is one process that writes one JSON file. The rows that are not marked `later` come first; by their
`seconds` they fit nine minutes of one H100, growing models included. The seconds are estimates from the only
runs on such a GPU (a server started in 45 to 60 s), to be replaced by the times of the next run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Report = Any  # what a row wrote, as JSON
SGLANG, TWO_GPUS = "SGLang", "two GPUs"
# Hidden size (heads times the width of a head), heads, kv heads, width, intermediate, layers, vocabulary.
SHAPES = {
    "0.1B": (768, 12, 2, 64, 2048, 12, 16384),
    "1.5B": (1536, 12, 2, 128, 8960, 28, 151936),
    "7.8B": (4096, 32, 8, 128, 11008, 36, 151680),
    "small": (256, 4, 2, 64, 512, 8, 2000),
}
LONG = 32768  # tokens of a long context
BENCH = "{python} scripts/bench/"
PYTEST = "{python} -m pytest -q -p no:cacheprovider"


@dataclass(slots=True, kw_only=True, frozen=True)
class Figure:
    """One number of a row.

    read: extracts the number from the row's report; raises KeyError and the like if the row failed before it.
    at_most, at_least: the goal; a figure with neither is only reported.
    """

    name: str
    read: Callable[[Report], float]
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def goal(self) -> str:
        """Return the goal as text; empty without a goal."""
        if self.at_most is not None:
            return f"<= {self.at_most:g} {self.unit}".strip()
        return f">= {self.at_least:g} {self.unit}".strip() if self.at_least is not None else ""

    def holds(self, value: float) -> bool | None:
        """Return whether the goal is met; None without a goal."""
        if self.at_most is not None:
            return value <= self.at_most
        return value >= self.at_least if self.at_least is not None else None


@dataclass(slots=True, kw_only=True, frozen=True)
class Row:
    """One process and its figures.

    command: what runs. {out} is the file that it writes; {0.1B}, {1.5B} and {7.8B} are the shipped model,
        grown to these sizes.
    small: the command of the same at a small size on a CPU; empty if there is none.
    seconds: time on one H100.
    needs: requirements in addition to a GPU. small_needs: requirements of the small run.
    later: whether the row is not among those of the first nine minutes.
    """

    name: str
    command: str
    small: str
    seconds: int
    figures: tuple[Figure, ...] = ()
    needs: tuple[str, ...] = ()
    small_needs: tuple[str, ...] = ()
    later: bool = False


def at(*keys: str | int) -> Callable[[Report], float]:
    """Return a function that reads the number under these keys from a report."""

    def read(report: Report) -> float:
        for key in keys:
            report = report[key]
        return float(report)

    return read


def kernel_tests() -> Row:
    """Return the row of tests of compiled kernels; `-x`: a misaligned access makes a process unusable."""
    files = " ".join(
        f"tests/gpu/test_{name}_gpu.py"
        for name in ("verify_kernels", "mtp_kernels", "server_kernels", "fingerprint", "attention")
    )
    return Row(
        name="kernels: tests",
        command=f"{PYTEST} -x {files}",
        small=f"{PYTEST} --collect-only {files}",
        seconds=25,
    )


def kernel_speeds() -> list[Row]:
    """Return rows that time the kernels that every step runs."""
    loss = f"{BENCH}tv_loss.py --json {{out}} --arms ours fused"
    verify = f"{BENCH}verify_kernel.py --json {{out}} --rules chain --gammas 3"
    return [
        Row(
            name="kernels: TV loss, 8192 rows of 151936 logits",
            command=loss,
            small=f"{loss} --device cpu --rows 4 --vocab 1000 --repeats 1",
            seconds=12,
            figures=(
                Figure(name="from logits", read=at("results", "arms", "ours", "ms"), unit="ms", at_most=3.5),
                Figure(
                    name="from hidden states of 4096",
                    read=at("results", "arms", "fused", "ms"),
                    unit="ms",
                    at_most=30,
                ),
                Figure(
                    name="its memory", read=at("results", "arms", "fused", "peak_mb"), unit="MB", at_most=1000
                ),
            ),
        ),
        Row(
            name="kernels: verification, batch 8",
            command=f"{verify} --batches 8 --vocabs 151936",
            small=f"{verify} --batches 8 --vocabs 300 --quick",
            seconds=8,
            figures=(
                Figure(
                    name="called from Python",
                    read=at(
                        "results",
                        "chain, vocab 151936, batch 8, gamma 3",
                        "arms",
                        "triton",
                        "us_per_call",
                    ),
                    unit="us",
                    at_most=30,
                ),
            ),
        ),
    ]


def update(size: str, way: str, *, whole: float, paused: float, seconds: int, later: bool = False) -> Row:
    """Return the row of a weight update to a server on the same GPU. `shared` sends only a changed tensor."""
    bench = f"{BENCH}weight_path.py --json {{out}} --ways {way}"
    parts = ("hand over", "load", "our hash", "server hash")
    return Row(
        name=f"update of {size} by {way}",
        command=f"{bench} --model {{{size}}} --device cuda --repeats 2",
        small=f"{bench} --size tiny --repeats 1",
        seconds=seconds,
        figures=(
            Figure(name="whole", read=at("results", way, "median_s"), unit="s", at_most=whole),
            Figure(
                name="server paused", read=at("results", way, "parts_s", "pause"), unit="s", at_most=paused
            ),
            *(Figure(name=part, read=at("results", way, "parts_s", part), unit="s") for part in parts),
        ),
        needs=(SGLANG,),
        small_needs=(SGLANG,),
        later=later,
    )


def loop() -> Row:
    """Return the row of the full loop on one GPU, with and without drafts: times, logprobs, verification."""
    bench = f"{BENCH}loop_modes.py --json {{out}} --modes rejection none --steps 2"
    small = "cluster=inline pipeline.prompts_per_step=2 pipeline.group_size=2 injection.long_turn_tokens=4"
    drafts = "modes", "rejection"
    return Row(
        name="loop of 1.5B, rejection and none",
        command=f"{bench} --model {{1.5B}} --device cuda",
        small=f"{bench} --model models/tiny --steps 1 {small}",
        seconds=190,
        figures=(
            Figure(name="step", read=at(*drafts, "step_s"), unit="s"),
            Figure(
                name="step without drafts over it",
                read=at("step_ratios", "none / rejection"),
                unit="times",
                at_least=1.6,
            ),
            Figure(name="weight update", read=at(*drafts, "update_weights_s"), unit="s", at_most=1),
            Figure(name="generation", read=at(*drafts, "generated_tokens_per_s"), unit="tokens/s"),
            # bf16 on both sides gave 0.02 to 0.04 for the worst token of a step on an H100.
            Figure(
                name="log-probabilities against the trainer", read=at(*drafts, "logprob_diff"), at_most=0.01
            ),
            Figure(name="verified without kernels", read=at(*drafts, "without_kernels"), at_most=0),
            Figure(name="failures of the canary", read=at(*drafts, "canary_failures"), at_most=0),
        ),
        needs=(SGLANG,),
    )


def decoding(
    size: str, modes: tuple[str, ...], figures: tuple[Figure, ...], seconds: int, **options: Any
) -> Row:
    """Return the row of a server's speed in each mode; options: `extra` arguments, and fields of Row."""
    bench = f"{BENCH}decoding_modes.py --json {{out}} --modes {' '.join(f'{mode!r}' for mode in modes)}"
    extra = options.pop("extra", "--batches 1 64 --repeats 1")
    return Row(
        name=f"decoding of {size}, {' and '.join(modes)}{options.pop('what', '')}",
        command=f"{bench} --model {{{size}}} --engine sglang --device cuda {extra}",
        small=f"{bench.replace(', stock', '')} --model models/tiny --batches 1 2 --tokens 4 --repeats 1",
        seconds=seconds,
        figures=figures,
        needs=(SGLANG,),
        **options,
    )


def speeds(mode: str, batches: tuple[int, ...], goals: dict[int, float] | None = None) -> tuple[Figure, ...]:
    """Return figures for tokens a second of one mode, by batch; goals: lower bounds."""
    return tuple(
        Figure(
            name=f"{mode}, batch {batch}",
            read=at("modes", mode, "batches", str(batch), "tokens_per_s"),
            unit="tokens/s",
            at_least=(goals or {}).get(batch),
        )
        for batch in batches
    )


def faster(pair: str, batch: int, goal: float) -> Figure:
    """Return the figure for the speed of one mode relative to another."""
    return Figure(
        name=f"{pair}, batch {batch}", read=at("ratios", pair, str(batch)), unit="times", at_least=goal
    )


def decoding_7b() -> Row:
    """Return the row for the gain of drafts at real size, by context length, and a CUDA graph's cost."""
    # One H100 gave 387 and 8,134 tokens/s with drafts, 150 and 6,249 without.
    rejection = speeds("rejection", (1, 64), {1: 387, 64: 8134})
    long = tuple(
        Figure(
            name=f"{mode}, {LONG} tokens of context",
            read=at("modes", mode, "long", "tokens_per_s"),
            unit="tokens/s",
        )
        for mode in ("rejection", "none")
    )
    graph = Figure(
        name="capture of a graph", read=at("modes", "rejection", "s_per_graph"), unit="s", at_most=0.5
    )
    gains = faster("rejection / none", 1, 2.5), faster("rejection / none", 64, 1.5)
    return decoding(
        "7.8B",
        ("rejection", "none"),
        (*rejection, *speeds("none", (1, 64)), *gains, *long, graph),
        140,
        extra=f"--batches 1 64 --repeats 1 --long {LONG}",
    )


def checkpoint() -> Row:
    """Return the row for saving and resuming with the distributed optimizer: peaks, stall, next norm."""
    bench = f"{BENCH}checkpoint_peaks.py --json {{out}}"
    row = "rows", 0
    return Row(
        name="save and resume of 1.5B, distributed optimizer",
        command=f"{bench} --device cuda --model {{1.5B}}",
        small=f"{bench} --only float32",
        seconds=50,
        figures=(
            Figure(name="training blocked by a save", read=at(*row, "stall_s"), unit="s", at_most=10),
            Figure(name="added on the GPU", read=lambda r: at(*row, "card")(r) / 1e9, unit="GB", at_most=1),
            Figure(name="added on the host", read=lambda r: at(*row, "save")(r) / 1e9, unit="GB"),
            Figure(name="estimate of that", read=at(*row, "ratio"), unit="times", at_least=0.9),
            Figure(name="norm after resuming, off by", read=at(*row, "norm_error"), at_most=5e-3),
        ),
    )


def versions() -> Row:
    """Return the row for tokens sampled while weights change, on a server with overlapped scheduling."""
    bench = f"{BENCH}token_versions.py --json {{out}}"
    return Row(
        name="versions of tokens across updates",
        command=f"{bench} --model {{0.1B}} --device cuda",
        small=f"{bench} --model {{0.1B}} --batch 4 --updates 2",
        seconds=37,
        figures=(
            Figure(name="wrong", read=at("wrong"), unit="tokens", at_most=0),
            Figure(name="turns across an update", read=at("across"), unit="turns", at_least=1),
        ),
        needs=(SGLANG,),
        small_needs=(SGLANG,),
    )


def experts() -> Row:
    """Return the row for training one layer of a 30B-A3B model."""
    bench = f"{BENCH}experts.py --json {{out}}"
    size = "--hidden 2048 --inner 768 --experts 128 --per-token 8 --layers 1 --tokens 16384 --repeats 3"
    return Row(
        name="MoE micro-batch: a layer of 128 experts, 16384 tokens",
        command=f"{bench} --device cuda {size}",
        small=f"{bench} --experts 4 --layers 1 --tokens 512 --repeats 1",
        seconds=22,
        figures=(
            Figure(name="grouped", read=at("results", "grouped", "s"), unit="s"),
            Figure(name="over a loop over experts", read=at("speed"), unit="times", at_least=2),
        ),
    )


def two_gpus() -> Row:
    """Return the row for two trainer ranks and two servers that share two GPUs; each rank sends by IPC."""
    bench = f"{BENCH}loop_modes.py --json {{out}} --modes rejection --steps 2"
    shared = "cluster=one_node_shared rollout=sglang rollout.workers=2 trainer.tp=1 trainer.dp=2"
    return Row(
        name="loop of 1.5B on two shared GPUs",
        command=f"{bench} --model {{1.5B}} --device cuda {shared}",
        small="",
        seconds=110,
        figures=(
            Figure(
                name="weight update",
                read=at("modes", "rejection", "update_weights_s"),
                unit="s",
                at_most=2,
            ),
            Figure(
                name="failures of the canary", read=at("modes", "rejection", "canary_failures"), at_most=0
            ),
        ),
        needs=(SGLANG, TWO_GPUS),
        later=True,
    )


def gpu_tests() -> list[Row]:
    """Return rows that compare engine and trainer with the CPU, each test file in a separate process."""
    return [
        Row(
            name=f"tests of the {name}",
            command=f"{PYTEST} tests/gpu/test_{name}_gpu.py",
            small=f"{PYTEST} --collect-only tests/gpu/test_{name}_gpu.py",
            seconds=60,
            later=True,
        )
        for name in ("engine", "trainer")
    ]


def all_graphs() -> Row:
    """Return the row that starts a server of one_node's size, with all CUDA graphs and draft buffers."""
    figures = (
        Figure(name="start", read=at("modes", "rejection", "start_s"), unit="s", at_most=300),
        Figure(
            name="capture of a graph", read=at("modes", "rejection", "s_per_graph"), unit="s", at_most=0.5
        ),
        *speeds("rejection", (256,)),
    )
    return decoding(
        "1.5B",
        ("rejection",),
        figures,
        150,
        extra="--batches 256 --repeats 1 --all-graphs",
        what=", 256 at once, every graph",
        later=True,
    )


def memory() -> list[Row]:
    """Return rows that compare a trainer's peak memory with the estimate."""
    bench = f"{BENCH}memory_estimate.py --json {{out}} --only"
    measured = Figure(name="peak", read=lambda r: at("rows", 0, "measured")(r) / 1e9, unit="GB", at_most=80)
    ratio = Figure(name="peak over its estimate", read=lambda r: 1 / at("rows", 0, "ratio")(r), at_most=1.1)
    return [
        Row(
            name=f"memory of training 1.5B on {tokens} tokens",
            command=f"{bench} '{case}'",
            small=f"{bench} 'many tokens'",
            seconds=60,
            figures=(measured, ratio),
            later=True,
        )
        for tokens, case in ((16384, "large trainer"), (32768, "large and long"))
    ]


def embedded() -> Row:
    """Return the row for the embedded engine, whose drafts are verified by rlpipe's kernels on a GPU."""
    bench = f"{BENCH}decoding_modes.py --json {{out}} --modes rejection --model models/tiny"
    return Row(
        name="embedded engine, shipped model",
        command=f"{bench} --device cuda --batches 1 64 --repeats 1",
        small=f"{bench} --batches 1 2 --tokens 4 --repeats 1",
        seconds=60,
        figures=speeds("rejection", (1, 64), {64: 10_000}),
        later=True,
    )


def fingerprint() -> Row:
    """Return the row for checksums of 1.5B parameters, computed in place."""
    bench = f"{BENCH}fingerprint.py --json {{out}}"
    return Row(
        name="fingerprint of 1.5B",
        command=f"{bench} --device cuda",
        small=f"{bench} --device cpu --megabytes 1 --repeats 1",
        seconds=30,
        figures=(Figure(name="speed", read=at("results", "mix", "gb_per_s"), unit="GB/s", at_least=500),),
        later=True,
    )


def verified_by_kernels(report: Report) -> float:
    """Return the share of a server's verify steps that ran on rlpipe's kernels."""
    return report["judged"]["rlpipe"] / sum(report["judged"].values())


def first_tokens() -> list[Row]:
    """Return rows that test the distribution of a server's first tokens; alpha 1e-4 over four scores."""
    bench = f"{BENCH}first_tokens.py --json {{out}}"
    score = Figure(
        name="largest score", read=at("largest_score"), unit="as a standard normal score", at_most=4.1
    )
    kernels = Figure(name="verified by rlpipe's kernels", read=verified_by_kernels, at_least=1)
    return [
        Row(
            name=name,
            command=f"{bench} --device cuda --tokens {tokens} {drafts}".strip(),
            small=f"{bench} --tokens 600 {drafts}".strip(),
            seconds=seconds,
            figures=(score, kernels),
            needs=(SGLANG,),
            small_needs=(SGLANG,),
            later=True,
        )
        for name, tokens, drafts, seconds in (
            ("distribution of 1e6 first tokens", "1_000_000", "", 240),
            (
                "distribution of first tokens behind a draft of part of the vocabulary",
                "300_000",
                "--reduced",
                120,
            ),
        )
    ]


def plan() -> list[Row]:
    """Return all rows in the order in which they run."""
    stock = ("rejection", "rejection, stock", "target_only", "block")
    against_stock = (*speeds("block", (1, 64)), faster("rejection / rejection, stock", 64, 1.13))
    return [
        kernel_tests(),
        *kernel_speeds(),
        update("1.5B", "ipc", whole=1.0, paused=0.2, seconds=50),
        loop(),
        decoding_7b(),
        checkpoint(),
        versions(),
        experts(),
        two_gpus(),
        *gpu_tests(),
        all_graphs(),
        *memory(),
        embedded(),
        fingerprint(),
        decoding("7.8B", stock, against_stock, 300, later=True),
        update("1.5B", "shared", whole=1.0, paused=0.2, seconds=60, later=True),
        update("7.8B", "ipc", whole=3.0, paused=0.6, seconds=150, later=True),
        *first_tokens(),
    ]
