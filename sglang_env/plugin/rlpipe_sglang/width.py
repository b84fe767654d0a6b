"""How many tokens each step drafts: `rlpipe.spec.gamma` in place of SGLang's own adaptive policy.

SGLang asks before each decode step and tells what was kept when the step is over, so a choice knows earlier
tokens alone. What a step of each width costs is measured on the load itself: the first steps at a batch
size go through all widths, there and back, so that requests that end meanwhile favour none. gamma.py is read
from rlpipe, at the path in RLPIPE_GAMMA.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

ASKED = "RLPIPE_GAMMA"  # the environment variable; without it nothing here is hooked


class Widths:
    """The policy that SGLang's `AdaptiveController` asks. deepest: most drafts a step."""

    def __init__(
        self,
        deepest: int,
        gamma: type,
        clock: Callable[[], float] = time.perf_counter,
        *,
        rare_sizes: Callable[[list[int]], list[int]] = list,
    ) -> None:
        self.candidate_steps = list(range(deepest + 1))
        self.finished = deepest  # width of the step that is being processed
        self._gamma, self._clock = gamma, clock
        self._policy: Any = None  # made when a batch size is measured
        self._graphs: list[int] | None = None
        self._rare_sizes = rare_sizes  # picks those of a width other than the largest
        self._running: deque[tuple[int, int]] = deque()  # (batch, width) of steps that are not over
        self._order = self.candidate_steps + self.candidate_steps[::-1]  # in which widths are measured
        self._measured: dict[int, list[tuple[int, float]]] = {}  # (batch, seconds) in that order, by bucket
        self._known: set[int] = set()  # buckets with costs
        self._last: float | None = None  # when the step before was over; None behind a prefill

    def set_cuda_graph_bs(self, sizes: list[int] | None) -> None:
        """Batch sizes of SGLang's graphs; None without graphs."""
        self._graphs = sizes

    def cuda_graph_bs_for_step(self, width: int) -> list[int] | None:
        """Sizes to capture: each takes about half a second and memory, and most widths are rarely used."""
        if self._graphs is None or width == self.candidate_steps[-1]:
            return self._graphs
        return self._rare_sizes(self._graphs)

    def get_steps_for_batch(self, batch: int) -> int:
        """Drafts of the step that begins now."""
        bucket = (batch - 1).bit_length()
        if bucket in self._known:
            width = self._policy.choose(batch)
        else:
            width = self._order[len(self._measured.setdefault(bucket, []))]
        self._running.append((batch, width))
        return width

    def on_verify_complete(self, kept: Sequence[int], _: int) -> None:
        """A step is over; kept: accepted drafts of its rows."""
        width, (batch, self.finished) = self.finished, self._running.popleft()
        now, before = self._clock(), self._last
        self._last = now
        if before is not None:
            self._took(batch, self.finished, now - before, changed=width != self.finished)
        if self._policy is not None:
            at_least = [sum(k >= depth for k in kept) for depth in range(self.finished + 1)]
            self._policy.observe(at_least[:-1], at_least[1:])

    def disturbed(self) -> None:
        """A prefill came between two steps: the time between them is not that of a step."""
        self._last = None

    def _took(self, batch: int, width: int, seconds: float, changed: bool) -> None:
        bucket = (batch - 1).bit_length()
        if bucket in self._known:
            self._policy.timed(batch, width, seconds)
            return
        steps = self._measured[bucket]
        if changed or width != self._order[len(steps)]:  # the first step also pays for the change
            return
        steps.append((batch, seconds))
        if len(steps) < len(self._order):
            return
        middle = round(sum(batch for batch, _ in steps) / len(steps))
        there_and_back = zip(steps, reversed(steps), strict=True)
        costs = {
            (middle, width): (one * other) ** 0.5
            for width, ((_, one), (_, other)) in zip(self.candidate_steps, there_and_back, strict=False)
        }
        if self._policy is None:
            self._policy = self._gamma(costs)
        else:
            self._policy.measured(costs)
        self._known.add(bucket)


policy: Widths | None = None  # of this scheduler


def installed(original: Callable, worker: Any) -> None:
    """AROUND `EAGLEWorkerV2.init_cuda_graphs`: our policy before states of its widths are built."""
    global policy
    spec = importlib.util.spec_from_file_location("rlpipe_gamma", os.environ[ASKED])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    policy = Widths(worker.speculative_num_steps, module.AdaptiveGamma, rare_sizes=module.rare_sizes)

    # SGLang writes a line for each switch.
    logging.getLogger(type(worker).__module__).addFilter(lambda record: "Switch adaptive" not in record.msg)
    worker.adaptive_controller.params = policy
    original(worker)


def prefilled(original: Callable, worker: Any, *rest: Any, **more: Any) -> Any:
    """AROUND `EAGLEWorkerV2._forward_prefill_batch`."""
    if policy is not None:
        policy.disturbed()
    return original(worker, *rest, **more)


def undrafted(verify: Any, worker: Any, batch: Any) -> None:
    """AFTER `_build_trivial_verify_input`: rejection sampling asks for q, which is that of no draft."""
    from sglang.srt.runtime_context import get_spec

    if not get_spec().speculative_use_rejection_sampling:
        return
    shape = len(batch.seq_lens), 1, worker.target_worker.model_config.vocab_size
    verify.draft_probs = batch.seq_lens.new_zeros(shape, dtype=torch.float32)


def counted(_: Callable, request: Any, kept: int) -> None:
    """AROUND `Req.update_spec_correct_drafts_histogram`: entry w (w + 1) / 2 + k for k kept of w drafts."""
    histogram, deepest = request.spec_correct_drafts_histogram, policy.candidate_steps[-1]
    histogram += [0] * ((deepest + 1) * (deepest + 2) // 2 - len(histogram))
    histogram[policy.finished * (policy.finished + 1) // 2 + kept] += 1
