"""For how long does an update pause a server, and how much does the server load?

A checkpoint of real size, grown from the shipped one, runs in a real SGLang server on the CPU. Each update
changes a share of the elements of every tensor (`--share`; `delta_bytes.py` measures it in training). There
are three ways to send an update, which take turns:

    check in the pause  full weights; the server decodes again only when its fingerprints are checked
    full                full weights; the server decodes while it computes fingerprints
    delta               only the elements that differ; they are determined and written before the pause

`share` in the result is the pause divided by the seconds of the update. An update begins when the worker has
the weights and ends when the server's fingerprints are checked.

    python scripts/bench/weight_pause.py --json OUT [--size 0.9B] [--repeats 5] [--share 0.0173]
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from harness import bench_parser, load_average, provenance, write_result  # noqa: E402

from rlpipe.config.rollout import RolloutConfig  # noqa: E402
from rlpipe.config.sglang import WeightTransfer  # noqa: E402
from rlpipe.config.spec import SpecConfig  # noqa: E402
from rlpipe.models.checkpoint import read_weights  # noqa: E402
from rlpipe.rollout.sglang import SglangEngine  # noqa: E402
from rlpipe.rollout.sglang.updates import Updates  # noqa: E402
from rlpipe.weights.session import WeightSession  # noqa: E402

WAYS = ("check in the pause", "full", "delta")


class UpdateClock:
    """Measures an engine's updates: seconds for which its server is paused, and bytes of the delta."""

    def __init__(self, engine: SglangEngine) -> None:
        self.paused = self.num_bytes = 0.0
        self._since = 0.0
        client = engine._http
        post, delta = client.post, WeightSession.delta

        async def posted(path: str, *args: Any, **options: Any) -> Any:
            if path == "/pause_generation":
                self._since = time.perf_counter()
            answer = await post(path, *args, **options)
            if path == "/continue_generation" and self._since:
                self.paused += time.perf_counter() - self._since
                self._since = 0.0
            return answer

        def counted(*args: Any) -> Any:
            found = delta(*args)
            self.num_bytes = 0.0 if found is None else found.num_bytes
            return found

        client.post, WeightSession.delta = posted, counted


def changed(weights: Mapping[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Return copies of weights in which `share` of each tensor's elements have a flipped lowest bit."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for name, tensor in weights.items():
        copy = tensor.clone()
        at = torch.randint(copy.numel(), (round(share * copy.numel()),), generator=draw)
        copy.view(-1).view(torch.int16)[at] ^= 1
        found[name] = copy
    return found


@contextlib.contextmanager
def ordered(engine: SglangEngine, way: str) -> Iterator[None]:
    """Make the engine send updates in one of the ways."""
    engine._updates._deltas = way == "delta"
    continues = Updates._continue

    async def later(*_: Any) -> None:
        """Do nothing: the server resumes at the end of the update."""

    if way == "check in the pause":
        Updates._continue = later
    try:
        yield
    finally:
        Updates._continue = continues


def resident(engine: SglangEngine) -> int:
    """Return the resident bytes of this process and of the server's processes."""
    processes = [psutil.Process(), *psutil.Process(engine.server.pid).children(recursive=True)]
    return sum(process.memory_full_info().uss for process in processes)


def measure(engine: SglangEngine, weights: dict[str, torch.Tensor], repeats: int, share: float) -> dict:
    """Return seconds, pause and bytes of the updates of every way; each way's first update is not counted."""
    clock, size = UpdateClock(engine), sum(tensor.nbytes for tensor in weights.values())
    found: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in WAYS}
    version, most = 1, 0
    engine.update_weights(weights, version)
    for repeat in range(-1, repeats):
        for way in WAYS if repeat % 2 else reversed(WAYS):
            version += 1
            weights = changed(weights, share, version)
            clock.paused, clock.num_bytes = 0.0, 0.0
            with ordered(engine, way):
                started = time.perf_counter()
                engine.update_weights(weights, version)
                seconds = time.perf_counter() - started
            assert not engine.stats().sync["weights/canary_failures"], way
            most = max(most, resident(engine))
            if repeat >= 0:
                found[way]["seconds"].append(seconds)
                found[way]["pause"].append(clock.paused)
                found[way]["bytes"].append(clock.num_bytes or size)
    results = {
        way: {"all": dict(values)}
        | {f"{name}_median": statistics.median(samples) for name, samples in values.items()}
        | {"share": statistics.median(p / s for p, s in zip(values["pause"], values["seconds"], strict=True))}
        for way, values in found.items()
    }
    return {"weights_bytes": size, "resident_bytes": most, "results": results}


def main() -> None:
    """Run all ways and write one JSON."""
    # Imported here because it loads Megatron, which the test of this file does not need.
    from weight_path import SIZES, grown

    parser = bench_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="0.9B")
    parser.add_argument("--share", type=float, default=0.0173)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    load = load_average()
    torch.set_num_threads(args.threads)
    config = RolloutConfig(
        engine="sglang",
        device="cpu",
        dtype="bfloat16",
        threads=args.threads,
        max_running=1,
        max_context=64,
    )
    config.sglang.bucket_mb, config.sglang.weight_transfer = 64, WeightTransfer.SHARED
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = grown(args.size, folder)
        # In memory and in the server's type, as in a worker.
        weights = {name: tensor.to(torch.bfloat16, copy=True) for name, tensor in read_weights(model).items()}
        engine = SglangEngine(config, SpecConfig(), model, log_dir=folder / "logs")
        stack.callback(engine.close)
        report = measure(engine, weights, args.repeats, args.share)
    for way, result in report["results"].items():
        print(
            f"{way:20} {result['seconds_median']:.2f} s, paused {result['pause_median']:.2f} s "
            f"({result['share']:.0%}), {result['bytes_median'] / 1e6:.1f} MB"
        )
    held = report["results"]["delta"]["share"] <= 0.2
    report["goals"] = {"pause at most a fifth": "held" if held else "not held"}
    write_result(args.json, provenance(args, load) | report)


if __name__ == "__main__":
    main()
