"""Chooses how many tokens each step drafts, with `rlpipe.spec.gamma` instead of SGLang's adaptive policy.

SGLang asks before each decode step, and reports the accepted drafts after it, so a choice depends only on
earlier tokens. The cost of a step of each width is measured on real load: the first steps at a batch size go
through all widths, up and down, so that requests that end meanwhile do not favour a width. rlpipe's gamma.py
is loaded from the path in RLPIPE_GAMMA.
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

ASKED = "RLPIPE_GAMMA"  # environment variable; without it no function of this module is hooked


class Widths:
    """The policy that SGLang's `AdaptiveController` asks. deepest: maximum of drafts per step."""

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
        self._policy: Any = None  # made when a batch size has been measured
        self._graphs: list[int] | None = None
        self._rare_sizes = rare_sizes  # selects batch sizes to capture for all widths except the largest
        self._running: deque[tuple[int, int]] = deque()  # (batch, width) of unfinished steps
        self._order = self.candidate_steps + self.candidate_steps[::-1]  # order in which widths are measured
        self._measured: dict[int, list[tuple[int, float]]] = {}  # (batch, seconds) in this order, by bucket
        self._known: set[int] = set()  # buckets with costs
        self._last: float | None = None  # end of the previous step; None after a prefill

    def set_cuda_graph_bs(self, sizes: list[int] | None) -> None:
        """Set the batch sizes of SGLang's graphs; None without graphs."""
        self._graphs = sizes

    def cuda_graph_bs_for_step(self, width: int) -> list[int] | None:
        """Return the sizes to capture: few for most widths, as each takes half a second and memory."""
        if self._graphs is None or width == self.candidate_steps[-1]:
            return self._graphs
        return self._rare_sizes(self._graphs)

    def get_steps_for_batch(self, batch: int) -> int:
        """Return the number of drafts of the step that begins now."""
        bucket = (batch - 1).bit_length()
        if bucket in self._known:
            width = self._policy.choose(batch)
        else:
            width = self._order[len(self._measured.setdefault(bucket, []))]
        self._running.append((batch, width))
        return width

    def on_verify_complete(self, kept: Sequence[int], _: int) -> None:
        """Record the end of a step. kept: number of accepted drafts in each row."""
        width, (batch, self.finished) = self.finished, self._running.popleft()
        now, before = self._clock(), self._last
        self._last = now
        if before is not None:
            self._took(batch, self.finished, now - before, changed=width != self.finished)
        if self._policy is not None:
            at_least = [sum(k >= depth for k in kept) for depth in range(self.finished + 1)]
            self._policy.observe(at_least[:-1], at_least[1:])

    def disturbed(self) -> None:
        """Record that a prefill ran between two steps: do not count the time between them as a step."""
        self._last = None

    def _took(self, batch: int, width: int, seconds: float, changed: bool) -> None:
        bucket = (batch - 1).bit_length()
        if bucket in self._known:
            self._policy.timed(batch, width, seconds)
            return
        steps = self._measured[bucket]
        if changed or width != self._order[len(steps)]:  # includes the cost of the change
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
    """Around `EAGLEWorkerV2.init_cuda_graphs`: first install rlpipe's policy, which sets the widths."""
    global policy
    spec = importlib.util.spec_from_file_location("rlpipe_gamma", os.environ[ASKED])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    policy = Widths(worker.speculative_num_steps, module.AdaptiveGamma, rare_sizes=module.rare_sizes)

    # Drop the log line that SGLang writes for each change of width.
    logging.getLogger(type(worker).__module__).addFilter(lambda record: "Switch adaptive" not in record.msg)
    worker.adaptive_controller.params = policy
    original(worker)


def prefilled(original: Callable, worker: Any, *rest: Any, **more: Any) -> Any:
    """Around `EAGLEWorkerV2._forward_prefill_batch`: report the prefill to the policy."""
    if policy is not None:
        policy.disturbed()
    return original(worker, *rest, **more)


def undrafted(verify: Any, worker: Any, batch: Any) -> None:
    """After `_build_trivial_verify_input`: add an unused q, as rejection sampling requires one."""
    from sglang.srt.runtime_context import get_spec

    if not get_spec().speculative_use_rejection_sampling:
        return
    shape = len(batch.seq_lens), 1, worker.target_worker.model_config.vocab_size
    verify.draft_probs = batch.seq_lens.new_zeros(shape, dtype=torch.float32)


def counted(_: Callable, request: Any, kept: int) -> None:
    """Around `Req.update_spec_correct_drafts_histogram`: count steps by drafted and accepted tokens.

    A step that accepts k of w drafts is counted in entry w (w + 1) / 2 + k.
    """
    histogram, deepest = request.spec_correct_drafts_histogram, policy.candidate_steps[-1]
    histogram += [0] * ((deepest + 1) * (deepest + 2) // 2 - len(histogram))
    histogram[policy.finished * (policy.finished + 1) // 2 + kept] += 1
