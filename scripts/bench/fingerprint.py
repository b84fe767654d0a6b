"""How fast are the fingerprints of weights, by the algorithm of a GPU server and by that of a CPU server?

The tensors are those of a decoder: layers of a grown model with fused projections, in bfloat16, as many as
fill --megabytes. They are on the device before the clock starts. The arms are:

`mix`      rlpipe.weights.fingerprint, as for a GPU server: Triton on a GPU, torch on the CPU
`sha256`   rlpipe.weights.fingerprint, as for a CPU server
`hashlib`  one thread of hashlib over the same bytes, on the host

    python scripts/bench/fingerprint.py --json OUT [--device cpu] [--megabytes 3400] [--repeats 5]
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from statistics import median

import torch
from harness import Arm, Samples, bench_parser, load_average, provenance, table, take_turns, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlpipe.weights.fingerprint import Parts, fingerprints  # noqa: E402

HIDDEN = 1536
LAYER = ((1536, 256, 256), (HIDDEN,), (8960, 8960), (HIDDEN,))  # rows that are fused: qkv, o, gate up, down


def layers(megabytes: float, device: str) -> dict[str, Parts]:
    """Return at most `megabytes` of random tensors, each as the parts from which it is fused."""
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
    """Hash all bytes by hashlib."""
    digest = hashlib.sha256()
    for parts in tensors.values():
        for part in parts:
            digest.update(part.view(-1).view(torch.uint8).numpy().data)


def summary(samples: Samples, num_bytes: int) -> dict[str, dict[str, float]]:
    """Return median seconds and gigabytes a second of each arm."""
    return {
        name: {"s": median(seconds), "gb_per_s": num_bytes / 1e9 / median(seconds)}
        for name, seconds in samples.seconds.items()
    }


def main() -> None:
    """Time every arm and write one JSON."""
    parser = bench_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--megabytes", type=float, default=3400)
    parser.add_argument("--threads", type=int, default=2)
    args, load = parser.parse_args(), load_average()
    torch.set_num_threads(args.threads)
    tensors = layers(args.megabytes, args.device)
    host = {name: [part.cpu() for part in parts] for name, parts in tensors.items()}
    num_bytes = sum(part.nbytes for parts in host.values() for part in parts)
    arms: dict[str, Arm] = {  # each arm ends when the digits are on the host
        "mix": lambda: fingerprints(tensors, on_gpu=True),
        "sha256": lambda: fingerprints(host, on_gpu=False),
        "hashlib": lambda: on_host(host),
    }
    # The first round compiles.
    results = summary(take_turns(arms, args.repeats), num_bytes)
    report = {**provenance(args, load, device=args.device), "bytes": num_bytes, "results": results}
    print(
        table({name: {key: round(value, 3) for key, value in row.items()} for name, row in results.items()})
    )
    write_result(args.json, report)


if __name__ == "__main__":
    main()
