"""What do the short turns of agents cost on an SGLang server, here and at an earlier commit?

    python scripts/bench/sglang_turns.py --json OUT [--before 86ed5e3] [--python P] [--python-before P]

Each revision has its own process, engine and CPU server, with the shipped model and rejection; the two take
turns. **turns**: 64 trajectories at once, in groups of eight, run conversations about held-out SWE instances.
A conversation has five turns of about ten tokens; then the next group follows. The conversations are a
demonstrator's, so that both revisions see the same past. Reported are the tokens of turns that end after the
first quarter of a run of the load and before its end, and the CPU time by process. **answers**: only the
worker's CPU time is measured, for answers of 200 and 2,000 tokens, with and without the 20 likeliest tokens.
Here a process that sends SGLang's answers replaces the server. The answers have the format of rlpipe's
plugin (packed numbers) and, at the earlier commit, also the format of stock SGLang (lists).

The goals are 1.3 times the tokens/s of the earlier commit, and a third of the worker's time without the
plugin.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from harness import bench_parser, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
GROUP, CONTEXT, TURN_TOKENS, EVERY = 8, 512, 48, 256
CELLS = [(200, 0), (2000, 0), (200, 20), (2000, 20)]
ANSWERED = 40_000  # tokens per cell and repeat; a fifth of them with likeliest tokens


# ---- a process that answers as SGLang does ----


class Answers(BaseHTTPRequestHandler):
    """A request handler that streams answers with the requested number of tokens."""

    protocol_version = "HTTP/1.1"
    packed = True
    made: ClassVar[dict[tuple[int, int, bool], bytes]] = {}

    def do_GET(self) -> None:
        self._send(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            return self._send(b"{}")
        rids, asked = body["rid"], body["sampling_params"]
        rids, asked = (rids, asked) if isinstance(rids, list) else ([rids], [asked])
        tokens, top = asked[0]["max_new_tokens"], body.get("top_logprobs_num", 0)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for done in [*range(EVERY, tokens, EVERY), tokens]:
            for index, rid in enumerate(rids):
                self._part(rid, index, self._made(done, top, done == tokens))
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _part(self, rid: str, index: int, text: bytes) -> None:
        part = b"data: " + text.replace(b"RID", rid.encode()).replace(b'"INDEX"', b"%d" % index) + b"\n\n"
        self.wfile.write(b"%x\r\n" % len(part) + part + b"\r\n")

    @classmethod
    def _made(cls, tokens: int, top: int, last: bool) -> bytes:
        if (tokens, top, last) not in cls.made:
            logprobs = [-1.0 / (n + 3) for n in range(tokens)]
            likely = [[(-1.0 / (n + k + 3), k, None) for k in range(top)] for n in range(tokens)]
            meta = {
                "id": "RID",
                "finish_reason": {"type": "length", "length": tokens} if last else None,
                "prompt_tokens": 100,
                "weight_version": "0",
                "completion_tokens": tokens,
                "cached_tokens": 90,
                "spec_verify_ct": tokens // 4,
                "spec_num_proposed_drafts": tokens // 4 * 3,
                "spec_correct_drafts_histogram": [0, 0, 0, tokens // 4],
                "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
            }
            if cls.packed:
                columns = {"logprobs": array("f", logprobs), "entropies": array("f", logprobs)}
                if top:
                    columns["top_logprobs"] = array("f", [v for row in likely for v, *_ in row])
                    columns["top_ids"] = array("i", [k for row in likely for _, k, _ in row])
                meta["rlpipe"] = {name: base64.b64encode(row).decode() for name, row in columns.items()}
            else:
                meta["output_token_logprobs"] = [(value, 7, None) for value in logprobs]
                meta |= {"output_top_logprobs": likely} if top else {}
            answer = {"output_ids": [7] * tokens, "meta_info": meta, "index": "INDEX"}
            cls.made[tokens, top, last] = json.dumps(answer, separators=(",", ":")).encode()
        return cls.made[tokens, top, last]

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def serve(port: int, packed: bool) -> None:
    """Answer until the process is ended."""
    Answers.packed = packed
    ThreadingHTTPServer.request_queue_size = 1024
    ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()


# ---- a worker of one revision; imports what PYTHONPATH names ----


def started(kind: str, folder: str, live: int) -> Any:
    """Start an engine in front of a server, or in front of its replacement."""
    from rlpipe.config.rollout import RolloutConfig
    from rlpipe.config.spec import SpecConfig
    from rlpipe.rollout.sglang import arguments, engine
    from rlpipe.weights import sync
    from rlpipe.weights.canary import CanaryReport

    tree = Path(arguments.__file__).parents[3]
    if kind != "turns":

        async def check(self: Any, client: Any, expecting: Any, **_: Any) -> CanaryReport:
            await expecting
            return CanaryReport()

        def command(*_: Any, port: int, **__: Any) -> list[str]:
            return [__file__, "--serve", str(port), "--answers", kind]

        engine.check_launch = lambda *_: SimpleNamespace(python=sys.executable, on_gpu=False)
        arguments.command, arguments.check_server_info = command, lambda *_: None
        sync.WeightSync.check = check
    context = CONTEXT if kind == "turns" else 4096
    config = RolloutConfig(engine="sglang", device="cpu", max_running=live, max_context=context, threads=1)
    return engine.SglangEngine(config, SpecConfig(gamma=3), tree / "models" / "tiny", log_dir=folder)


def spent(engine: Any) -> Counter[str]:
    """Return the CPU seconds so far of this process and of the server's processes, by name."""
    import psutil

    used: Counter[str] = Counter()
    me = psutil.Process()
    for name, process in [
        ("worker", me),
        *((p.name(), p) for p in psutil.Process(engine.server.pid).children(recursive=True)),
    ]:
        times = process.cpu_times()
        used[name.removeprefix("sglang::")] += times.user + times.system
    return used


async def turns(engine: Any, work: dict[str, Any], seconds: float, live: int, name: str) -> list[Any]:
    """Run the turns; return (time, tokens) of each."""
    from rlpipe.types import GenerateRequest, SamplingParams

    ends: list[tuple[float, int]] = []
    stop, groups = time.perf_counter() + seconds, count()

    async def trajectory(session: str, prompts: list[list[int]]) -> None:
        for turn, prompt in enumerate(prompts):
            sampling = SamplingParams(max_new_tokens=TURN_TOKENS, stop_token_ids=tuple(work["stops"]))
            request = GenerateRequest(request_id=f"{session}.{turn}", prompt_ids=prompt, sampling=sampling)
            result = await engine.generate(request)
            ends.append((time.perf_counter(), len(result.output_ids)))
            if time.perf_counter() > stop:
                return

    async def group_after_group() -> None:
        while time.perf_counter() < stop:
            number = next(groups)
            prompts = work["conversations"][number % len(work["conversations"])]
            await asyncio.gather(*(trajectory(f"{name}.{number}.{i}", prompts) for i in range(GROUP)))

    await asyncio.gather(*(group_after_group() for _ in range(max(1, live // GROUP))))
    return ends


async def answers(engine: Any, tokens: int, top: int, live: int, name: str) -> int:
    """Request answers, `live` at once; return their tokens."""
    from rlpipe.types import GenerateRequest, SamplingParams

    number, room = count(), max(live, ANSWERED // tokens // (5 if top else 1))

    async def one_after_another() -> None:
        while (n := next(number)) < room:
            sampling = SamplingParams(max_new_tokens=tokens, top_logprobs=top)
            request = GenerateRequest(request_id=f"{name}.{n}", prompt_ids=[5] * 100, sampling=sampling)
            assert len((await engine.generate(request)).output_ids) == tokens

    await asyncio.gather(*(one_after_another() for _ in range(live)))
    return room * tokens


def play(kind: str, live: int) -> None:
    """Do what each line of standard input requests, and print the measurements."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        engine = started(kind, folder, live)
        try:
            print("ready", file=out, flush=True)
            for number, line in enumerate(sys.stdin):
                asked = json.loads(line)
                before, began = spent(engine), time.perf_counter()
                if kind == "turns":
                    seconds = asked["seconds"]
                    work = json.loads(Path(asked["work"]).read_text())
                    before, began = spent(engine), time.perf_counter()
                    ends = asyncio.run(turns(engine, work, seconds, live, str(number)))
                    tokens = sum(length for _, length in ends)
                    first, last = began + seconds / 4, began + seconds
                    middle = sum(length for at, length in ends if first <= at < last)
                    told = {"tokens_per_s": middle / (last - first), "tokens_a_turn": tokens / len(ends)}
                else:
                    tokens = asyncio.run(answers(engine, asked["tokens"], asked["top"], live, str(number)))
                    told = {}
                told["cpu_ms"] = {k: v * 1e6 / tokens for k, v in (spent(engine) - before).items()}
                print(json.dumps(told), file=out, flush=True)
        finally:
            engine.close()


# ---- both revisions in turn ----


class Worker:
    """A process that runs one revision."""

    def __init__(self, tree: Path, kind: str, live: int, python: str, errors: Path) -> None:
        env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        env |= {"RLPIPE_SGLANG_VENV": str(Path(python).parents[1])} if python else {}
        self._errors = errors
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--play", kind, "--live", str(live)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.open("w"),
            text=True,
            env=env,
            cwd=errors.parent,
        )

    def ready(self) -> None:
        """Wait until the process's server is ready."""
        self._line()

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Send a request to the process and return its measurements."""
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def close(self) -> None:
        """End the worker and its server."""
        self._process.stdin.close()
        self._process.wait()

    def _line(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a worker ended:\n{self._errors.read_text()[-3000:]}")
        return line


def work(model: Path) -> dict[str, Any]:
    """Return conversations, and the tokens that end a turn."""
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]
    from rollout_speed import swe_workloads

    load = swe_workloads(model)["turns"]
    return {"conversations": load.conversations, "stops": load.stops}


def in_turns(workers: dict[str, Worker], repeats: int, **asked: Any) -> dict[str, list[dict[str, Any]]]:
    """Return each worker's measurements; the order of the workers changes with each repeat."""
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in workers}
    for repeat in range(repeats):
        for arm in list(workers)[:: 1 if repeat % 2 else -1]:
            rows[arm].append(workers[arm].ask(**asked))
    return rows


def median_ratio(rows: list[float], others: list[float]) -> float:
    """Return the median over repeats of the ratio within a repeat."""
    return round(statistics.median(a / b for a, b in zip(rows, others, strict=True)), 3)


def compared(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure both parts, **turns** and **answers**."""
    tree = folder / "before"
    tree.mkdir()
    archive = subprocess.Popen(["git", "archive", given.before], cwd=ROOT, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(tree)], stdin=archive.stdout, check=True)
    if archive.wait():
        sys.exit(f"--before {given.before}: git knows no such commit")
    file = folder / "work.json"
    file.write_text(json.dumps(work(ROOT / "models" / "tiny")))
    results: dict[str, Any] = {}

    def opened(kinds: dict[str, tuple[Path, str, str]], live: int) -> dict[str, Worker]:
        workers = {a: Worker(t, k, live, p, folder / f"{a}.log") for a, (t, k, p) in kinds.items()}
        for worker in workers.values():
            worker.ready()
        return workers

    if "turns" in given.parts:
        arms = {
            "before": (tree, "turns", given.python_before or given.python),
            "now": (ROOT, "turns", given.python),
        }
        workers = opened(arms, given.live)
        try:
            in_turns(workers, 1, seconds=2, work=str(file))
            rows = in_turns(workers, given.repeats, seconds=given.seconds, work=str(file))
        finally:
            for worker in workers.values():
                worker.close()
        speeds = {arm: [row["tokens_per_s"] for row in mine] for arm, mine in rows.items()}
        results["turns"] = {
            "tokens_per_s": {arm: [round(speed, 1) for speed in mine] for arm, mine in speeds.items()},
            "now / before": median_ratio(speeds["now"], speeds["before"]),
            "tokens_a_turn": round(rows["now"][0]["tokens_a_turn"], 2),
            "cpu_ms_per_1000_tokens": {
                arm: {
                    name: round(statistics.median(row["cpu_ms"].get(name, 0.0) for row in mine), 1)
                    for name in mine[0]["cpu_ms"]
                }
                for arm, mine in rows.items()
            },
        }
        print("turns:", results["turns"], flush=True)
    if "answers" in given.parts:
        arms = {"lists": (tree, "lists", ""), "before": (tree, "packed", ""), "now": (ROOT, "packed", "")}
        workers = opened(arms, 16)
        results["answers"] = {}
        try:
            for tokens, top in CELLS:
                rows = in_turns(workers, given.repeats, tokens=tokens, top=top)
                took = {arm: [row["cpu_ms"]["worker"] for row in mine] for arm, mine in rows.items()}
                cell = results["answers"][f"{tokens} tokens, top {top}"] = {
                    "cpu_ms_per_1000_tokens": {a: round(statistics.median(t), 2) for a, t in took.items()},
                    "now / lists": median_ratio(took["now"], took["lists"]),
                    "now / before": median_ratio(took["now"], took["before"]),
                }
                print(f"{tokens} tokens, top {top}: {cell}", flush=True)
        finally:
            for worker in workers.values():
                worker.close()
    return results


def main() -> int:
    """Measure, write one JSON, and return the exit status."""
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--before", default="86ed5e3", help="the earlier commit")
    parser.add_argument("--python", default="", help="SGLang's interpreter; empty: as a run finds it")
    parser.add_argument("--python-before", default="", help="the earlier commit's, if it is another")
    parser.add_argument("--live", type=int, default=64, help="trajectories at once")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a play")
    parser.add_argument("--parts", nargs="+", choices=["turns", "answers"], default=["turns", "answers"])
    for internal in ("--play", "--answers"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given, _ = parser.parse_known_args()
    if given.serve:
        serve(given.serve, given.answers == "packed")
        return 0
    if given.play:
        play(given.play, given.live)
        return 0
    load = load_average()
    with tempfile.TemporaryDirectory() as folder:
        results = compared(given, Path(folder))
    settings = vars(given).copy()
    for internal in ("play", "answers", "serve", "python", "python_before"):
        settings.pop(internal)  # internal options, and paths of this machine
    result = provenance(settings, load, packages=()) | {"settings": settings, "results": results}
    result["settings"].pop("json")
    write_result(given.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
