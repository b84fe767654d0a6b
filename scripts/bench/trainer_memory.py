"""What do a trainer's attention over shared prefixes and its head cost, compared with the direct computation?

    attention   flash attention in parts, compared with one masked call for each branch
    head        logprobs and entropy from hidden states in chunks, compared with logits [tokens, vocabulary]
                computed at once

All arms run forward and backward on the same input, in their own processes. Attention is that of one layer,
over a prefix that is as long as all `siblings` together; each sibling has two branches (`--turns`), so that a
context has several pieces. The head runs on every token. Memory is the peak of the process beyond what it
held before, counted as resident anonymous pages. `saved_mb` is what autograd stores for the backward pass;
for attention it bounds how many layers fit.

    python scripts/bench/trainer_memory.py --json OUT [--tokens 2048 4096 8192 16384] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import bench_parser, load_average, provenance, write_result

from rlpipe.batching.micro_batch import Branch
from rlpipe.trainer.layers import BranchLayout
from rlpipe.trainer.logprobs import Head, token_logprobs

Case = tuple[Callable[[], torch.Tensor], list[torch.Tensor]]
ARMS = {"attention": ("parts", "masked"), "head": ("chunks", "logits")}


class Attention:
    """A stand-in for a layer, with what `attend_masked` needs."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute torch's attention, as the trainer calls it for rows."""
        sdpa = torch.nn.functional.scaled_dot_product_attention
        causal, gqa = mask is None, q.shape[1] != k.shape[1]
        return sdpa(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=gqa)


def branches(tokens: int, siblings: int, turns: int) -> list[Branch]:
    """Make a prefix of half the tokens; the rest is `siblings` answers, each cut into `turns` branches."""
    prefix, length = tokens // 2, tokens // 2 // siblings // turns
    found = [Branch(length=prefix, context=[])]
    for _ in range(siblings):
        context = [(0, prefix)]
        for _ in range(turns):
            found.append(Branch(length=length, context=list(context)))
            context.append((len(found) - 1, length))
    return found


def attention(arm: str, given: argparse.Namespace, tokens: int) -> Case:
    """Return one layer's attention as a function, and the leaves of its graph."""
    found = branches(tokens, given.siblings, given.turns)
    count = sum(branch.length for branch in found)
    heads = (given.heads, given.groups, given.groups)
    qkv = [torch.randn(1, n, count, given.dim, requires_grad=True) for n in heads]
    layout = BranchLayout(found, torch.zeros(count, dtype=torch.int64))
    attend = layout.attend if arm == "parts" else layout.attend_masked
    return lambda: attend(*qkv, attention=Attention(given.dim**-0.5)), qkv


def head(arm: str, given: argparse.Namespace, tokens: int) -> Case:
    """Return a function that computes logprobs and entropy of every token, and the leaves of its graph."""
    states = torch.randn(tokens, given.hidden, requires_grad=True)
    weight = (0.02 * torch.randn(given.vocab, given.hidden)).requires_grad_()
    targets = torch.randint(0, given.vocab, (tokens,))

    def forward() -> torch.Tensor:
        if arm == "logits":
            return torch.stack(token_logprobs(states @ weight.t(), targets))
        return torch.stack(Head(weight=weight, columns=given.vocab).logprobs(states, targets))

    return forward, [states, weight]


def measure(arm: str, given: argparse.Namespace, tokens: int) -> dict[str, float]:
    """Measure time and memory of one arm, in this process."""
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    forward, leaves = (attention if arm in ARMS["attention"] else head)(arm, given, tokens)
    seconds, peaks, saved = [], [], 0
    for _ in range(given.repeats):
        kept: dict[int, int] = {}

        def note(x: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = x.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return x

        with Peak() as peak:
            started = time.perf_counter()
            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                out = forward()
            out.backward(out.detach())
            seconds.append(time.perf_counter() - started)
        for x in leaves:
            x.grad = None
        del out
        peaks.append(peak.bytes)
        saved = sum(kept.values())
    return {
        "seconds": round(statistics.median(seconds), 4),
        "peak_mb": round(max(peaks) / 1e6, 1),
        "saved_mb": round(saved / 1e6, 1),
    }


class Peak:
    """Measures the peak of this process's anonymous memory, minus its memory when the block began."""

    def __enter__(self) -> Peak:
        self._before, self.bytes, self._done = _anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, _anonymous() - self._before)


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def main() -> int:
    """Measure all arms and write one JSON; return the exit status."""
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--head-tokens", type=int, nargs="*", default=[512, 1024, 2048])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    given, load = parser.parse_args(), load_average()
    if given.arm:
        print(json.dumps(measure(given.arm, given, given.tokens[0])))
        return 0
    rows: list[dict[str, Any]] = []
    sizes = {"attention": given.tokens, "head": given.head_tokens}
    for part, tokens in ((part, tokens) for part, counts in sizes.items() for tokens in counts):
        row: dict[str, Any] = {"part": part, "tokens": tokens}
        for arm in ARMS[part]:
            words = [*sys.argv, "--tokens", str(tokens), "--arm", arm]
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
            row[arm] = json.loads(done.stdout)
        mine, other = (row[arm] for arm in ARMS[part])
        row["ratio"] = {name: round(mine[name] / other[name], 3) for name in mine}
        rows.append(row)
        print(json.dumps(row), flush=True)
    write_result(given.json, {**provenance(given, load), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
