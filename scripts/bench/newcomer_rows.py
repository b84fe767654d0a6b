"""Are the messages for 34 mistakes good now? In a newcomer's test, 16 messages were bad and 18 fair.

Runs each mistake as the command that a user types, in its own folder, with real runs, signals and a small
disk. One of the 34, a PEFT or GGUF folder as a model, is run as two rows. A row passes if the exit status
is right, the output has everything that the row lists (what is wrong, where, and what to do) and no
traceback, and the command ends within the row's seconds.

    python scripts/bench/newcomer_rows.py --json OUT [--rows NAME ...]

To continue an interrupted pass, run the same command again.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import bench_parser, commit, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.helpers.cli import SMALL, newcomers_folder  # noqa: E402
from tests.helpers.mistakes import (  # noqa: E402
    ENVIRONMENT,
    OPENING,
    STEP,
    adapter,
    checkpoint,
    diverged,
    quantised,
    renamed,
    stored_as,
)

PYTHON = [sys.executable, "-m"]
QUIET = ["metrics.report=false", "metrics.wandb=off", "val.every=0"]
OWN = ["+recipe=reasoning_rl", "env.suite=my_env.py:make_suite", *SMALL, *QUIET, "rollout.max_new_tokens=8"]
INLINE = [*OWN, "cluster=inline", "run.dir=out"]
RAY = [*OWN, "cluster=ray", "run.dir=out"]
SWE = ["+recipe=swe_rl", *SMALL, *QUIET]
MASKED = ["env.retries=0", "run.masked_window=4"]
SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
TEMPLATE = SYSTEM + "{{ m.content }}{% endfor %}"
IDS = "[split + str(n) for n in range(9)]"
Prepare = Callable[[Path], object]


@dataclass(kw_only=True)
class Row:
    """One mistake. before: commands that first make a run. ends_at: output pattern at which to send SIGTERM.

    says, silent: patterns that the output must or must not have. shell: shell code that precedes the command.
    """

    name: str
    given: list[str]
    says: list[str]
    status: int = 2
    files: Prepare = lambda folder: None
    before: list[list[str]] = field(default_factory=list)
    between: Prepare = lambda folder: None
    variables: dict[str, str] = field(default_factory=dict)
    module: str = "rlpipe"
    flags: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    ends_at: str = ""
    shell: str = ""
    seconds: float = 120.0


def written(name: str, text: str) -> Prepare:
    """Return a preparation that writes one file."""
    return lambda folder: (folder / name).write_text(text)


def own(old: str = STEP, new: str = STEP) -> Prepare:
    """Return a preparation that writes an environment with one line changed."""
    assert old in ENVIRONMENT, old
    return written("my_env.py", ENVIRONMENT.replace(old, new, 1))


def hanging(what: str) -> Prepare:
    """Return a preparation of an environment that hangs or exits in a run, but not in the rehearsal."""
    line = f"[{what} if __import__('threading').current_thread().name != 'rehearsal' else 0, {STEP}][1]"
    return own(STEP, line)


def both(*prepared: Prepare) -> Prepare:
    """Return a preparation that makes several preparations."""
    return lambda folder: [one(folder) for one in prepared]


def instances(name: str, change: Callable[[bytes], bytes]) -> Prepare:
    """Return a preparation that writes the shipped SWE instances, changed by a function."""
    return lambda folder: (folder / name).write_bytes(change((ROOT / "data/swe/train.jsonl").read_bytes()))


def small_disk(folder: Path) -> None:
    """Mount 30 MB as `out`."""
    (folder / "out").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(folder / "out")], check=True)


def without(name: str) -> Prepare:
    """Return a preparation that removes a file or folder of the run."""

    def remove(folder: Path) -> None:
        path = folder / "out" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


# A Ray cluster of two CPUs, in which a command runs.
TWO_CPUS = """
import subprocess, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
status = subprocess.call([*sys.argv[1:], f"cluster.address={cluster.address}"])
cluster.shutdown()
sys.exit(status)
"""
SLEEP, EXIT = "__import__('time').sleep(1e6)", "__import__('os')._exit(0)"
CHECK = ["check", "+recipe=reasoning_rl", "env.suite=my_env.py:make_suite"]
STARTS = ["finished after step 2/2"]
ROWS = [
    # --- answered badly
    Row(
        name="step() never returns, inline",
        given=["run", *INLINE, "metrics.waiting_s=1"],
        files=hanging(SLEEP),
        ends_at=r"waiting +\d+s .*step\(\) at \S+my_env\.py:9",
        says=[r"stopped"],
        status=0,
    ),
    Row(
        name="step() never returns, Ray",
        given=["run", *RAY, *MASKED, "env.step_timeout_s=1"],
        files=hanging(SLEEP),
        says=[r"my_env\.py:9", r"did not return within env\.step_timeout_s", "attempts were masked"],
        status=1,
        seconds=240,
    ),
    Row(
        name="os._exit in step(), Ray",
        given=["run", *RAY, *MASKED],
        files=hanging(EXIT),
        says=[r"my_env\.py:9", "would end the run: raise an exception instead", "attempts were masked"],
        status=1,
        seconds=240,
    ),
    Row(
        name="more workers than the cluster has CPUs",
        given=["run", *RAY, "rollout.workers=9"],
        files=both(own(), written("two_cpus.py", TWO_CPUS)),
        shell=f"exec {sys.executable} two_cpus.py",
        says=["rollout.workers=9", "the Ray cluster has 2: lower rollout.workers"],
        seconds=240,
    ),
    Row(
        name="held-out ids that are trained on, one id twice",
        given=["run", *INLINE],
        files=own(IDS, "['a', 'a', 'b']"),
        says=["'a' 2 times", "return each id once"],
    ),
    Row(
        name="int8 weights without a quantization_config",
        given=["run", *SWE, "model.path=model"],
        files=stored_as("I32"),
        says=["stored as I32", "model.safetensors", "Take the checkpoint"],
    ),
    Row(
        name="a NaN in the weights",
        given=["run", *SWE, "model.path=model"],
        files=checkpoint(diverged),
        says=["model.safetensors", "are NaN"],
    ),
    Row(
        name="no writable HOME",
        given=["run", *SWE, "cluster=inline", "run.steps=1"],
        variables={"HOME": "/proc/nobody"},
        says=["finished after step 1/1"],
        status=0,
    ),
    Row(name="trainer.lr=1e-4,3e-4", given=["run", *SWE, "trainer.lr=1e-4,3e-4"], says=["add --multirun"]),
    Row(
        name="async def step",
        given=["run", *INLINE],
        files=own("def step(", "async def step("),
        says=STARTS,
        silent=["RuntimeWarning"],
        status=0,
    ),
    Row(
        name="env.suite by a path with a mistake",
        given=["run", "+recipe=reasoning_rl", "env.suite=bad.py:make"],
        files=written("bad.py", "import json\n\nx = undefined\n"),
        says=[r"bad\.py:3", "NameError", "Correct that line"],
    ),
    Row(
        name="python -O",
        given=["run", *SWE, "cluster=inline", "run.steps=1"],
        flags=["-O"],
        says=["finished after step 1/1|without -O"],
        status=0,
    ),
    Row(
        name="a W&B key that is not accepted",
        given=["run", *SWE, "cluster=inline", "run.steps=1", "metrics.wandb=auto"],
        variables={"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        says=["offline", "finished after step 1/1"],
        status=0,
        seconds=240,
    ),
    Row(
        name="checkpoints deleted, same command",
        before=[["run", *INLINE]],
        between=without("checkpoints"),
        given=["run", *INLINE],
        files=own(),
        says=["(?i)start(s|ing) over", *STARTS],
        status=0,
        seconds=240,
    ),
    Row(
        name="--config-name recipe/swe_rl",
        given=["run", "--config-name", "recipe/swe_rl"],
        says=[r"give \+recipe=swe_rl"],
    ),
    Row(
        name="config.yaml gone at a resume with another seed",
        before=[["run", *INLINE]],
        between=without("config.yaml"),
        given=["run", *INLINE, "run.steps=3", "run.seed=7"],
        files=own(),
        says=["run.seed", "7"],
        seconds=240,
    ),
    # --- answered fairly
    Row(
        name="a template that refuses the system role",
        given=["run", *INLINE, "model.chat_template=t.jinja"],
        files=both(
            own(OPENING, OPENING.replace("[{", "[{'role': 'system', 'content': 's'}, {", 1)),
            written("t.jinja", TEMPLATE),
        ),
        says=["no system role", "t.jinja"],
    ),
    Row(
        name="every prompt longer than the context",
        given=["run", *INLINE],
        files=own('"a question"', '"a question" * 9999'),
        says=["rollout.max_context=", "shorten the prompts"],
    ),
    Row(
        name="an answer longer than the context",
        given=["run", *SWE, "rollout.max_new_tokens=5000"],
        says=["rollout.max_new_tokens=5000", "raise the context"],
    ),
    Row(
        name="most answers are cut off",
        given=["run", *INLINE, "run.steps=4", "rollout.max_new_tokens=4", "metrics.report=true"],
        files=own(),
        says=["rollout.max_new_tokens", "cut off"],
        status=0,
    ),
    Row(
        name="3 instances, 8 prompts a step",
        given=["run", *INLINE, "pipeline.prompts_per_step=8", "run.steps=1"],
        files=own("range(9)", "range(3)"),
        says=["3 training instances and pipeline.prompts_per_step=8", "repeats instances"],
        status=0,
    ),
    Row(
        name="a reward of -1e30",
        given=["run", *INLINE],
        files=own("reward=1.0", "reward=-1e30"),
        says=["reward=-1e.30", "0 to 1 is usual"],
        silent=[r"\d{25}"],
        status=0,
    ),
    Row(
        name="instance_ids() in another order at each call",
        given=["run", *INLINE],
        files=own(
            "[split + str(n) for n in range(9)]", "[split + str(numpy.random.rand()) for n in range(9)]"
        ),
        says=["changes between calls", r"random\.Random\(seed\)"],
    ),
    Row(
        name="a suite that takes 7 s to build",
        given=["run", *INLINE],
        files=own("return Suite()", "__import__('time').sleep(7); return Suite()"),
        says=["making env.suite=.* so far", *STARTS],
        status=0,
        seconds=240,
    ),
    Row(
        name="a trailing assistant message",
        given=["run", *INLINE],
        files=own(OPENING, OPENING.replace("user", "assistant")),
        says=[r"my_env\.py:7", "end with another role"],
    ),
    Row(
        name="the role human",
        given=["run", *INLINE],
        files=own(OPENING, OPENING.replace("user", "human")),
        says=[r"my_env\.py:7", "'human'", "use one of"],
    ),
    Row(
        name="an info of 5 MB",
        given=["run", *INLINE],
        files=own("info={}", "info={'log': 'x' * 5_000_000}"),
        says=[r"my_env\.py:9", "5000000", "give at most"],
    ),
    Row(
        name="signal.alarm in step()",
        given=["run", *INLINE],
        files=own(STEP, "__import__('signal').signal(14, print)"),
        says=[r"my_env\.py:9", "main thread"],
    ),
    Row(
        name="a numpy.py beside the environment",
        given=INLINE,
        module="rlpipe.run",
        files=both(own(), written("numpy.py", "raise RuntimeError('mine')\n")),
        says=STARTS,
        status=0,
    ),
    Row(
        name="a PEFT folder",
        given=["run", *SWE, "model.path=model"],
        files=adapter,
        says=["PEFT adapter", "merge_and_unload"],
    ),
    Row(
        name="a GGUF folder",
        given=["run", *SWE, "model.path=model"],
        files=quantised,
        says=["llama.cpp's format", "rlpipe fetch"],
    ),
    Row(
        name="model.path is a run directory",
        given=["run", *SWE, "model.path=model"],
        files=renamed("checkpoints/step_2/hf", "checkpoints/step_10/hf"),
        says=["is of a run", r"step_10/hf\?"],
    ),
    Row(
        name="JSONL with a byte order mark, and .gz",
        given=[
            *["run", *SWE, "cluster=inline", "run.steps=1"],
            *["env.train_file=bom.jsonl", "env.held_out_files=[held.jsonl.gz]"],
        ],
        files=both(
            instances("bom.jsonl", lambda text: b"\xef\xbb\xbf" + text),
            lambda folder: (folder / "held.jsonl.gz").write_bytes(
                gzip.compress((ROOT / "data/swe/held_instances.jsonl").read_bytes())
            ),
        ),
        says=["finished after step 1/1"],
        status=0,
    ),
    Row(
        name="a full disk",
        given=["run", *SWE, "cluster=inline", "run.dir=out"],
        files=small_disk,
        says=["No space left on device|MB free|disk"],
        silent=["the one before"],
        status=1,
        seconds=240,
    ),
    Row(
        name="ulimit -n 40",
        given=["run", *SWE, "cluster=inline"],
        shell="ulimit -n 40 && exec",
        says=["a process may open 40 files", "ulimit -n 4096"],
    ),
]


def play(row: Row) -> dict[str, Any]:
    """Run one row; return exit status, seconds, and the patterns of the row that its output lacks."""
    with newcomers_folder("rlpipe-newcomer-") as (folder, env):
        row.files(folder)
        env |= row.variables | {"OMP_NUM_THREADS": "1"}
        for given in row.before:
            _run([*PYTHON, row.module, *given], row, folder, env)
        row.between(folder)

        command = [sys.executable, *row.flags, "-m", row.module, *row.given]
        if row.shell:
            command = ["bash", "-c", f'{row.shell} "$@"', "row", *command]
        status, seconds, said = _run(command, row, folder, env)
        if (folder / "out").is_mount():
            subprocess.run(["umount", str(folder / "out")], check=True)

    lacks = [part for part in row.says if not re.search(part, said)]
    lacks += [f"not: {part}" for part in (*row.silent, "Traceback") if re.search(part, said)]
    return {
        "row": row.name,
        "commit": commit(),
        "status": status,
        "seconds": round(seconds, 1),
        "as it should be": status == row.status and not lacks and seconds <= row.seconds,
        "lacks": lacks,
        "said": _portable(said, folder)[-600:],
    }


def _portable(said: str, folder: Path) -> str:
    """Return an output without the paths of this machine."""
    places = {f"{folder}/": "", str(folder.parent): "TMP", str(ROOT): "CHECKOUT", sys.prefix: "PYTHON"}
    for path, name in places.items():
        said = said.replace(path, name)
    return said.strip()


def _run(command: list[str], row: Row, folder: Path, env: dict[str, str]) -> tuple[int, float, str]:
    """Run a command to its end, or to the row's SIGTERM; return status, seconds and output.

    Seconds count from the start of the command, or from the signal if there is one.
    """
    out, started, signalled = folder.parent / "said", time.perf_counter(), False
    with out.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        while process.poll() is None and time.perf_counter() - started < 300:
            if row.ends_at and not signalled and re.search(row.ends_at, out.read_text()):
                process.send_signal(signal.SIGTERM)
                started, signalled = time.perf_counter(), True
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        if process.poll() is None:
            process.kill()
    return process.wait(), seconds, out.read_text()


def earlier(out: Path | None) -> dict[str, dict[str, Any]]:
    """Return the answers that a file already has, each with the commit at which its row ran."""
    known = json.loads(out.read_text())["rows"] if out and out.exists() else []
    return {answer["row"]: answer for answer in known}


def main() -> None:
    """Run all rows one after the other, print the table, and write it."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--rows", nargs="+", default=[], help="by name (default: those that OUT lacks)")
    args, load = parser.parse_args(), load_average()

    chosen = args.rows or [row.name for row in ROWS if row.name not in earlier(args.json)]
    for row in (row for row in ROWS if row.name in chosen):
        answer = play(row)
        done = earlier(args.json) | {row.name: answer}
        mark = "yes" if answer["as it should be"] else f"NO, status {answer['status']}, {answer['lacks']}"
        print(f"{answer['seconds']:6.1f} s  {row.name:<50} {mark}", flush=True)

        rows = [done[row.name] for row in ROWS if row.name in done]
        answered = sum(answer["as it should be"] for answer in rows)
        numbers = {"answered": answered, "of": len(rows), "rows": rows}
        write_result(args.json, provenance(args, load, packages=()) | numbers)


if __name__ == "__main__":
    main()
