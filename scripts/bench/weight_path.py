"""What does a weight update cost at real size, compared with one copy and one hash of the same bytes?

A checkpoint of real size, grown from the shipped one, is sent to a real SGLang server (on the CPU by default)
in every way, which take turns repeat by repeat. Between them the floor is measured on the same weights:

    memcpy   one thread copies them once      hashlib  one thread hashes them once (SHA-256)
    fresh    one thread copies them into newly allocated memory, page by page, as every update once did

Seconds are the time of one update until the server serves the new weights, including pause and canary. Parts
overlap, so their sum exceeds the total:

    hand over  write into shared memory, or broadcast; for ipc, until the server has taken the weights
    load       the server's load request
    our hash, server hash  both sides of the canary
    pause      until the server continues
    export     trainer side, not part of an update: weights into one bucket; not needed for ipc

Memory is what rlpipe's process and the server's processes use in addition during an update, which is not
timed.

    python scripts/bench/weight_path.py --json OUT [--size 1.5B] [--repeats 5] [--ways shared] [--device cuda]
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from rlpipe.models.checkpoint import read_config, read_weights  # noqa: E402
from rlpipe.rollout.sglang import SglangEngine  # noqa: E402
from rlpipe.weights import shared_memory, sync  # noqa: E402
from rlpipe.weights.buckets import buckets  # noqa: E402
from rlpipe.weights.checksums import BucketChecksums  # noqa: E402
from rlpipe.weights.payload import pack_weights, unpack_weights  # noqa: E402
from rlpipe.weights.process_group import Root  # noqa: E402
from rlpipe.weights.transports.ipc import IpcRoot  # noqa: E402
from tests.helpers.broadcasts import CPU, Trainer  # noqa: E402

WAYS = ("shared", "ipc", "collective")
PATIENCE_S = 60.0  # a way that took longer is not repeated
COMMON = {"kv_heads": 2, "vocab": 151936}
SIZES = {
    "tiny": {"hidden": 256, "heads": 4, "head_dim": 64, "intermediate": 1024, "layers": 8, "vocab": 2048},
    "0.5B": {"hidden": 896, "heads": 14, "head_dim": 64, "intermediate": 4864, "layers": 24},
    "0.9B": {"hidden": 1152, "heads": 18, "head_dim": 64, "intermediate": 6144, "layers": 24},
    "1.5B": {"hidden": 1536, "heads": 12, "head_dim": 128, "intermediate": 8960, "layers": 28},
}


class Profile:
    """Measures an update's seconds by part, and its peak memory, by wrapping the methods of the parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.paused_at = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def timed(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap the function so that the time of its calls is added to a part."""

        def wrapped(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return work(*args, **options)

        return wrapped

    def install(self, engine: SglangEngine) -> None:
        """Time all further updates of this engine."""
        shared_memory.SharedBuckets.write = self.timed(shared_memory.SharedBuckets.write, "hand over")
        IpcRoot.send = self.timed(IpcRoot.send, "hand over")
        BucketChecksums.add = self.timed(BucketChecksums.add, "our hash")
        Root.send = self.timed(Root.send, "hand over")
        sync.WeightSync._checksums = self.timed(sync.WeightSync._checksums, "our hash")
        client = engine._http
        post, read = client.post, client.read

        async def posted(path: str, *args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            answer = await post(path, *args, **options)
            if path.startswith("/update_weights"):
                self.seconds["load"] += time.perf_counter() - started
            elif path == "/pause_generation":
                self.paused_at = started
            elif path == "/continue_generation" and self.paused_at:
                self.seconds["pause"] += time.perf_counter() - self.paused_at
                self.paused_at = 0.0  # an update may resume the server twice
            return answer

        async def asked(path: str, *args: Any, **options: Any) -> Any:
            with self.part("server hash" if path == "/weights_checker" else "other"):
                return await read(path, *args, **options)

        client.post, client.read = posted, asked


def in_memory(engine: SglangEngine) -> int:
    """Return bytes in memory without a file: of this process with shared memory, and of the server's."""

    def of(pid: int, *kinds: str) -> int:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(kinds))
        return 0

    servers = psutil.Process(engine.server.pid).children(recursive=True)
    return of(os.getpid(), "RssAnon", "RssShmem") + sum(of(server.pid, "RssAnon") for server in servers)


def peak(engine: SglangEngine, work: Callable[[], None]) -> int:
    """Return the peak bytes that `work` uses in addition."""
    before, most, over = in_memory(engine), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            most[0] = max(most[0], in_memory(engine))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        work()
    finally:
        over.set()
        watching.join()
    return most[0] - before


def floors(weights: Mapping[str, torch.Tensor], copy: torch.Tensor) -> dict[str, float]:
    """Return the seconds of one thread for one copy of the weights into warm memory, and for one hash."""
    flat = [tensor.view(-1).view(torch.uint8) for tensor in weights.values()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = time.perf_counter()
    for one in flat:
        copy[: len(one)].copy_(one)
    copied = time.perf_counter()
    for one in flat:
        one.clone()
    cloned = time.perf_counter()
    torch.set_num_threads(threads)
    digest = hashlib.sha256()
    for one in flat:
        digest.update(one.numpy().data)
    return {
        "memcpy": copied - started,
        "fresh": cloned - copied,
        "hashlib": time.perf_counter() - cloned,
    }


def grown(size: str, folder: Path) -> Path:
    """Return the shipped model, grown to this size."""
    path = ROOT / "scripts" / "grow_checkpoint"
    loader = importlib.machinery.SourceFileLoader("grow_checkpoint", str(path))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = script  # its dataclasses look up their module
    loader.exec_module(script)
    script.grow(ROOT / "models" / "tiny", folder / size, script.Shape(**COMMON | SIZES[size]))
    return folder / size


def measure(
    engine: SglangEngine,
    config: RolloutConfig,
    weights: dict[str, torch.Tensor],
    repeats: int,
    model: Path,
    ways: Sequence[str] = WAYS,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Return, for every way, seconds and parts of its updates and its additional memory; also the floors."""
    profile = Profile()
    profile.install(engine)
    largest = max(sum(t.nbytes for _, t in piece) for piece in buckets(weights, config.sglang.bucket_mb))
    copy = torch.zeros(largest, dtype=torch.uint8)
    trainer = Trainer.of(config, read_config(model), device=device, on_gpu=device.type == "cuda")
    laid = {name: weight.to(device) for name, weight in weights.items()}  # where a trainer has them
    results = {way: {"all_s": [], "parts_s": defaultdict(list)} for way in ways}
    floor: dict[str, list[float]] = defaultdict(list)
    version = 0

    def update(way: str) -> None:
        nonlocal version
        version += 1
        held = laid if way == "ipc" else weights
        held["model.norm.weight"] = held["model.norm.weight"] + 1  # every update brings other weights
        config.sglang.weight_transfer = WeightTransfer(way)
        profile.seconds.clear()
        if way == "ipc":
            member = engine.membership()
            again = trainer.plan is not None and member.group == trainer.plan[0].name
            engine.receive_weights(trainer.offer(held, version, [member.server], again=again))
        else:
            engine.update_weights(dict(weights), version)  # the engine keeps them
        assert not engine.stats().sync["weights/canary_failures"]

    for way, result in results.items():
        result["memory_added"] = peak(engine, lambda way=way: update(way))  # joins groups and warms up, too
    for _ in range(repeats):
        for name, seconds in floors(weights, copy).items():
            floor[name].append(seconds)
        for way, result in results.items():
            if sum(result["all_s"]) > PATIENCE_S:
                continue
            started = time.perf_counter()
            update(way)
            result["all_s"].append(time.perf_counter() - started)
            for name, seconds in profile.seconds.items():
                result["parts_s"][name].append(seconds)
        with profile.part("export"):
            pack_weights(weights, version)
        floor["export"].append(profile.seconds["export"])
    medians = {name: statistics.median(seconds) for name, seconds in floor.items()}
    goal = 4 * medians["memcpy"] + 1.2 * medians["hashlib"]
    for result in results.values():
        result["median_s"] = statistics.median(result["all_s"])
        result["parts_s"] = {name: statistics.median(found) for name, found in result["parts_s"].items()}
        result["of_goal"] = result["median_s"] / goal
        result["buckets_added"] = result["memory_added"] / largest
    return {"floors_s": medians, "goal_s": goal, "largest_piece_bytes": largest, "results": results}


def main() -> None:
    """Run the requested ways and write one JSON."""
    parser = bench_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--model", type=Path, help="a checkpoint to take instead of growing one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of trainer and server")
    args = parser.parse_args()
    load = load_average()
    torch.set_num_threads(args.threads)
    config = RolloutConfig(
        engine="sglang",
        device=args.device,
        dtype="bfloat16",
        threads=args.threads,
        max_running=1,
        max_context=64,
    )
    config.sglang.bucket_mb = args.bucket_mb
    if args.device == "cuda":
        # The remaining GPU memory holds the weights that are sent, as a trainer would.
        config.sglang.memory_fraction = 0.4
        config.sglang.extra_arguments = ["--disable-prefill-cuda-graph", "--cuda-graph-bs-decode", "1"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.model or grown(args.size, folder)
        weights = unpack_weights(pack_weights(read_weights(model), 0))  # in memory, as a worker has them
        engine = SglangEngine(config, SpecConfig(), model, log_dir=folder / "logs")
        stack.callback(engine.close)
        report = measure(engine, config, weights, args.repeats, model, args.ways, torch.device(args.device))
        size = sum(tensor.nbytes for tensor in weights.values())
    report = provenance(args, load, device=args.device) | {"weights_bytes": size} | report
    if ours := report["results"].get("shared"):
        reached = {"seconds": ours["of_goal"] <= 1, "memory": round(ours["buckets_added"], 2) <= 2}
        report["goals"] = {name: "held" if well else "not held" for name, well in reached.items()}
    for way, result in report["results"].items():
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result["parts_s"].items())
        print(
            f"{way:10} {result['median_s']:.2f} s, {result['of_goal']:.2f} of the goal ({parts}), "
            f"memory {result['memory_added'] / 1e6:.0f} MB = {result['buckets_added']:.1f} pieces"
        )
    print(f"floors {report['floors_s']}, goal {report['goal_s']:.2f} s, {size / 1e9:.2f} GB")
    write_result(args.json, report)


if __name__ == "__main__":
    main()
