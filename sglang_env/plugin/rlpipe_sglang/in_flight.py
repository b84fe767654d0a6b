"""At a weight update, takes the tokens of the step in flight before the weights change.

    SGLang alone:  launch n | launch n + 1, take n | pause | load v + 1 | continue, take n + 1 as v + 1's
    here:          launch n | launch n + 1, take n | pause | take n + 1 as v's | load v + 1 | continue

A scheduler with overlap takes the result of a step after it has launched the next one, but a pause with mode
`in_place` takes effect at once. Then the queue has a result of the old weights, whose tokens SGLang would
count as tokens of the new version. Moreover, the step may still run while its weights are overwritten. Here,
when an update begins, the queue is emptied first, and the host waits for the GPU.

SGLang's loop takes one result for each step that it launched, so a processed result is replaced by an entry
that is skipped (`take`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Processed:
    """Stands for batch and result of a step whose result was taken early; it has no requests."""

    reqs: tuple[()] = ()
    grammar_advanced = True


PROCESSED = Processed()


def begun(original: Callable, manager: Any, request: Any) -> Any:
    """Around `begin_weight_update` and `update_weights_from_disk`: take all results before the update."""
    take_results(manager.scheduler)
    return original(manager, request)


def take_results(scheduler: Any) -> None:
    """Process all results in the scheduler's queue, and wait until no step runs."""
    queue = scheduler.result_queue
    for index, (batch, result) in enumerate(queue):
        if batch is not PROCESSED:
            scheduler.process_batch_result(batch, result)
            queue[index] = PROCESSED, PROCESSED

    # Wait: a result is complete before the draft of the next step, which may still run.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def take(original: Callable, scheduler: Any, batch: Any, result: Any) -> Any:
    """Around `Scheduler.process_batch_result`: skip results that `take_results` has processed."""
    return None if batch is PROCESSED else original(scheduler, batch, result)
