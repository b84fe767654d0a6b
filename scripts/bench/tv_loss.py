"""What does a TV loss over a real vocabulary cost: time and memory of a loss and its gradient?

Arms, each in a process of its own, in turn; logits and hidden states are made before the clock starts:

from logits [N, V]:
`ours`         rlpipe.drafts.loss.mtp_loss: Triton kernels on a GPU, the chunked torch backend on the CPU
`eager`        softmax, minimum, sum, in float32, by autograd
`compile`      the same through torch.compile
`speculators`  its fused TV loss (GPU only)
`liger`        Liger's TVD on softmax probabilities (GPU only)
from hidden states [N, H], head included:
`fused`        rlpipe.drafts.chunked.linear_mtp_loss
`eager_head`   two products, then `eager`

A peer that is not installed is reported so. Memory is the peak beyond the inputs: of the allocator on a GPU,
of the resident set on the CPU (VmHWM, reset after a warm-up run). The byte floor of `ours` counts what its
kernels must move: 2 reads of both logits, 1 bit per token written and read, 1 read of the draft and 1
write of its gradient; it is set against the bandwidth of a copy measured in the same process. The eager
losses of all arms are compared with ours.

    python scripts/bench/tv_loss.py --json OUT [--device cpu] [--rows N] [--vocab V] [--threads T]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from harness import commit, git
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlpipe.drafts.chunked import linear_mtp_loss  # noqa: E402
from rlpipe.drafts.loss import mtp_loss  # noqa: E402

Loss = Callable[[Tensor, Tensor], Tensor]
HIDDEN_ARMS = ("fused", "eager_head")
LOGIT_ARMS = ("ours", "eager", "compile", "speculators", "liger")
GPU_ONLY = {"speculators": "speculators", "liger": "liger_kernel"}


def eager(draft: Tensor, target: Tensor) -> Tensor:
    """1 - sum_v min(p, q), as one writes it down."""
    p, q = target.float().softmax(-1), draft.float().softmax(-1)
    return (1 - torch.minimum(p, q).sum(-1)).mean()


def ours(draft: Tensor, target: Tensor) -> Tensor:
    """The library's loss, statistics included."""
    mask = torch.ones(len(draft), 1, dtype=torch.bool, device=draft.device)
    return mtp_loss("tv", draft[:, None], target[:, None], mask)[0]


def speculators(draft: Tensor, target: Tensor) -> Tensor:
    """speculators' fused kernel."""
    from speculators.losses.fused import fused_tv_loss

    return fused_tv_loss(draft[None], target[None]).mean()


def liger(draft: Tensor, target: Tensor) -> Tensor:
    """Liger's kernel on probabilities."""
    from liger_kernel.transformers.tvd import LigerTVDLoss

    return LigerTVDLoss()(draft.float().softmax(-1), target.float().softmax(-1))


def fused(weight: Tensor) -> Loss:
    """The library's head and loss in one. Row n of the target belongs to anchor n."""

    def loss(draft: Tensor, target: Tensor) -> Tensor:
        mask = torch.ones(len(draft), 1, dtype=torch.bool, device=draft.device)
        ahead = torch.cat([target[:1], target])  # depth 1 at anchor n is compared with row n + 1
        return linear_mtp_loss("tv", draft[:, None], ahead, weight, mask)[0]

    return loss


def run_arm(args: argparse.Namespace) -> dict[str, Any]:
    """Time and peak memory of one arm, in this process."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype, from_hidden = getattr(torch, args.dtype), args.arm in HIDDEN_ARMS
    kind = {"device": args.device, "dtype": dtype}
    width = args.hidden if from_hidden else args.vocab
    target = 2 * torch.randn(args.rows, width, **kind)
    draft = (target + 0.5 * torch.randn(args.rows, width, **kind)).requires_grad_()
    arms: dict[str, Loss] = {"ours": ours, "eager": eager, "speculators": speculators, "liger": liger}
    arms["compile"] = torch.compile(eager)
    if from_hidden:
        weight = torch.randn(args.vocab, args.hidden, **kind) / args.hidden**0.5
        arms["eager_head"] = lambda z, y: eager(z @ weight.T, y @ weight.T)
        arms["fused"] = fused(weight)
    loss = arms[args.arm]
    memory = _Memory(args.device)
    seconds, value = [], 0.0
    for repeat in range(args.repeats + 1):
        draft.grad = None
        if repeat == 1:
            memory.reset()
        started = _now(args.device)
        result = loss(draft, target)
        result.backward()
        elapsed = _now(args.device) - started
        if repeat:
            seconds.append(elapsed)
        value = result.item()
    row = {
        "ms": round(1e3 * statistics.median(seconds), 2),
        "min_max_ms": [round(1e3 * min(seconds), 2), round(1e3 * max(seconds), 2)],
        "peak_mb": round(memory.peak() / 1e6, 1),
        "loss": value,
    }
    if args.arm == "ours":
        moved = args.rows * args.vocab * (6 * draft.element_size() + 0.25)
        row["bytes_moved_gb"] = round(moved / 1e9, 3)
        row["copy_gb_per_s"] = round(_copy_bandwidth(draft.detach(), args.device) / 1e9, 1)
        floor = moved / (1e9 * row["copy_gb_per_s"])
        row["share_of_byte_floor"] = round(floor / statistics.median(seconds), 3)
    return row


class _Memory:
    """Peak beyond what is held when it is made."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._held = torch.cuda.memory_allocated() if self._cuda else _status("VmRSS")

    def reset(self) -> None:
        """Forget peaks until now."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Bytes."""
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
    """Bytes read and written per second by a copy of the logits, the best of ten."""
    copy, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        started = _now(device)
        copy.copy_(source)
        best = min(best, _now(device) - started)
    return 2 * source.numel() * source.element_size() / best


def _spawn(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """One arm in a fresh process, or why it cannot run."""
    module = GPU_ONLY.get(arm)
    if module and args.device != "cuda":
        return {"skipped": "its kernel needs a GPU"}
    if module and subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode:
        return {"skipped": f"{module} is not installed"}
    command = [sys.executable, __file__, "--arm", arm]
    for name in ("device", "dtype", "rows", "vocab", "hidden", "threads", "repeats"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"arm {arm} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _ratios(arms: dict[str, dict[str, Any]], own: str, base: str) -> dict[str, float]:
    mine, theirs = arms[own], arms[base]
    return {
        f"speed {own} / {base}": round(theirs["ms"] / mine["ms"], 2),
        f"peak memory {own} / {base}": round(mine["peak_mb"] / theirs["peak_mb"], 3),
    }


def main() -> None:
    """Run all arms and write one JSON, or one arm and print it."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--rows", type=int, default=8192 if cuda else 192)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=4096 if cuda else 128)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=20 if cuda else 5)
    parser.add_argument("--arm", choices=[*LOGIT_ARMS, *HIDDEN_ARMS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(run_arm(args)))
        return
    arms = {}
    for arm in (*LOGIT_ARMS, *HIDDEN_ARMS):
        arms[arm] = _spawn(arm, args)
        print(f"  {arm:12s} {arms[arm]}", flush=True)
    size = torch.empty(0, dtype=getattr(torch, args.dtype)).element_size()
    logits_mb = args.rows * args.vocab * size / 1e6
    ratios = _ratios(arms, "ours", "eager") | _ratios(arms, "fused", "eager_head")
    ratios["ours, logits tensors beyond the inputs"] = round(arms["ours"]["peak_mb"] / logits_mb, 3)
    print(f"  {ratios}")
    report = {
        "question": "time and peak memory of a TV loss and its gradient",
        "commit": commit(),
        "modified": bool(git("status", "--porcelain", "rlpipe")),
        "versions": {name: _version(name) for name in ("torch", "triton", "speculators", "liger-kernel")},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "config": {
            "device": args.device,
            "dtype": args.dtype,
            "rows": args.rows,
            "vocab": args.vocab,
            "hidden": args.hidden,
            "threads": args.threads,
            "repeats": args.repeats,
            "warm_up_runs": 1,
            "logits_mb": round(logits_mb, 1),
        },
        "results": {"arms": arms, "ratios": ratios},
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def _processor() -> str:
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
