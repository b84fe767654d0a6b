"""Add rollout workers to a running job, or remove some.

    rlpipe pool list RUN_DIR
    rlpipe pool add RUN_DIR [--count 1]
    rlpipe pool drain RUN_DIR WORKER [--grace 60]

A worker that joins receives the newest weights before it generates. A worker that is drained starts no new
group, and after `--grace` seconds the other workers generate the remaining turns of its groups. The exit
status is 2, with a message, if the run does not answer or refuses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpipe.actors.pool import ANSWER, POLL_S, folder, write
from rlpipe.config.paths import resolve

_PATIENCE_S = 30.0  # time limit for a running driver to read a request


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = _parser().parse_args(arguments)
    run_dir = resolve(args.run_dir)
    place = folder(run_dir)

    if not (place / "workers.json").is_file():
        return _fail(f"{run_dir} has no pool: name the directory (run.dir) of a cluster=ray run under way.")

    if args.do == "list":
        for worker in json.loads((place / "workers.json").read_text()):
            state = "leaves" if worker["leaving"] else "serves"
            print(f"rollout worker {worker['worker']}: {state}, {worker['in_flight']} groups in flight")
        return 0

    # The run reads the request from its folder and writes the answer to another file.
    request: dict[str, Any] = {"do": args.do}
    request |= {"count": args.count} if args.do == "add" else {"worker": args.worker, "grace": args.grace}
    file = place / f"{uuid.uuid4().hex[:8]}.json"
    write(file, request)
    return _wait(file, run_dir)


def _wait(file: Path, run_dir: Path) -> int:
    """Wait for the answer to a request and print it; return the exit status."""
    answer, requested_at, accepted = file.with_suffix(ANSWER), time.monotonic(), False
    while True:
        outcome = json.loads(answer.read_text()) if answer.exists() else {"state": "unread"}

        if outcome["state"] == "done":
            print(outcome["message"])
            return 0
        if outcome["state"] == "refused":
            return _fail(outcome["message"])
        if outcome["state"] == "accepted" and not accepted:
            print("requested; the run continues meanwhile", flush=True)
            accepted = True

        # A run deletes the folder when it ends; a run that hangs never reads the request.
        if not file.exists():
            return _fail(f"the run in {run_dir} has ended, or was started again.")
        if not accepted and time.monotonic() - requested_at > _PATIENCE_S:
            file.unlink(missing_ok=True)
            return _fail(f"no run answers in {run_dir} for {_PATIENCE_S:.0f} s: it has ended, or hangs.")

        time.sleep(POLL_S)


def _fail(sentence: str) -> int:
    print(f"rlpipe pool: {sentence}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="rlpipe pool",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="do", required=True)
    for name, words in {"list": "show the workers", "add": "more workers", "drain": "one fewer"}.items():
        command = commands.add_parser(name, help=words)
        command.add_argument("run_dir", help="directory of the run (run.dir)")
        if name == "add":
            command.add_argument("--count", type=_positive, default=1)
        if name == "drain":
            command.add_argument("worker", type=int, help="its number, as `list` shows it")
            command.add_argument("--grace", type=float, default=60.0, help="seconds to finish running work")

    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} workers: name 1 or more.")
    return int(text)
