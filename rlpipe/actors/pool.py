"""Changes the workers of a running job, by requests in the run directory and by `worker_scaling`.

    command   DIR/pool/ID.json         {"do": "add", "count": 2} or {"do": "drain", "worker": 1, "grace": 60}
    driver    DIR/pool/ID.answer.json  {"state": "accepted", "done" or "refused", "message": a sentence}
              DIR/pool/workers.json    every worker, written again when something changes

The two processes need to share only a file system. The next run deletes unanswered requests to an ended run.
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
_GRACE_S = 60.0  # grace for a worker that the run itself removes, as in the default of `pool drain`
ANSWER = ".answer.json"


def folder(run_dir: Path) -> Path:
    """Return the folder of requests and answers."""
    return run_dir / "pool"


def write(file: Path, what: object) -> None:
    """Write a file so that it appears complete or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(what))
    part.replace(file)


async def serve(cluster: RayCluster, run_dir: Path, growth: Growth, event: Callable[..., None]) -> None:
    """Serve requests and follow `growth`, until cancelled. event: see `MetricsBus.event`."""
    place = folder(run_dir)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)

    shown: list[dict[str, Any]] | None = None
    begun: set[Path] = set()
    moving: set[asyncio.Task[None]] = set()  # tasks of workers that are joining or leaving
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                # Make a task for each new request, because draining takes as long as its grace period.
                for file in sorted(set(place.glob("*.json")) - begun):
                    if file.name != "workers.json" and not file.name.endswith(ANSWER):
                        begun.add(file)
                        moving.add(tasks.create_task(_answer(cluster, file, growth)))

                if (workers := cluster.workers()) != shown:
                    # If the disk is full, write the file again in the next round.
                    with suppress(OSError):
                        write(place / "workers.json", workers)
                        shown = workers

                # Make one decision at a time, after all workers have joined or left.
                moving = {task for task in moving if not task.done()}
                if not moving:
                    staying = [worker["worker"] for worker in cluster.workers() if not worker["leaving"]]
                    growth.set_current(len(staying))
                    if growth.wanted != len(staying):
                        moving.add(tasks.create_task(_follow(cluster, growth, staying, event)))

                await asyncio.sleep(POLL_S)
    finally:
        # Without the folder the command reports that the run has ended.
        shutil.rmtree(place, ignore_errors=True)


async def _answer(cluster: RayCluster, file: Path, growth: Growth) -> None:
    """Serve one request; an error is sent as the answer and never ends the run."""
    answer = file.with_suffix(ANSWER)
    try:
        request = json.loads(file.read_text())
        write(answer, {"state": "accepted", "message": ""})
        message, change = await _do(cluster, request)
        growth.requested(change)
        state = "done"
    except (ValueError, KeyError, TypeError, OSError, RayError) as error:
        state, message = "refused", str(error)

    # If the disk is full the command waits until its user stops it; the run continues.
    with suppress(OSError):
        write(answer, {"state": state, "message": message})


async def _follow(
    cluster: RayCluster, growth: Growth, staying: list[int], event: Callable[..., None]
) -> None:
    """Add or drain one worker, as `growth` decided; after an error the run continues unchanged."""
    event("pool_wanted", workers=len(staying), wanted=growth.wanted, reason=growth.reason)
    try:
        if growth.wanted > len(staying):
            await cluster.add_workers(1)
        else:
            await cluster.drain_worker(max(staying), _GRACE_S)
    except (ValueError, OSError, RayError) as error:
        event("pool_unchanged", workers=len(staying), error=str(error))
        growth.refused()


async def _do(cluster: RayCluster, request: dict[str, Any]) -> tuple[str, int]:
    """Execute a request; return a sentence for its user and the change in the number of workers."""
    if request["do"] == "add":
        numbers = await cluster.add_workers(int(request["count"]))
        return f"rollout workers {', '.join(map(str, numbers))} serve the newest weights", len(numbers)

    number, grace = int(request["worker"]), float(request["grace"])
    again = await cluster.drain_worker(number, grace)
    others = f"; {again} of its groups are rerun by others" if again else ""
    return f"rollout worker {number} has left{others}", -1
