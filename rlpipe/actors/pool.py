"""The pool of a running job, changed from outside by files in the run directory, and by what the run wants.

    command   DIR/pool/ID.json         {"do": "add", "count": 2} or {"do": "drain", "worker": 1, "grace": 60}
    driver    DIR/pool/ID.answer.json  {"state": "accepted", "done" or "refused", "said": a sentence}
              DIR/pool/workers.json    every worker, written again when something changes

A file system is all that both must share. What was asked of a run that has ended is forgotten by the next.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from rlpipe.actors.ray_cluster import RayCluster
from rlpipe.loop.worker_scaling import Growth

POLL_S = 0.5
_GRACE_S = 60.0  # for what a worker plays that the run takes out itself, as `pool drain` gives
ANSWER = ".answer.json"


def folder(run_dir: Path) -> Path:
    """Where requests and answers are."""
    return run_dir / "pool"


def write(file: Path, what: Any) -> None:
    """A file that is there complete or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(what))
    part.replace(file)


async def serve(cluster: RayCluster, run_dir: Path, growth: Growth, event: Callable[..., None]) -> None:
    """Do what is asked and what `growth` wants, until cancelled. event: `MetricsBus.event`."""
    place = folder(run_dir)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shown: list[dict[str, Any]] | None = None
    begun: set[Path] = set()
    moving: set[asyncio.Task[None]] = set()  # workers in or out
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                for file in sorted(set(place.glob("*.json")) - begun):
                    if file.name != "workers.json" and not file.name.endswith(ANSWER):
                        begun.add(file)
                        moving.add(tasks.create_task(_answer(cluster, file, growth)))
                if (workers := cluster.workers()) != shown:
                    with suppress(OSError):  # a full disk: again, the next time
                        write(place / "workers.json", workers)
                        shown = workers
                moving = {task for task in moving if not task.done()}
                if not moving:
                    staying = [worker["worker"] for worker in cluster.workers() if not worker["leaving"]]
                    growth.set_current(len(staying))
                    if growth.wanted != len(staying):
                        moving.add(tasks.create_task(_follow(cluster, growth, staying, event)))
                await asyncio.sleep(POLL_S)
    finally:
        shutil.rmtree(place, ignore_errors=True)  # of a run that is over nothing can be asked


async def _answer(cluster: RayCluster, file: Path, growth: Growth) -> None:
    """Do one request; its faults are answers, and never the run's."""
    answer = file.with_suffix(ANSWER)
    try:
        asked = json.loads(file.read_text())
        write(answer, {"state": "accepted", "said": ""})
        said, change = await _do(cluster, asked)
        growth.asked(change)
        state = "done"
    except (ValueError, KeyError, TypeError, OSError, RayError) as error:
        state, said = "refused", str(error)
    with suppress(OSError):  # the command waits until its reader gives up; the run goes on
        write(answer, {"state": state, "said": said})


async def _follow(
    cluster: RayCluster, growth: Growth, staying: list[int], event: Callable[..., None]
) -> None:
    """One worker more or fewer, as the run wants; where that fails the run goes on as it is."""
    event("pool_wanted", workers=len(staying), wanted=growth.wanted, reason=growth.reason)
    try:
        if growth.wanted > len(staying):
            await cluster.add_workers(1)
        else:
            await cluster.drain_worker(max(staying), _GRACE_S)
    except (ValueError, OSError, RayError) as error:
        event("pool_unchanged", workers=len(staying), error=str(error))
        growth.refused()


async def _do(cluster: RayCluster, asked: dict[str, Any]) -> tuple[str, int]:
    """What was done, as a sentence, and how many workers more there are."""
    if asked["do"] == "add":
        numbers = await cluster.add_workers(int(asked["count"]))
        return f"rollout workers {', '.join(map(str, numbers))} serve the newest weights", len(numbers)
    number, grace = int(asked["worker"]), float(asked["grace"])
    again = await cluster.drain_worker(number, grace)
    others = f"; {again} of its groups are played again by others" if again else ""
    return f"rollout worker {number} has left{others}", -1
