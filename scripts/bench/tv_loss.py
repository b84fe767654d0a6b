"""What does a TV loss over a real vocabulary cost: time and memory of a loss and its gradient?

Arms, each in its own process, take turns; logits and hidden states are made before the clock starts:

from logits [N, V]:
`ours`         rlpipe.drafts.loss.mtp_loss: Triton kernels on a GPU, the chunked torch backend on the CPU
`eager`        softmax, minimum, sum, in float32, by autograd
`compile`      the same through torch.compile
`speculators`  its fused TV loss (GPU only)
`liger`        Liger's TVD on softmax probabilities (GPU only)
from hidden states [N, H], head included:
`fused`        rlpipe.drafts.loss.linear.linear_mtp_loss
`eager_head`   two products, then `eager`

A library that is not installed is reported as missing. Memory is the peak minus the inputs: of the allocator
on a GPU, of the resident set on the CPU (VmHWM, reset after a warm-up run). The byte floor of `ours` counts
what its kernels must move: 2 reads of both logits, 1 bit per token written and read, 1 read of the draft and
1 write of its gradient. It is converted to time by the bandwidth of a copy, measured in the same process. The
losses of all arms are compared with that of `ours`.

    python scripts/bench/tv_loss.py --json OUT [--device cpu] [--rows N] [--vocab V] [--threads T]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from harness import ArmProcess, bench_parser, load_average, provenance, take_turns, write_result
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlpipe.drafts.loss import mtp_loss  # noqa: E402
from rlpipe.drafts.loss.linear import linear_mtp_loss  # noqa: E402

Loss = Callable[[Tensor, Tensor], Tensor]
HIDDEN_ARMS = ("fused", "eager_head")
LOGIT_ARMS = ("ours", "eager", "compile", "speculators", "liger")
GPU_ONLY = {"speculators": "speculators", "liger": "liger_kernel"}


def eager(draft: Tensor, target: Tensor) -> Tensor:
    """Compute 1 - sum_v min(p, q) literally."""
    p, q = target.float().softmax(-1), draft.float().softmax(-1)
    return (1 - torch.minimum(p, q).sum(-1)).mean()


def ours(draft: Tensor, target: Tensor) -> Tensor:
    """Compute rlpipe's loss, including statistics."""
    mask = torch.ones(len(draft), 1, dtype=torch.bool, device=draft.device)
    return mtp_loss("tv", draft[:, None], target[:, None], mask=mask)[0]


def speculators(draft: Tensor, target: Tensor) -> Tensor:
    """Compute the loss by speculators' fused kernel."""
    from speculators.losses.fused import fused_tv_loss

    return fused_tv_loss(draft[None], target[None]).mean()


def liger(draft: Tensor, target: Tensor) -> Tensor:
    """Compute the loss by Liger's kernel on probabilities."""
    from liger_kernel.transformers.tvd import LigerTVDLoss

    return LigerTVDLoss()(draft.float().softmax(-1), target.float().softmax(-1))


def fused(weight: Tensor) -> Loss:
    """Return rlpipe's fused head and loss. Row n of the target belongs to anchor n."""

    def loss(draft: Tensor, target: Tensor) -> Tensor:
        mask = torch.ones(len(draft), 1, dtype=torch.bool, device=draft.device)
        ahead = torch.cat([target[:1], target])  # depth 1 at anchor n is compared with row n + 1
        return linear_mtp_loss("tv", draft[:, None], ahead, head_weight=weight, mask=mask)[0]

    return loss


class LossArm:
    """One loss and its gradient, in this process; time and peak memory of each run are measured."""

    def __init__(self, arm: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        dtype, from_hidden = getattr(torch, args.dtype), arm in HIDDEN_ARMS
        kind = {"device": args.device, "dtype": dtype}
        width = args.hidden if from_hidden else args.vocab
        self._target = 2 * torch.randn(args.rows, width, **kind)
        noise = 0.5 * torch.randn(args.rows, width, **kind)
        self._draft = (self._target + noise).requires_grad_()

        arms: dict[str, Loss] = {"ours": ours, "eager": eager, "speculators": speculators, "liger": liger}
        arms["compile"] = torch.compile(eager)
        if from_hidden:
            weight = torch.randn(args.vocab, args.hidden, **kind) / args.hidden**0.5
            arms["eager_head"] = lambda z, y: eager(z @ weight.T, y @ weight.T)
            arms["fused"] = fused(weight)
        self._loss, self._device, self._memory = arms[arm], args.device, _Memory(args.device)

    def run(self, what: str) -> Any:
        """Run once; return seconds, peak bytes and the loss, or the bandwidth of a copy of the input."""
        if what == "copy":
            return _copy_bandwidth(self._draft.detach(), self._device)
        self._draft.grad = None
        self._memory.reset()
        started = _now(self._device)
        result = self._loss(self._draft, self._target)
        result.backward()
        return _now(self._device) - started, self._memory.peak(), result.item()


def summary(arm: str, runs: list[tuple[float, int, float]], copy_rate: float, args: Any) -> dict[str, Any]:
    """Return one arm's row: times, peak memory, and for `ours` the byte floor's share of its time."""
    seconds, peaks, losses = zip(*runs, strict=True)
    row = {
        "ms": round(1e3 * statistics.median(seconds), 2),
        "min_max_ms": [round(1e3 * min(seconds), 2), round(1e3 * max(seconds), 2)],
        "peak_mb": round(max(peaks) / 1e6, 1),
        "loss": losses[-1],
    }
    if arm == "ours":
        element = torch.empty(0, dtype=getattr(torch, args.dtype)).element_size()
        moved = args.rows * args.vocab * (6 * element + 0.25)
        row["bytes_moved_gb"] = round(moved / 1e9, 3)
        row["copy_gb_per_s"] = round(copy_rate / 1e9, 1)
        row["share_of_byte_floor"] = round(moved / copy_rate / statistics.median(seconds), 3)
    return row


class _Memory:
    """Measures peak memory, minus the memory in use when the object is created."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._held = torch.cuda.memory_allocated() if self._cuda else _status("VmRSS")

    def reset(self) -> None:
        """Reset the peak."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Return the peak in bytes."""
        peak = torch.cuda.max_memory_allocated() if self._cuda else _status("VmHWM")
        return peak - self._held


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _copy_bandwidth(source: Tensor, device: str) -> float:
    """Return the bytes per second that a copy of the logits reads and writes, best of ten."""
    copy, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        started = _now(device)
        copy.copy_(source)
        best = min(best, _now(device) - started)
    return 2 * source.numel() * source.element_size() / best


def _unavailable(arm: str, device: str) -> str:
    """Return why an arm cannot run here; empty if it can."""
    module = GPU_ONLY.get(arm)
    if module and device != "cuda":
        return "its kernel needs a GPU"
    return f"{module} is not installed" if module and importlib.util.find_spec(module) is None else ""


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the rows of all arms, which run in separate processes and take turns."""
    rows: dict[str, dict[str, Any]] = {}
    running: dict[str, ArmProcess] = {}
    for arm in args.arms:
        if reason := _unavailable(arm, args.device):
            rows[arm] = {"skipped": reason}
        else:
            threads = partial(torch.set_num_threads, args.threads)
            running[arm] = ArmProcess(partial(LossArm, arm, args), prepare=threads)

    runs: dict[str, list[tuple[float, int, float]]] = {arm: [] for arm in running}
    turns = {arm: partial(lambda a: runs[a].append(running[a].run("loss")), arm) for arm in running}
    take_turns(turns, args.repeats)
    copy_rate = running["ours"].run("copy")
    for process in running.values():
        process.close()

    for arm, measured in runs.items():
        rows[arm] = summary(arm, measured[1:], copy_rate, args)  # the first warmed up
        print(f"  {arm:12s} {rows[arm]}", flush=True)
    return rows


def _ratios(arms: dict[str, dict[str, Any]], own: str, base: str) -> dict[str, float]:
    if own not in arms or base not in arms:
        return {}
    mine, theirs = arms[own], arms[base]
    return {
        f"speed {own} / {base}": round(theirs["ms"] / mine["ms"], 2),
        f"peak memory {own} / {base}": round(mine["peak_mb"] / theirs["peak_mb"], 3),
    }


def main() -> None:
    """Run all arms and write one JSON."""
    cuda = torch.cuda.is_available()
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--rows", type=int, default=8192 if cuda else 192)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=4096 if cuda else 128)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=20 if cuda else 5)
    every = (*LOGIT_ARMS, *HIDDEN_ARMS)
    parser.add_argument("--arms", nargs="+", choices=every, default=every, help="'ours' must be among them")
    args, load = parser.parse_args(), load_average()
    arms = measure(args)
    size = torch.empty(0, dtype=getattr(torch, args.dtype)).element_size()
    logits_mb = args.rows * args.vocab * size / 1e6
    ratios = _ratios(arms, "ours", "eager") | _ratios(arms, "fused", "eager_head")
    ratios["ours, logits tensors beyond the inputs"] = round(arms["ours"]["peak_mb"] / logits_mb, 3)
    print(f"  {ratios}")
    report = {
        "question": "time and peak memory of a TV loss and its gradient",
        **provenance(args, load, device=args.device),
        "packages": {name: _version(name) for name in ("triton", "speculators", "liger-kernel")},
        "logits_mb": round(logits_mb, 1),
        "results": {"arms": arms, "ratios": ratios},
    }
    write_result(args.json, report)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
