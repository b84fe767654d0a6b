"""How fast are the fingerprints of weights, by the algorithm of a server on a GPU and of one on a CPU?

Tensors are a decoder's: layers with fused projections of a grown model, in bfloat16, so many that they fill
the megabytes; they lie on the device before the clock starts.

`mix`      rlpipe.weights.fingerprint as for a GPU server: Triton on a GPU, torch on the CPU
`sha256`   the same as for a CPU server
`hashlib`  one thread of hashlib over the same bytes, on the host

    python scripts/bench/fingerprint.py --json OUT [--device cpu] [--megabytes 3400] [--repeats 5]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from revision import commit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlpipe.weights.fingerprint import Parts, fingerprints  # noqa: E402

HIDDEN = 1536
LAYER = ((1536, 256, 256), (HIDDEN,), (8960, 8960), (HIDDEN,))  # rows of what is fused: qkv, o, gate up, down


def layers(megabytes: float, device: str) -> dict[str, Parts]:
    """Random tensors, as the parts they are fused of, of at most so many megabytes."""
    found: dict[str, Parts] = {}
    left = int(1e6 * megabytes) // 2
    while True:
        for rows in LAYER:
            left -= HIDDEN * sum(rows)
            if left < 0 and found:
                return found
            parts = [torch.randn(n, HIDDEN, device=device).bfloat16() for n in rows]
            found[str(len(found))] = parts


def on_host(tensors: dict[str, Parts]) -> None:
    """All bytes through hashlib."""
    digest = hashlib.sha256()
    for parts in tensors.values():
        for part in parts:
            digest.update(part.view(-1).view(torch.uint8).numpy().data)


def main() -> None:
    """Time every arm and write one JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--megabytes", type=float, default=3400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tensors = layers(args.megabytes, args.device)
    host = {name: [part.cpu() for part in parts] for name, parts in tensors.items()}
    num_bytes = sum(part.nbytes for parts in host.values() for part in parts)
    arms: dict[str, Callable[[], object]] = {
        "mix": lambda: fingerprints(tensors, on_gpu=True),
        "sha256": lambda: fingerprints(host, on_gpu=False),
        "hashlib": lambda: on_host(host),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(args.repeats + 1):
        for name, work in arms.items():
            started = time.perf_counter()
            work()  # ends with the digits on the host
            if repeat:  # the first compiles and warms up
                seconds[name].append(time.perf_counter() - started)
    results = {
        name: {"s": statistics.median(all_s), "gb_per_s": num_bytes / 1e9 / statistics.median(all_s)}
        for name, all_s in seconds.items()
    }
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    report = {"commit": commit(), "device": device, "bytes": num_bytes, "results": results}
    for name, row in results.items():
        print(f"{name:8} {row['gb_per_s']:8.2f} GB/s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
