"""How long does it take to bring new weights to SGLang servers, and how many bytes does the transport carry?

The servers are real and serve the shipped model. The ways take turns, so that other load on the machine
affects all of them equally:

    shared, collective, disk  each rollout worker sends to its own server, all at once
    trainer                   the trainer's sender broadcasts to all in one group (weight_transfer=collective)

Seconds are the time of one update until the last server serves the new weights, including pause, canary and
checksums.

    python scripts/bench/weight_sync.py --json OUT [--servers 2] [--repeats 5]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from harness import bench_parser, load_average, provenance, write_result  # noqa: E402

from rlpipe.config.algo import AlgoConfig  # noqa: E402
from rlpipe.config.draft import DraftConfig  # noqa: E402
from rlpipe.config.paths import resolve  # noqa: E402
from rlpipe.config.rollout import RolloutConfig  # noqa: E402
from rlpipe.config.sglang import WeightTransfer  # noqa: E402
from rlpipe.config.spec import SpecConfig  # noqa: E402
from rlpipe.config.trainer import TrainerConfig  # noqa: E402
from rlpipe.rollout.sglang import SglangEngine  # noqa: E402
from rlpipe.trainer.megatron import MegatronTrainer  # noqa: E402
from rlpipe.weights.offer import Offer  # noqa: E402
from rlpipe.weights.sender import WeightSender  # noqa: E402

ALONE = ("shared", "collective", "disk")


class Servers:
    """Servers with one configuration, and the threads that wait for their updates."""

    def __init__(self, count: int, model: Path, logs: Path, config: RolloutConfig, stack: ExitStack) -> None:
        self.config = config
        self.threads = stack.enter_context(ThreadPoolExecutor(count + 1))
        started = self.threads.map(
            lambda n: SglangEngine(config, SpecConfig(), model, log_dir=logs / str(n)), range(count)
        )
        self.engines = list(started)
        for engine in self.engines:
            stack.callback(engine.close)

    def alone(self, way: str, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Send the weights to each server separately."""
        self.config.sglang.weight_transfer = WeightTransfer(way)
        list(self.threads.map(lambda engine: engine.update_weights(weights, version), self.engines))

    def together(self, sender: WeightSender, opened: Any, version: int) -> None:
        """Send the weights to all servers in one broadcast."""
        group, buckets = opened
        sending = self.threads.submit(sender.send, version)

        async def sent() -> Any:
            return await asyncio.wrap_future(sending)

        offer = Offer(
            version=version,
            group=group,
            members=[engine.membership().server for engine in self.engines],
            ranks=1,
            buckets=buckets,
            result=sent,
            weights=sent,  # never requested: a broken broadcast ends the bench
        )
        list(self.threads.map(lambda engine: engine.receive_weights(offer), self.engines))
        assert not sending.result().failure


def measure(servers: Servers, sender: WeightSender, weights: Mapping, repeats: int) -> dict[str, list[float]]:
    """Measure the seconds of an update by way. Only the second of two counts: the first makes the group."""
    seconds: dict[str, list[float]] = {way: [] for way in (*ALONE, "trainer")}
    version = 0
    for _ in range(repeats):
        for way, found in seconds.items():
            opened = None
            if way == "trainer":
                servers.config.sglang.weight_transfer = WeightTransfer.COLLECTIVE
                sender.copy(version)
                opened = sender.open("127.0.0.1", len(servers.engines))
            for _ in range(2):
                version += 1
                started = time.perf_counter()
                if way == "trainer":
                    sender.copy(version)
                    servers.together(sender, opened, version)
                else:
                    servers.alone(way, weights, version)
            found.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Run all ways and write one JSON."""
    parser = bench_parser(__doc__)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=4)
    args = parser.parse_args()
    load, model = load_average(), resolve("shipped:models/tiny")
    config = RolloutConfig(engine="sglang", device="cpu", threads=args.threads, max_running=8)
    config.sglang.bucket_mb = args.bucket_mb
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer = MegatronTrainer(
            TrainerConfig(), AlgoConfig(), DraftConfig(), model_path=model, total_steps=1
        )
        stack.callback(trainer.close)
        weights = trainer.export_weights()
        servers = Servers(args.servers, model, logs, config, stack)
        sender = WeightSender(config, trainer, on_gpu=False)
        stack.callback(sender.close)
        seconds = measure(servers, sender, weights, args.repeats)
    size = sum(tensor.nbytes for tensor in weights.values())
    sent = {"shared": size * args.servers, "collective": size * args.servers}
    sent |= {"disk": size * args.servers, "trainer": size}
    results = {
        way: {
            "median_s": statistics.median(found),
            "all_s": sorted(found),
            "bytes_handed_over": round(sent[way]),
        }
        for way, found in seconds.items()
    }
    for way, result in results.items():
        spread = f"{result['all_s'][0]:.2f} to {result['all_s'][-1]:.2f}"
        print(f"{way:10} {result['median_s']:.2f} s ({spread}), {result['bytes_handed_over'] / 1e6:.1f} MB")
    write_result(args.json, provenance(args, load) | {"weights_bytes": size, "results": results})


if __name__ == "__main__":
    main()
