"""Forward and backward passes of a policy over micro-batches, run by Megatron's schedule.

Owns how a micro-batch reaches a model and which predictions are returned; the caller turns these into a loss
or into scores. The draft model's passes are in `draft`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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
    from megatron.core.distributed import DistributedDataParallel

    from rlpipe.trainer.layers import BranchLayout
    from rlpipe.trainer.logprobs import Head
    from rlpipe.trainer.model import PolicyModel

T = TypeVar("T")
# Returns the model's output for a micro-batch, and the function from it to (loss, result); None before the
# last stage
Forward = Callable[
    [int, MicroBatch], tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, T]] | None]
]


@dataclass(slots=True, kw_only=True)
class Predictions:
    """Predictions of the sampled tokens of a micro-batch, from one forward pass.

    hidden: [N, H] states of the policy. layout: layout of the pass; it stores the keys if they are retained.
    states: [P, H], at the positions that predict the P sampled tokens. logits: computes logits [P, V_local]
    from them. logprobs, entropies: [B, R] float32, 0 where there is no token. candidate_logprobs: takes ids
    of further tokens and computes their log-probabilities, [P, K], without a gradient.
    """

    hidden: torch.Tensor
    layout: BranchLayout | None
    states: torch.Tensor
    logits: Callable[[], torch.Tensor]
    logprobs: torch.Tensor
    entropies: torch.Tensor
    candidate_logprobs: Callable[[torch.Tensor], torch.Tensor]

    def replayed(self) -> dict[str, Value]:
        """Return metrics of the routes that were replayed in this pass; empty if none were recorded."""
        replay = None if self.layout is None else self.layout.replay
        return {} if replay is None else replay.metrics()


@dataclass(slots=True, kw_only=True)
class Scores:
    """Log-probabilities under some policy: of a micro-batch's targets [B, R] and candidates [P, K]."""

    logprobs: torch.Tensor
    candidates: torch.Tensor | None


class Companion(Protocol):
    """Is called with the micro-batches of an update and may change their loss; see `decoupled`."""

    def watch(
        self,
        index: int,
        micro_batch: MicroBatch,
        predictions: Predictions,
        *,
        loss: torch.Tensor,
        totals: LossTotals,
    ) -> tuple[torch.Tensor, dict[str, Value]]:
        """Return the loss to minimise instead of the policy's, also a scalar, and further metrics.

        index: index of the micro-batch in the shard. totals: the sums of the update's losses.
        """
        ...


class Passes:
    """Runs the models of a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def shares_prefixes(self) -> bool:
        """Whether batches may share prefixes; TransformerEngine's attention supports only padded rows."""
        return not self._runtime.te

    def scores(
        self,
        model: PolicyModel,
        shard: Sequence[MicroBatch],
        *,
        temperature: float,
        candidates: bool = False,
        replay: bool = True,
    ) -> list[Scores]:
        """Compute logprobs of the targets under a model, without a graph.

        candidates: whether to compute logprobs of candidate tokens too. replay: route tokens to the experts
        of the rollout, where they are recorded.
        """

        def score(
            index: int, micro_batch: MicroBatch, predictions: Predictions
        ) -> tuple[torch.Tensor, Scores]:
            # The correction may also read the logprobs of candidate tokens.
            top = None
            if candidates and micro_batch.candidates is not None:
                ids = self._runtime.to_device(micro_batch.candidates.ids)
                top = predictions.candidate_logprobs(ids)
            return predictions.logprobs.sum(), Scores(logprobs=predictions.logprobs, candidates=top)

        with torch.no_grad():
            forward = self.forward(model, score, temperature=temperature, replay=replay)
            return schedule(model, shard, forward, forward_only=True)

    def extras(self, micro_batch: MicroBatch, predictions: Predictions, start: Scores | None) -> TokenExtras:
        """Collect the data that the correction needs: columns, candidates and their logprobs.

        start: scores of the policy at the start of the batch, if that policy is the target; else None.
        """
        # Without recorded candidates only the columns are passed.
        candidates, move = micro_batch.candidates, self._runtime.to_device
        columns = {name: move(values) for name, values in micro_batch.columns.items()}
        if candidates is None:
            return TokenExtras(columns=columns)

        # The target is the policy at the start of the batch or the policy of this pass.
        target = None if start is None else start.candidates
        if target is None:
            target = predictions.candidate_logprobs(move(candidates.ids))
        return TokenExtras(columns=columns, rollout_top=move(candidates.logprobs), target_top=target)

    def candidate_scores(
        self, model: PolicyModel, shard: Sequence[MicroBatch], temperature: float
    ) -> list[dict[int, tuple[np.ndarray, np.ndarray]]]:
        """Compute entropies [n] and log-probabilities of candidates [n, K] at n sampled tokens, in order.

        Returns, for each micro-batch that has candidates, these arrays for each trajectory, by its row in the
        batch.
        """

        def score(
            index: int, micro_batch: MicroBatch, predictions: Predictions
        ) -> tuple[torch.Tensor, dict[int, tuple[np.ndarray, np.ndarray]]]:
            # A rank without trajectories has an empty micro-batch.
            if micro_batch.candidates is None:
                return predictions.logprobs.sum(), {}
            ids = self._runtime.to_device(micro_batch.candidates.ids)
            candidates = predictions.candidate_logprobs(ids).cpu().numpy()
            entropies, mask = predictions.entropies.cpu().numpy(), micro_batch.mask > 0

            # The flat predictions are in the order of the trajectories.
            ends = mask.sum(1).cumsum()
            scores = {
                int(micro_batch.rows[b]): (
                    entropies[b, mask[b]],
                    candidates[ends[b] - mask[b].sum() : ends[b]],
                )
                for b in np.flatnonzero(micro_batch.rows >= 0)
            }
            return predictions.logprobs.sum(), scores

        with torch.no_grad():
            forward = self.forward(model, score, temperature=temperature)
            return schedule(model, shard, forward, forward_only=True)

    def logprobs_by_row(
        self, model: PolicyModel, shard: Sequence[MicroBatch], batch: PackedBatch
    ) -> dict[int, np.ndarray]:
        """Compute logprobs of each trajectory of a shard, by its row in the batch.

        Returns [tokens] float32 for each trajectory, in nats, 0 at tokens that were not sampled. On pipeline
        stages before the last the result is empty.
        """
        logprobs: dict[int, np.ndarray] = {}
        scores = self.scores(model, shard, temperature=batch.temperature)

        # Only the last pipeline stage has scores.
        for micro_batch, score in zip(shard, scores, strict=bool(scores)):
            values, mask = score.logprobs.cpu().numpy(), micro_batch.mask > 0
            for b in np.flatnonzero(micro_batch.rows >= 0):
                row = int(micro_batch.rows[b])
                # Each segment of a trajectory has a separate row.
                logprobs.setdefault(row, np.zeros(batch.lengths[row], dtype=np.float32))
                logprobs[row][micro_batch.indices[b, mask[b]]] = values[b, mask[b]]
        return logprobs

    def forward(
        self,
        model: PolicyModel | DistributedDataParallel,
        use: Callable[[int, MicroBatch, Predictions], tuple[torch.Tensor, T]],
        *,
        temperature: float,
        retain_keys: bool = False,
        replay: bool = True,
    ) -> Forward[T]:
        """Make the function for `schedule` that runs the policy over a micro-batch.

        use: turns predictions into a loss and a result. retain_keys: whether the layout stores keys and
        values. replay: see `scores`.
        """
        from rlpipe.trainer.logprobs import Head

        policy: PolicyModel = getattr(model, "module", model)
        move = self._runtime.to_device

        def forward(index: int, micro_batch: MicroBatch) -> Any:
            select = move(micro_batch.mask) > 0
            hidden, sources, layout = self.hidden(policy, micro_batch, retain_keys=retain_keys, replay=replay)
            if not policy.post_process:
                return hidden, None

            # Only positions that predict sampled tokens reach the head.
            states = hidden.index_select(0, sources)

            def finish_micro_batch(states: torch.Tensor) -> tuple[torch.Tensor, T]:
                head = Head(
                    weight=policy.head_weight,
                    columns=policy.local_vocab,
                    temperature=temperature,
                    vocab_start=policy.vocab_start,
                    group=policy.pg_collection.tp,
                )
                targets = move(micro_batch.targets)
                logprobs, entropies = self._score(head, states, targets, group=policy.pg_collection.cp)

                # Spread the flat scores over the grid of trajectories.
                grid = torch.zeros(select.shape, dtype=torch.float32, device=select.device)
                predictions = Predictions(
                    hidden=hidden,
                    layout=layout,
                    states=states,
                    logits=lambda: policy.head(states),
                    logprobs=grid.masked_scatter(select, logprobs),
                    entropies=grid.masked_scatter(select, entropies),
                    candidate_logprobs=lambda ids: head.candidates(
                        states, ids, targets=targets, logprobs=logprobs
                    ),
                )
                return use(index, micro_batch, predictions)

            return states, finish_micro_batch

        return forward

    def _score(
        self, head: Head, states: torch.Tensor, targets: torch.Tensor, *, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probabilities and entropies [P]; each context parallel rank computes one share."""
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

        if group.size() == 1:
            return head.logprobs(states, targets)

        # Every context parallel rank has all states: each scores an equal share.
        size = -(-len(targets) // group.size())
        share = slice(group.rank() * size, (group.rank() + 1) * size)
        local = torch.stack(head.logprobs(states[share], targets[share]))

        # Each rank pads its share with zeros, so that the sum over ranks joins the shares.
        before = min(share.start, len(targets))
        padded = torch.nn.functional.pad(local, (before, len(targets) - before - local.shape[1]))
        logprobs, entropies = reduce_from_tensor_model_parallel_region(padded, group)
        return logprobs, entropies

    def hidden(
        self,
        policy: PolicyModel,
        micro_batch: MicroBatch,
        *,
        retain_keys: bool = False,
        replay: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, BranchLayout | None]:
        """Compute the hidden states of a micro-batch.

        Returns the states, the indices [P] of those that predict sampled tokens, and the layout if tokens are
        flat. A pipeline stage before the last returns the states to pass on, which may be a shard.
        retain_keys, replay: see `forward`. Raises ValueError if routes must be replayed but the layers read
        padded rows.
        """
        from rlpipe.trainer.context import ContextLayout
        from rlpipe.trainer.experts import Replay
        from rlpipe.trainer.layers import BranchLayout

        move, group = self._runtime.to_device, policy.pg_collection.cp
        ranks = policy.pg_collection.tp.size() if policy.config.sequence_parallel else 1

        # Load the experts that the rollout recorded.
        routes = None
        if replay and micro_batch.routes is not None:
            routes = Replay(move(micro_batch.routes), unrecorded(micro_batch.routes))

        # TransformerEngine's layers read padded rows.
        if not self.shares_prefixes:
            if routes is not None:
                raise ValueError(
                    "rollout.replay_routes=true with TransformerEngine's layers, which get no routes: set "
                    "trainer.layers=local."
                )
            tokens, sources = micro_batch.padded()
            return policy.hidden_states(move(tokens)), move(sources), None

        # Each context parallel rank reads a share of the tokens.
        sources = move(micro_batch.sources)
        if group.size() > 1:
            device = self._runtime.device
            layout = ContextLayout(micro_batch, group, device, replay=routes, multiple=ranks)
            hidden = policy.hidden_states(move(layout.tokens[None]), layout)
            return layout.gather(hidden) if policy.post_process else hidden, sources, layout

        # Sequence parallel ranks need shares of equal size: the padding is a separate branch.
        count, branches = len(micro_batch.tokens), micro_batch.branches
        padding = -count % ranks
        if padding:
            branches = [*branches, Branch(length=padding, context=[])]

        tokens, positions = (np.pad(x, (0, padding)) for x in (micro_batch.tokens, micro_batch.positions))
        layout = BranchLayout(
            branches, move(positions), retain_keys=retain_keys, replay=routes and routes.padded(padding)
        )
        hidden = policy.hidden_states(move(tokens[None]), layout)
        return hidden[:count] if policy.post_process else hidden, sources, layout


def schedule(
    model: PolicyModel | DistributedDataParallel,
    shard: Sequence[MicroBatch],
    forward: Forward[T],
    *,
    forward_only: bool,
) -> list[T]:
    """Run Megatron's schedule over micro-batches: forward passes and, unless forward_only, backward passes.

    Returns the result of each micro-batch; on pipeline stages before the last, an empty list.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    # Megatron reads neither size: pipeline stages exchange the shapes that they send.
    return get_forward_backward_func()(
        forward_step_func=lambda numbered, _: forward(*next(numbered)),
        data_iterator=enumerate(shard),
        model=model,
        num_microbatches=len(shard),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
