"""How fast do our Triton kernels verify, compared with SGLang's, a plain torch version and a Python loop?

Arms verify the same drafts with the same uniforms, in one process, and take turns within a repeat, so that a
disturbance affects all of them. Reported per arm: the median time of a call over repeats, and its spread.

`triton`       `rlpipe.spec.verify` with backend="triton"; needs a CUDA device
`sglang`       the rejection kernel of SGLang, loaded as one source file from the wheel given by
               --sglang-wheel (`pip download sglang==0.5.23 --no-deps`); needs a CUDA device
`torch`        `rlpipe.spec.verify` with backend="torch"
`plain torch`  the textbook: residuals of all gamma rows, normalised, one multinomial draw each (chain only)
`python loop`  row by row and depth by depth, with torch inside a row (chain on the CPU only)

Kernels allocate their outputs inside the timed call, as in real use. On a GPU, times are those of calls
queued back to back; `graph` is the same from a CUDA graph, in which launching costs nothing. Arms that cannot
run are named under `skipped` with the reason. Before timing, every arm's num_accepted is compared with the
reference's; `agreement` is the share of equal rows (SGLang's uniforms are float32).

On a CPU the goal is three times the speed of the Python loop; `goal` states for each size whether it is met.
At a large vocabulary both arms read the same probabilities, which limits the possible speed-up.

    python scripts/bench/verify_kernel.py --json OUT [--quick] [--sglang-wheel WHEEL] [--threads 1]
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from harness import (
    Clock,
    bench_parser,
    calls_for,
    load_average,
    provenance,
    repeated,
    spread,
    take_turns,
    write_result,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlpipe.spec import verify  # noqa: E402

GOAL = 3.0  # times the speed of the Python loop, on a CPU
SGLANG_SOURCE = "sglang/kernels/ops/speculative/reject_sampling.py"
RULES = {"chain": verify.verify_chain, "block": verify.verify_block}
Arguments = list[torch.Tensor]
Arm = Callable[[], torch.Tensor]  # verifies the whole batch, returns num_accepted


def inputs(batch: int, gamma: int, vocab: int, device: str) -> Arguments:
    """Make arguments of a rule: peaked target rows and drafts that resemble them; 8 different rows, repeated.

    The repeats are copies, so that as much memory is read as in real use.
    """
    generator = torch.Generator().manual_seed(batch + gamma)
    rows = min(batch, 8)
    logits = 3 * torch.randn(rows, gamma + 1, vocab, generator=generator)
    noise = torch.randn(rows, gamma, vocab, generator=generator)
    copies = -(-batch // rows)
    target = logits.softmax(-1).repeat(copies, 1, 1)[:batch]
    draft = (logits[:, :gamma] + noise).softmax(-1).repeat(copies, 1, 1)[:batch]
    tokens = torch.multinomial(draft[:rows].reshape(-1, vocab), copies, replacement=True, generator=generator)
    tokens = tokens.view(rows, gamma, copies).permute(2, 0, 1).reshape(-1, gamma)[:batch].contiguous()
    coins = torch.rand(batch, gamma, dtype=torch.float64, generator=generator)
    uniforms = torch.rand(batch, dtype=torch.float64, generator=generator)
    return [x.to(device) for x in (tokens, draft, target, coins, uniforms)]


def plain_torch(tokens, draft, target, coins, uniforms) -> torch.Tensor:
    """Verify naively in torch: correct and sample all gamma + 1 rows, then choose one."""
    batch, gamma = tokens.shape
    p = target[:, :-1].gather(2, tokens[..., None])[..., 0]
    q = draft.gather(2, tokens[..., None])[..., 0]
    num_accepted = (coins < p / q).long().cumprod(1).sum(1)
    residual = (target[:, :-1] - draft).clamp(min=0)
    residual = torch.cat([residual / residual.sum(-1, keepdim=True), target[:, -1:]], 1)
    drawn = torch.multinomial(residual.flatten(0, 1), 1).view(batch, gamma + 1)
    drawn.gather(1, num_accepted[:, None])
    return num_accepted


def python_loop(tokens, draft, target, coins, uniforms) -> torch.Tensor:
    """Verify row by row: stop at the first rejection, correct that row and sample from it only."""
    counts, emitted = [], []
    for b in range(len(tokens)):
        weights, accepted = target[b, -1], tokens.shape[1]
        for i, token in enumerate(tokens[b].tolist()):
            if not coins[b, i] * draft[b, i, token] < target[b, i, token]:
                weights, accepted = (target[b, i] - draft[b, i]).clamp(min=0), i
                break
        cdf = (weights / weights.sum()).cumsum(0, dtype=torch.float64)
        emitted.append(int(torch.searchsorted(cdf, uniforms[b], right=True).clamp(max=len(cdf) - 1)))
        counts.append(accepted)
    return torch.tensor(counts)


def sglang_arm(module: ModuleType, block: bool, tokens, draft, target, coins, uniforms) -> Arm:
    """Return a call of SGLang's kernel; its constant inputs are prepared outside the call."""
    batch, gamma = tokens.shape
    candidates = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1)
    index = torch.arange(batch * (gamma + 1), device=tokens.device).view(batch, gamma + 1)
    coins, uniforms = coins.float(), uniforms.float()

    def run() -> torch.Tensor:
        integers = partial(torch.empty, dtype=torch.int32, device=tokens.device)
        counts = integers(batch)
        module.chain_speculative_sampling_triton(
            predicts=integers(batch * (gamma + 1)),
            accept_index=integers(batch, gamma + 1),
            accept_token_num=counts,
            candidates=candidates,
            retrive_index=index,
            retrive_next_token=None,
            retrive_next_sibling=None,
            uniform_samples=coins,
            uniform_samples_for_final_sampling=uniforms,
            target_probs=target,
            draft_probs=draft,
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
            block_verification=block,
        )
        return counts

    return run


def load_sglang(wheel: Path, folder: Path) -> ModuleType:
    """Load the kernel's source file from the wheel as a module."""
    with zipfile.ZipFile(wheel) as archive:
        (folder / "reject_sampling.py").write_bytes(archive.read(SGLANG_SOURCE))
    spec = importlib.util.spec_from_file_location("reject_sampling", folder / "reject_sampling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def skipped_arms(device: str, sglang: ModuleType | None) -> dict[str, str]:
    """Return the arms that cannot run here, with the reasons."""
    skipped = {}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cpu" and not interpreted:
        skipped["triton"] = skipped["sglang"] = "no CUDA device; an interpreted kernel's time says nothing"
    elif sglang is None:
        skipped["sglang"] = "no --sglang-wheel given"
    if device != "cpu":
        skipped["python loop"] = "it waits for the device at every coin; the goal is for the CPU"
    return skipped


def make_arms(rule: str, arguments: Arguments, sglang: ModuleType | None, skipped: dict) -> dict[str, Arm]:
    """Make all arms of a rule that can run."""
    verifier = RULES[rule]
    arms: dict[str, Arm] = {"torch": lambda: verifier(*arguments).num_accepted}
    if rule == "chain":
        arms["plain torch"] = partial(plain_torch, *arguments)
        arms["python loop"] = partial(python_loop, *arguments)
    arms["triton"] = lambda: verifier(*arguments, backend="triton").num_accepted
    if sglang is not None:
        arms["sglang"] = sglang_arm(sglang, rule == "block", *arguments)
    return {name: arm for name, arm in arms.items() if name not in skipped}


def graphed(arm: Arm) -> Arm:
    """Return an arm that does the same work from a CUDA graph; the given arm must have run once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts = arm()

    def run() -> torch.Tensor:
        graph.replay()
        return counts

    return run


def measure(
    arms: dict[str, Arm],
    device: str,
    repeats: int,
    budget_s: float,
    *,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Run each arm: two warm-up calls, one to size blocks of budget_s seconds, then rounds of turns."""
    synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
    reference = arms["torch"]().cpu()
    calls, agreement = {}, {}
    for name, arm in arms.items():
        agreement[name] = (arm().cpu() == reference).double().mean().item()
        arm()
        synchronize()
        calls[name] = calls_for(arm, budget_s, synchronize=synchronize, clock=clock)

    blocks = {name: repeated(arm, calls[name], synchronize) for name, arm in arms.items()}
    samples = take_turns(blocks, repeats, warm_up=0, clock=clock)
    rows = {}
    for name in arms:
        times = spread([1e6 / rate for rate in samples.rates(name)])
        rows[name] = {
            "us_per_call": times["median"],
            "min_max": times["min_max"],
            "calls": calls[name],
            "agreement": agreement[name],
        }
    return rows


def bench(
    rule: str, batch: int, gamma: int, vocab: int, args: Any, sglang: ModuleType | None, skipped: dict
) -> dict:
    """Measure one size; return the times of all arms, and the ratio of each to rlpipe's kernel."""
    arguments = inputs(batch, gamma, vocab, args.device)
    arms = make_arms(rule, arguments, sglang, skipped)
    if args.device != "cpu":
        for name in [n for n in ("triton", "sglang") if n in arms]:
            arms[name]()  # compiles
            arms[f"{name}, graph"] = graphed(arms[name])
    rows = measure(arms, args.device, args.repeats, args.budget)
    ratios = {}
    for ours, others in {
        "triton": ("sglang", "torch", "plain torch"),
        "triton, graph": ("sglang, graph",),
        "torch": ("python loop", "plain torch"),
    }.items():
        for other in others:
            if ours in rows and other in rows:
                ratios[f"{other} / {ours}"] = round(rows[other]["us_per_call"] / rows[ours]["us_per_call"], 2)
    accepted = arms["torch"]().double().mean().item()
    return {"arms": rows, "ratios": ratios, "mean_accepted": round(accepted, 2)}


def main() -> None:
    """Run all sizes and write one JSON."""
    parser = bench_parser(__doc__, repeats=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocabs", type=int, nargs="+", help="default 151936; on a CPU also 4096 and 300")
    parser.add_argument(
        "--batches", type=int, nargs="+", help="default 1 8 64 256; on a CPU 1 8 64; quick 1 8 32"
    )
    parser.add_argument("--gammas", type=int, nargs="+", help="default 1 3 5; on a CPU 1 3")
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--budget", type=float, default=0.05, help="seconds of calls per arm and repeat")
    parser.add_argument("--quick", action="store_true", help="3 repeats of single calls, at most 32 rows")
    parser.add_argument("--sglang-wheel", type=Path)
    args, load = parser.parse_args(), load_average()
    if args.quick:
        args.repeats, args.budget = 3, 0.0
    cpu = args.device == "cpu"
    if args.batches is None:
        args.batches = [1, 8, 32] if args.quick else [1, 8, 64] if cpu else [1, 8, 64, 256]
    args.gammas = args.gammas or ([1, 3] if cpu else [1, 3, 5])
    args.vocabs = args.vocabs or ([151_936, 4096, 300] if cpu else [151_936])
    torch.set_num_threads(args.threads)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        kernels_run = args.device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
        wheel = args.sglang_wheel if kernels_run else None
        sglang = load_sglang(wheel, Path(folder)) if wheel else None
        skipped = skipped_arms(args.device, sglang)
        for rule, vocab, batch, gamma in product(args.rules, args.vocabs, args.batches, args.gammas):
            size = f"{rule}, vocab {vocab}, batch {batch}, gamma {gamma}"
            row = results[size] = bench(rule, batch, gamma, vocab, args, sglang, skipped)
            print(f"\n{size}: accepted {row['mean_accepted']}")
            for name, arm in row["arms"].items():
                print(f"  {name:14s} {arm}", flush=True)
            print(f"  {row['ratios']}", flush=True)
    loop = {size: row["ratios"].get("python loop / torch") for size, row in results.items()}
    goal = {size: ratio >= GOAL for size, ratio in loop.items() if ratio is not None}
    report = {
        "question": "time of one verification call: Triton kernels, SGLang's kernel, torch, a Python loop",
        **provenance(args, load, device=args.device),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "kernels": _kernel_versions(wheel),
        "skipped": skipped,
        "goal": {f"torch at least {GOAL} times as fast as the python loop": goal},
        "results": results,
    }
    write_result(args.json, report)


def _kernel_versions(wheel: Path | None) -> dict[str, str]:
    versions = {"triton": sys.modules["triton"].__version__} if "triton" in sys.modules else {}
    return versions | ({"sglang": wheel.name.split("-")[1]} if wheel else {})


if __name__ == "__main__":
    main()
