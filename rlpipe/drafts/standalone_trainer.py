"""The trainer of a draft that is not part of the policy: plain torch, in one process with its target.

Owns the draft, its optimizer, and the path from a packed batch to its loss. The target (`drafts.protocols`)
is the engine's model, so the draft is trained on the same features that it reads in generation. It runs
without gradients, a few rows at a time. Before RL (`rlpipe.adapt`) it is frozen; during RL (`TrainerWorker`)
it gets the policy's weights. Layout of anchors and turns: `rlpipe.batching.draft_layout`; objectives:
`rlpipe.drafts.loss`.

    micro-batch -> rows of tokens -> target: hidden states, features -> unroll K steps -> states of turns
                                                     | head of the target                | head of the draft
                                                     +-----------> mtp_loss <------------+

The head and the loss run turn by turn, and again in the backward pass, so that no [N, K, V] tensor of a full
batch exists. Differs from EAGLE-3 in the data (the model's own rollouts), the loss (any of `mtp_loss`), and
the initialization of norm and head (copied from the target). Objectives on windows, which are for EAGLE-3
drafts only, learn from windows that the draft generates (`drafts.windows`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import reduce
from math import isfinite
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from rlpipe.batching.draft_layout import DraftBatch, draft_batch
from rlpipe.batching.micro_batch import MicroBatch, PackedBatch, as_rows
from rlpipe.config.run import Config
from rlpipe.config.trainer import Precision
from rlpipe.drafts.loss import MtpStats, depth_targets, mtp_loss
from rlpipe.drafts.loss.alignment import DepthTargets
from rlpipe.drafts.loss.rows import Backend, Rows, first_choices, measure, resolve_backend
from rlpipe.drafts.loss.stats import no_stats
from rlpipe.drafts.protocols import Target, TrainableDraft
from rlpipe.drafts.tables import Table, context_tables
from rlpipe.drafts.windows.eagle3 import Pair
from rlpipe.drafts.windows.totals import PpowTotals
from rlpipe.drafts.windows.training import WindowTraining
from rlpipe.metrics.values import Last, Mean, Sum, Value

LOGIT_BYTES = {"cuda": 2**28, "cpu": 2**25}  # draft logits in memory at once; at least one turn


class Aligned(NamedTuple):
    """The aligned outputs of draft and target for a micro-batch.

    batch: layout of the micro-batch. states: [M, K, H] of the draft at all anchors. hidden: [M, H] of the
    target at the same anchors. anchors: [R, L], indices into both for the R turns. targets: tokens and mask
    of each depth.
    """

    batch: DraftBatch
    states: torch.Tensor
    hidden: torch.Tensor
    anchors: torch.Tensor
    targets: DepthTargets


class DraftTrainer:
    """Trains a draft for `adapt.run`, and together with the policy for the trainer's worker.

    config: `draft` (objective, steps of the training-time test, learning rate), `ppow` and `trainer` are
    used. draft, target: must be on the same device. draft_cost: c of PPOW's reward, used if `ppow.draft_cost`
    is 0. updates: optimizer steps so far.
    """

    shares_prefixes = False

    def __init__(
        self, config: Config, draft: TrainableDraft, target: Target, *, draft_cost: float = 0.0
    ) -> None:
        self._config, self._settings = config, config.draft
        self._draft, self._target, self._device = draft, target, target.device
        self._pair = Pair(
            draft=draft,
            target=target,
            read=self._read_target,
            autocast=self._autocast,
            draft_cost=draft_cost,
        )

        # The curriculum of windows counts the draft's updates; during RL there is one every draft.interval
        # steps.
        every = config.draft.interval if config.cotrains_draft else 1
        self._windows: WindowTraining | None = None
        if config.draft.windows:
            self._windows = WindowTraining(
                config.ppow,
                config.draft.objective,
                depths=config.draft.depths,
                steps=max(1, config.run.steps // every),
                seed=config.run.seed,
            )

        trainer = config.trainer
        self._optimizer = torch.optim.AdamW(
            self._draft.parameters(),
            lr=config.draft.lr,
            betas=(trainer.beta1, trainer.beta2),
            eps=trainer.eps,
            weight_decay=trainer.weight_decay,
        )
        self.updates = 0
        if trainer.threads:
            torch.set_num_threads(trainer.threads)

    def adapt_step(self, batch: PackedBatch) -> dict[str, Value]:
        """Take one optimizer step over a batch; return mtp/* metrics and, for windows, ppow/* metrics.

        A step whose gradient is not finite is skipped.
        """
        started = time.perf_counter()
        self._optimizer.zero_grad()

        sums: list[MtpStats | PpowTotals] = []
        for micro_batch in _micro_batches(batch):
            for loss, stats in self._losses(micro_batch, batch.temperature):
                if loss.requires_grad:
                    loss.backward()
                sums.append(stats)

        empty_sums = no_stats(self._settings.depths, self._device)
        stats = reduce(add, sums, empty_sums if self._windows is None else PpowTotals.zeros(self._device))
        metrics = stats.metrics() | self._apply(stats.weight.item())
        return metrics | {"timing_s/update_actor": Mean(time.perf_counter() - started, 1)}

    @torch.no_grad()
    def mtp_stats(self, batch: PackedBatch) -> MtpStats:
        """Measure the draft, teacher-forced, without training it."""
        sums = [self._loss(micro_batch, batch.temperature)[1] for micro_batch in _micro_batches(batch)]
        return reduce(add, sums, no_stats(self._settings.depths, self._device))

    @torch.no_grad()
    def draft_tables(self, batch: PackedBatch) -> list[Table | None]:
        """Tabulate draft and target at every context of each packed trajectory (None if it has none)."""
        tables: dict[int, Table] = {}
        for micro_batch in _micro_batches(batch):
            if (aligned := self._aligned(micro_batch)) is not None:
                tables |= self._tables(aligned, micro_batch.rows, batch.temperature)
        return [tables.get(row) for row in range(len(batch.lengths))]

    def save(self, directory: str | Path) -> None:
        """Write everything a resumed run needs; the directory appears when it is complete."""
        SavingDraft(self._state(), self._draft, directory=Path(directory)).write()

    def begin_save(self, directory: Path, hf: Path) -> SavingDraft:
        """Copy the state that `save` and `save_hf` would write to these directories, to write it later."""
        return SavingDraft(deepcopy(self._state()), self._draft, directory=directory, hf=hf)

    def _state(self) -> dict[str, Any]:
        return {
            "draft": self._draft.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self.updates,
        }

    def load(self, directory: str | Path) -> None:
        """Load the state that `save` wrote."""
        state = torch.load(Path(directory) / "eagle3.pt", map_location=self._device, weights_only=True)
        self._draft.load_state_dict(state["draft"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])

    def save_hf(self, directory: str | Path) -> None:
        """Write the draft as SGLang and vLLM read it."""
        self._draft.save(directory, self._draft.state_dict())

    def close(self) -> None:
        """Release nothing: there are no resources outside this object."""

    def follow(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load new weights of the target, by HF name."""
        self._target.load(weights)

    def export_weights(self) -> dict[str, torch.Tensor]:
        """Return the draft's weights under the names with which they are sent along with the target's."""
        return {
            self._draft.prefix + name: tensor.detach() for name, tensor in self._draft.state_dict().items()
        }

    def _apply(self, weight: float) -> dict[str, Value]:
        """Step on the summed gradient divided by `weight`."""
        group, mtp = self._optimizer.param_groups[0], self._settings
        group["lr"] = mtp.lr * min(1.0, (self.updates + 1) / max(1, mtp.warmup_steps))

        parameters = list(self._draft.parameters())
        norm = float("nan")
        if weight:
            for parameter in parameters:
                parameter.grad /= weight
            norm = torch.nn.utils.clip_grad_norm_(parameters, mtp.clip_grad or float("inf")).item()

        # A batch without a label, or a gradient that is not finite, skips the step.
        finite = isfinite(norm)
        metrics: dict[str, Value] = {"mtp/skipped_steps": Sum(not finite), "mtp/lr": Last(group["lr"])}
        if finite:
            self._optimizer.step()
            self.updates += 1
            metrics["mtp/grad_norm"] = Mean(norm, 1)
        return metrics

    def _losses(
        self, micro_batch: MicroBatch, temperature: float
    ) -> Iterator[tuple[torch.Tensor, MtpStats | PpowTotals]]:
        """Yield the numerator of the loss, and statistics, for each part of the micro-batch."""
        if self._windows is None:
            yield self._loss(micro_batch, temperature)
            return

        for text in self._pair.texts(micro_batch, temperature):
            if (windows := self._windows.loss(text, self.updates)) is not None:
                yield windows

    def _loss(self, micro_batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, MtpStats]:
        """Compute the numerator of the loss of a micro-batch, and statistics."""
        depths = self._settings.depths
        aligned = self._aligned(micro_batch)
        if aligned is None:
            return torch.zeros((), device=self._device), no_stats(depths, self._device)

        numerators: list[torch.Tensor] = []
        sums: list[MtpStats] = []
        for part in self._parts(aligned):
            loss, stats = self._turns(part, aligned, temperature)
            numerators.append(loss)
            sums.append(stats)
        return reduce(add, numerators), reduce(add, sums)

    def _aligned(self, micro_batch: MicroBatch) -> Aligned | None:
        """Run target and draft over a micro-batch; None when no token is drafted."""
        depths = self._settings.depths
        batch = draft_batch(micro_batch, depths)
        if batch is None:
            return None

        rows, indices = as_rows(batch.branches, micro_batch.tokens[batch.places])
        lengths = np.array([branch.length for branch in batch.branches])
        hidden, features = self._read_target(rows, lengths)

        ahead = np.stack([as_rows(batch.branches, ids)[0] for ids in batch.following])
        with self._autocast():
            states = self._draft.unroll(features, self._target.embedding[self._move(ahead)].float())
        states = torch.stack([state.flatten(0, 1) for state in states], 1)

        return Aligned(
            batch=batch,
            states=states,
            hidden=hidden,
            anchors=self._move(indices[batch.anchors]),
            targets=depth_targets(self._move(batch.tokens), self._move(batch.sampled), depths),
        )

    def _parts(self, aligned: Aligned) -> Iterator[slice]:
        """Yield slices of turns, each with as many turns as `LOGIT_BYTES` allows."""
        (count, length), states = aligned.anchors.shape, aligned.states
        size = states.element_size() * self._settings.depths * length * self._draft.shape.vocab
        step = max(1, LOGIT_BYTES[self._device.type] // size)
        return (slice(first, min(count, first + step)) for first in range(0, count, step))

    def _logits(
        self, states: torch.Tensor, hidden: torch.Tensor, indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits [n, K, V] of draft and target at `indices`. states: the draft's, [n, K, H]."""
        depths = self._settings.depths
        with self._autocast():
            draft = self._draft.logits(states)
        backbone = self._target.logits(hidden[indices])

        # Depth k at an anchor is compared with the target k anchors later; beyond the turn it is masked.
        padded = torch.cat((backbone[1:], backbone.new_zeros(depths, backbone.shape[1])))
        shared = padded.unfold(0, len(indices), 1)[:depths].permute(2, 0, 1)
        return draft.float(), shared.float()

    def _tables(self, aligned: Aligned, owner_rows: np.ndarray, temperature: float) -> dict[int, Table]:
        """Compute the tables of a micro-batch, by row of the packed batch; see `context_tables`."""
        targets, anchors = aligned.targets, aligned.anchors
        rows = Rows.zeros(targets.mask, torch.float32)
        choices = torch.zeros(2, *targets.mask.shape, device=self._device)
        for part in self._parts(aligned):
            indices, flat = anchors[part].flatten(), _flat(part, anchors.shape[1])
            draft, target = self._logits(aligned.states[indices], aligned.hidden, indices)
            mask = targets.mask[flat]
            measured = measure(
                draft,
                target,
                mask,
                tokens=targets.tokens[flat],
                temperature=temperature,
                group=None,
                backend=resolve_backend(Backend.AUTO, draft),
                keep_bits=False,
            )
            rows.put(flat, measured.rows)
            choices[:, flat] = first_choices(draft, target, measured, temperature, None) * mask
        return context_tables(rows, choices, batch=aligned.batch, mask=targets.mask, owner_rows=owner_rows)

    def _turns(self, part: slice, aligned: Aligned, temperature: float) -> tuple[torch.Tensor, MtpStats]:
        """Compute loss and statistics of some turns; the logits are freed when this returns."""
        targets, hidden = aligned.targets, aligned.hidden
        indices, flat = aligned.anchors[part].flatten(), _flat(part, aligned.anchors.shape[1])
        collected: list[MtpStats] = []

        def run(states: torch.Tensor) -> torch.Tensor:
            draft, target = self._logits(states, hidden, indices)
            loss, stats = mtp_loss(
                self._settings.supervised,
                draft,
                target,
                mask=targets.mask[flat],
                tokens=targets.tokens[flat],
                anchors=self._settings.anchors,
                turn_starts=targets.turn_starts[part],
                temperature=temperature,
                normalizer=1.0,
            )
            collected.append(stats)
            return loss

        chosen = aligned.states[indices]
        loss = (
            checkpoint(run, chosen, use_reentrant=False, preserve_rng_state=False)
            if chosen.requires_grad
            else run(chosen)
        )
        return loss, collected[0]

    @torch.no_grad()
    def _read_target(self, rows: np.ndarray, lengths: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target over rows [B, T]: hidden states [B * T, H], features [B, T, F] in float32."""
        tokens = self._move(rows)
        hidden, features = [], []

        # Read as many rows at a time as the cache has, cut to the longest row among them.
        for first in range(0, len(rows), self._target.rows):
            some = tokens[first : first + self._target.rows]
            longest = int(lengths[first : first + self._target.rows].max())
            positions = torch.arange(longest, device=self._device).expand(len(some), longest)
            span = self._target.span(0, positions, longest)
            outputs = self._target.features(some[:, :longest].flatten(), [span], self._draft.shape.layers)

            for groups, output in zip((hidden, features), outputs, strict=True):
                output = output.unflatten(0, (len(some), longest))
                groups.append(torch.nn.functional.pad(output, (0, 0, 0, tokens.shape[1] - longest)))
        return torch.cat(hidden).flatten(0, 1), torch.cat(features).float()

    def _autocast(self) -> AbstractContextManager:
        if self._config.trainer.precision is Precision.BF16:
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _move(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _flat(part: slice, length: int) -> slice:
    """Return the tokens of some turns, all of `length` tokens, as a slice of an array of all tokens."""
    return slice(part.start * length, part.stop * length)


def _micro_batches(batch: PackedBatch) -> Iterator[MicroBatch]:
    """Yield all micro-batches; an adaptation step has a single minibatch and a single rank."""
    for minibatch in batch.minibatches:
        for shard in minibatch.shards:
            yield from shard


class SavingDraft:
    """A copy of a draft and its optimizer, for writing a checkpoint and, in `hf`, the draft for servers."""

    def __init__(
        self, state: dict[str, Any], draft: TrainableDraft, *, directory: Path, hf: Path | None = None
    ) -> None:
        self._state, self._draft, self._directory, self._hf = state, draft, directory, hf

    def write(self) -> None:
        """Write all files; the directory appears when it is complete. Raises OSError."""
        part = self._directory.with_name(f"{self._directory.name}.part")
        part.mkdir(parents=True, exist_ok=True)
        torch.save(self._state, part / "eagle3.pt")
        part.replace(self._directory)
        if self._hf is not None:
            self._draft.save(self._hf, self._state["draft"])

    def finish(self) -> None:
        """Do nothing, because `write` has completed everything."""
