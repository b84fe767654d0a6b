"""Forward and backward passes of a policy over micro-batches, by Megatron's schedule.

Owns how a micro-batch reaches a model and what comes back; what is made of it, a loss or scores, is the
caller's. The draft's passes end in `draft`, the policy's here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from rlpipe.algo.policy_loss import LossTotals
from rlpipe.algo.rule import TokenExtras
from rlpipe.batching.micro_batch import Branch, MicroBatch, PackedBatch
from rlpipe.metrics.values import Value
from rlpipe.trainer.runtime import Runtime
from rlpipe.types import unrecorded

if TYPE_CHECKING:
    from rlpipe.trainer.layers import BranchLayout
    from rlpipe.trainer.logprobs import Head


@dataclass(slots=True, kw_only=True)
class Predictions:
    """What a forward pass over a micro-batch says of its sampled tokens.

    hidden: [N, H] states of the policy. layout: of the pass; it holds the keys if they were to be kept.
    states: [P, H], of the places that predict the P sampled tokens. logits: makes their [P, V_local] at once.
    logprobs, entropies: [B, R] float32, 0 where there is no token.
    of: logprobs [P, K] that the same pass gives to other tokens, by their ids; without a gradient.
    """

    hidden: torch.Tensor
    layout: BranchLayout | None
    states: torch.Tensor
    logits: Callable[[], torch.Tensor]
    logprobs: torch.Tensor
    entropies: torch.Tensor
    of: Callable[[torch.Tensor], torch.Tensor]

    def replayed(self) -> dict[str, Value]:
        """Metrics of the routes that were replayed in this pass; none without a record."""
        replay = None if self.layout is None else self.layout.replay
        return {} if replay is None else replay.metrics()


@dataclass(slots=True, kw_only=True)
class Scores:
    """Log-probabilities of one micro-batch under some policy [B, R], and of its candidates [P, K]."""

    logprobs: torch.Tensor
    candidates: torch.Tensor | None


class Companion(Protocol):
    """What else happens to the micro-batches of an update; see `decoupled`."""

    def watch(
        self, index: int, micro: MicroBatch, found: Predictions, loss: torch.Tensor, totals: LossTotals
    ) -> tuple[torch.Tensor, dict[str, Value]]:
        """The loss to descend in place of the policy's, which is given, and further metrics."""


class Passes:
    """Runs the models of a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def shares_prefixes(self) -> bool:
        """Whether batches may share prefixes: TransformerEngine's attention reads padded rows only."""
        return not self._runtime.te

    def scores(
        self,
        model: Any,
        shard: Sequence[MicroBatch],
        *,
        temperature: float,
        candidates: bool = False,
        replay: bool = True,
    ) -> list[Scores]:
        """Logprobs of the targets under a model, and of their candidates if asked for, without a graph.

        replay: send tokens to the experts that read them in the rollout, where recorded.
        """

        def keep(index: int, micro: MicroBatch, found: Predictions) -> Any:
            own = micro.candidates if candidates else None
            top = None if own is None else found.of(self._runtime.to_device(own.ids))
            return found.logprobs.sum(), Scores(logprobs=found.logprobs, candidates=top)

        with torch.no_grad():
            forward = self.forward(model, keep, temperature, replay=replay)
            return schedule(model, shard, forward, forward_only=True)

    def extras(self, micro: MicroBatch, found: Predictions, start: Scores | None) -> TokenExtras:
        """What the correction asked for: columns, the rollout's candidates and what its target gives to them.

        start: of the policy at the start of the batch, where that is the target.
        """
        candidates, move = micro.candidates, self._runtime.to_device
        columns = {name: move(values) for name, values in micro.columns.items()}
        if candidates is None:
            return TokenExtras(columns=columns)
        ahead = None if start is None else start.candidates
        target = found.of(move(candidates.ids)) if ahead is None else ahead
        return TokenExtras(columns=columns, rollout_top=move(candidates.logprobs), target_top=target)

    def lines(self, model: Any, shard: Sequence[MicroBatch], batch: PackedBatch) -> dict[int, np.ndarray]:
        """Logprobs of each trajectory of a shard, parallel to its tokens, by its row in the batch."""
        found: dict[int, np.ndarray] = {}
        scores = self.scores(model, shard, temperature=batch.temperature)
        for micro, score in zip(shard, scores, strict=bool(scores)):  # the last pipeline stage has them
            values, mask = score.logprobs.cpu().numpy(), micro.mask > 0
            for b in np.flatnonzero(micro.rows >= 0):
                line = np.zeros(batch.lengths[micro.rows[b]], dtype=np.float32)
                line[micro.indices[b, mask[b]]] = values[b, mask[b]]
                found[int(micro.rows[b])] = line
        return found

    def forward(
        self,
        model: Any,
        use: Callable[[int, MicroBatch, Predictions], Any],
        temperature: float,
        keep: bool = False,
        replay: bool = True,
    ) -> Callable[[int, MicroBatch], Any]:
        """The policy over a micro-batch, for `schedule`; `use` gives (loss, anything). keep: its keys.

        replay: as of `scores`.
        """
        from rlpipe.trainer.logprobs import Head

        policy = getattr(model, "module", model)
        move = self._runtime.to_device

        def forward(index: int, micro: MicroBatch) -> Any:
            select = move(micro.mask) > 0
            hidden, sources, layout = self.hidden(policy, micro, keep, replay)
            if not policy.post_process:
                return hidden, None
            states = hidden.index_select(0, sources)

            def finish_micro(states: torch.Tensor) -> Any:
                head = Head(
                    weight=policy.head_weight,
                    columns=policy.local_vocab,
                    temperature=temperature,
                    vocab_start=policy.vocab_start,
                    group=policy.pg_collection.tp,
                )
                targets = move(micro.targets)
                logprobs, entropies = self._scored(head, states, targets, policy.pg_collection.cp)
                grid = torch.zeros(select.shape, dtype=torch.float32, device=select.device)
                found = Predictions(
                    hidden=hidden,
                    layout=layout,
                    states=states,
                    logits=lambda: policy.head(states),
                    logprobs=grid.masked_scatter(select, logprobs),
                    entropies=grid.masked_scatter(select, entropies),
                    of=lambda ids: head.candidates(states, ids, targets, logprobs),
                )
                return use(index, micro, found)

            return states, finish_micro

        return forward

    def _scored(
        self, head: Head, states: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [P]; context parallel ranks compute a share of them each."""
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

        if group.size() == 1:
            return head.logprobs(states, targets)
        size = -(-len(targets) // group.size())
        share = slice(group.rank() * size, (group.rank() + 1) * size)
        mine = torch.stack(head.logprobs(states[share], targets[share]))
        before = min(share.start, len(targets))
        padded = torch.nn.functional.pad(mine, (before, len(targets) - before - mine.shape[1]))
        logprobs, entropies = reduce_from_tensor_model_parallel_region(padded, group)
        return logprobs, entropies

    def hidden(
        self, policy: Any, micro: MicroBatch, keep: bool = False, replay: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, BranchLayout | None]:
        """Hidden states of a micro-batch, which of them predict sampled tokens [P], and the layout if flat.

        On a pipeline stage before the last these are not whole and no more than what it passes on.
        keep: the layout keeps keys and values. replay: as of `scores`. Raises ValueError where routes are to
        be replayed by layers that read padded rows.
        """
        from rlpipe.trainer.context import ContextLayout
        from rlpipe.trainer.experts import Replay
        from rlpipe.trainer.layers import BranchLayout

        move, group = self._runtime.to_device, policy.pg_collection.cp
        share = policy.pg_collection.tp.size() if policy.config.sequence_parallel else 1
        routes = None
        if replay and micro.routes is not None:
            routes = Replay(move(micro.routes), unrecorded(micro.routes))
        if not self.shares_prefixes:
            if routes is not None:
                raise ValueError(
                    "rollout.replay_routes=true with TransformerEngine's layers, which get no routes: set "
                    "trainer.layers=local."
                )
            tokens, sources = micro.padded()
            return policy.hidden_states(move(tokens)), move(sources), None
        if group.size() > 1:
            cut = ContextLayout(micro, group, self._runtime.device, routes, share)
            hidden = policy.hidden_states(move(cut.tokens[None]), cut)
            return cut.gather(hidden) if policy.post_process else hidden, move(micro.sources), cut
        count, branches = len(micro.tokens), micro.branches
        padding = -count % share
        if padding:
            branches = [*branches, Branch(length=padding, context=[])]
        tokens, positions = (np.pad(x, (0, padding)) for x in (micro.tokens, micro.positions))
        layout = BranchLayout(branches, move(positions), keep, routes and routes.padded(padding))
        hidden = policy.hidden_states(move(tokens[None]), layout)
        return hidden[:count] if policy.post_process else hidden, move(micro.sources), layout


def schedule(model: Any, shard: Sequence[MicroBatch], forward: Any, *, forward_only: bool) -> list:
    """Megatron's schedule; `forward(index, micro)` gives an output and what makes of it (loss, anything).

    Returns the anythings, one per micro-batch; none on a pipeline stage before the last, where `forward`
    gives (output, None).
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=lambda numbered, _: forward(*next(numbered)),
        data_iterator=enumerate(shard),
        model=model,
        num_microbatches=len(shard),
        seq_length=1,  # neither size is read: a pipeline's stages tell one another what they send
        micro_batch_size=1,
        forward_only=forward_only,
    )
