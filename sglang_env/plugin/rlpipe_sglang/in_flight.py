"""The step in flight when new weights come: its tokens are taken before the weights change.

    SGLang alone:  launch n | launch n + 1, take n | pause | load v + 1 | continue, take n + 1 as v + 1's
    here:          launch n | launch n + 1, take n | pause | take n + 1 as v's | load v + 1 | continue

A scheduler that overlaps takes the result of a step after it has launched the next one, and `in_place` pauses
at once. The result in its queue was computed by the old weights, yet SGLang counts a request's tokens of the
old version before it is taken. Moreover, the step may still run while its weights are written over. Here the
queue is emptied and the GPU waited for when an update begins.

SGLang's loop takes one result for each step it launched, so a processed result leaves an entry in its place,
which it skips (`take`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Processed:
    """A step whose result was taken early, as batch and as result: of no requests, which are known to all."""

    reqs: tuple[()] = ()
    grammar_advanced = True


PROCESSED = Processed()


def begun(original: Callable, manager: Any, request: Any) -> Any:
    """AROUND `begin_weight_update` and `update_weights_from_disk`, which begins and loads in one."""
    take_results(manager.scheduler)
    return original(manager, request)


def take_results(scheduler: Any) -> None:
    """Process all results in the scheduler's queue, and wait until no step runs."""
    queue = scheduler.result_queue
    for index, (batch, result) in enumerate(queue):
        if batch is not PROCESSED:
            scheduler.process_batch_result(batch, result)
            queue[index] = PROCESSED, PROCESSED

    # The draft of the next step may still run: a result is complete before it.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def take(original: Callable, scheduler: Any, batch: Any, result: Any) -> Any:
    """AROUND `Scheduler.process_batch_result`: skip what `take_results` has processed."""
    return None if batch is PROCESSED else original(scheduler, batch, result)
