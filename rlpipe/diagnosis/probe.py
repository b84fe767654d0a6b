"""The probe set: fixed contexts that the trainer reads again every few steps, with its newest weights.

Owns which contexts are fixed, when they are read, the files in RUN/probe/ (docs/run_directory.md) and the
probe/* metrics; who computes the tables is the caller's business.

    step's groups --chosen once--> fixed contexts --.
    step's recorded rollouts ----> visited ---------+--> tables (trainer) --> files, probe/* metrics

On fixed contexts acceptance moves only because target or draft moved. The visited ones are what the engine
has just verified, so what it accepted can be held against what the newest version would: the difference is
staleness (`attribution`). A draft that is trained online is read on held-out contexts, too, from the first
validation, which nobody trains on (`probe/held_out`). Cost: a forward pass over two or three times
`metrics.probe.contexts` positions.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.config.probe import ProbeConfig
from rlpipe.diagnosis.regression import clustered_error
from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.metrics.rollouts import Recorder, forget_after, rollout_record, step_file, step_files
from rlpipe.metrics.values import Last, Mean, Ratio, Value
from rlpipe.types import DraftStep, Group, Trajectory, TrajectoryStatus

FOLDER, CONTEXTS, HELD_OUT = "probe", "contexts.jsonl", "held_out.jsonl"
COLUMNS = (
    "rejection",
    "target_only",
    "accept",
    "top",
    "target_entropy",
    "draft_entropy",
    "kl",
    "reverse_kl",
    "target_above",
    "draft_above",
)
DIGITS = 5
LEAST = 3  # trajectories: with fewer there is no standard error, nor a slope


@dataclass(slots=True, kw_only=True)
class ProbeTable:
    """One trajectory read by target and draft.

    positions: [n] index of the token that depth 1 drafts; depth k drafts positions + k - 1. values: [n, K]
    by name of COLUMNS, nan where that token lies behind the end of the turn.
    """

    trajectory_id: str
    positions: np.ndarray
    values: dict[str, np.ndarray]

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it."""
        return {
            "trajectory_id": self.trajectory_id,
            "positions": self.positions.tolist(),
            **{name: _plain(column) for name, column in self.values.items()},
        }

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> ProbeTable:
        """The inverse of `to_json`, to `DIGITS` digits."""
        return cls(
            trajectory_id=item["trajectory_id"],
            positions=np.array(item["positions"], dtype=int),
            values={name: np.array(item[name], dtype=float) for name in COLUMNS},
        )


Read = Callable[[list[Trajectory]], Awaitable[list[ProbeTable]]]


class Probe:
    """The probe set of one run. last_step: always probed, too, so that a run ends with a reading."""

    def __init__(self, config: ProbeConfig, run_dir: Path, last_step: int, recorder: Recorder) -> None:
        self._recorder = recorder
        self._config, self._folder, self._last = config, run_dir / FOLDER, last_step
        self._fixed = self._kept(CONTEXTS)
        self._held_out = self._kept(HELD_OUT)

    def due(self, step: int) -> bool:
        """Whether step (1, 2, ...) is probed."""
        every = self._config.every
        return bool(every) and ((step - 1) % every == 0 or step == self._last)

    def forget_after(self, step: int) -> None:
        """Remove what a resumed run will write again; with step 0 the contexts, too."""
        forget_after(self._folder, step)
        if not step:
            for name in (CONTEXTS, HELD_OUT):
                (self._folder / name).unlink(missing_ok=True)
            self._fixed, self._held_out = [], []

    def hold_out(self, trajectories: Sequence[Trajectory], version: int) -> None:
        """Take the held-out contexts from trajectories that are not trained on; later calls do nothing."""
        if self._config.every and not self._held_out:
            self._held_out = self._keep(HELD_OUT, trajectories, 0, version)

    async def measure(
        self,
        step: int,
        version: int,
        groups: Sequence[Group],
        visited: Sequence[Trajectory],
        read: Read,
        *,
        rule: str | None,
    ) -> dict[str, Value]:
        """Read the set, write the step's file, return metrics.

        step: that is about to be trained, at the trainer's `version`. groups: of the step; contexts are
        taken from them the first time. visited: those with recorded drafts; at most `contexts` positions.
        rule: column by which the engine judges chains token by token; None: by another rule, without which
        staleness cannot be told.
        """
        started = time.perf_counter()
        if not self._fixed:
            siblings = zip_longest(*(g.trajectories for g in groups))  # first attempts come first
            self._fixed = self._keep(CONTEXTS, [t for row in siblings for t in row if t], step, version)
        visited = within([t for t in visited if t.drafts], self._config.contexts)
        found = await read([*self._fixed, *visited, *self._held_out])
        own = len(self._fixed) + len(visited)
        tables, held_out = found[:own], found[own:]
        fixed = tables[: len(self._fixed)]
        seconds = time.perf_counter() - started
        head = {"step": step, "version": version, "seconds": round(seconds, 3), "fixed": len(fixed)}
        lines = [head, *(table.to_json() for table in tables)]
        self._recorder.write(step_file(self._folder, step), lines)
        metrics = table_metrics(fixed, "probe/fixed") | table_metrics(tables[len(fixed) :], "probe/visited")
        metrics |= table_metrics(held_out, "probe/held_out")
        if rule is not None:
            drafts = {t.trajectory_id: t.drafts or [] for t in visited}
            metrics |= staleness_metrics(verified(tables[len(fixed) :], drafts, rule))
        metrics["probe/contexts"] = Last(sum(len(table.positions) for table in found))
        metrics["timing_s/probe"] = Mean(seconds, 1)
        return metrics

    def _keep(
        self, name: str, trajectories: Sequence[Trajectory], step: int, version: int
    ) -> list[Trajectory]:
        """Choose contexts and write them to a file of that name."""
        chosen = within(trajectories, self._config.contexts)
        lines = [rollout_record(t, step, version) | {"drafts": None} for t in chosen]
        self._recorder.write(self._folder / name, lines)
        return chosen

    def _kept(self, name: str) -> list[Trajectory]:
        """Contexts that an earlier start of the run chose."""
        file = self._folder / name
        return [_trajectory(item) for item in read_jsonl(file)[0]] if file.is_file() else []


def within(trajectories: Sequence[Trajectory], contexts: int) -> list[Trajectory]:
    """The first trajectories whose sampled tokens fit into a number of contexts; `LEAST` in any case."""
    kept, used = [], 0
    for trajectory in trajectories:
        if trajectory.status is not TrajectoryStatus.COMPLETE or trajectory.response_length < 2:
            continue
        used += trajectory.response_length
        if len(kept) >= LEAST and used > contexts:
            break
        kept.append(trajectory)
    return kept


def table_metrics(tables: Sequence[ProbeTable], under: str) -> dict[str, Value]:
    """Means by depth over all contexts, and predicted acceptance lengths; {} without contexts."""
    found: dict[str, Value] = {}
    if not any(len(table.positions) for table in tables):
        return found
    for name in COLUMNS:
        for depth, column in enumerate(_columns(tables, name), 1):
            seen = column[~np.isnan(column)]
            found[f"{under}/{name}/depth_{depth}"] = Mean(float(seen.sum()), len(seen))
    for rule, lengths in predicted_lengths(tables).items():
        found[f"{under}/acceptance_length/{rule}"] = Mean(float(lengths.sum()), len(lengths))
    return found


def predicted_lengths(tables: Sequence[ProbeTable]) -> dict[str, np.ndarray]:
    """Expected tokens per verify step at every context with all depths, under both rules: [n].

    1 + sum_j alpha_j prod_{i<j} a_i, with a_i = min(1, q_i / p_i) at the realised token for rejection and
    1[realised token = argmax q_i] for target-only: exact in expectation over tokens that the target sampled
    (Leviathan et al. Alg. 1 by change of measure, see `recipes/theory.py`).
    """
    found = {}
    for rule, passed in (("rejection", "accept"), ("target_only", "top")):
        alpha, kept = np.stack(_columns(tables, rule), -1), np.stack(_columns(tables, passed), -1)
        whole = ~np.isnan(alpha).any(-1)
        alpha, kept = alpha[whole], kept[whole]
        before = np.concatenate([np.ones_like(kept[:, :1]), np.cumprod(kept, -1)[:, :-1]], -1)
        found[rule] = 1 + (before * alpha).sum(-1)
    return found


def verified(
    tables: Sequence[ProbeTable], drafts: Mapping[str, Sequence[DraftStep]], rule: str
) -> np.ndarray:
    """[m, 4] one line per drafted token that a verify step judged: table, depth, kept (0 or 1), alpha.

    A step that keeps n drafts judged depths 1..n + 1; the drafts kept are the realised tokens, so the
    context's own alpha is the probability with which the newest version would have kept each.
    """
    lines = []
    for number, table in enumerate(tables):
        row = {int(position): i for i, position in enumerate(table.positions)}
        alpha = table.values[rule]
        for step in drafts.get(table.trajectory_id, ()):
            place = row.get(step.position)
            if place is None:
                continue
            for depth in range(min(step.num_accepted + 1, len(step.tokens), alpha.shape[1])):
                if not np.isnan(alpha[place, depth]):
                    lines.append((number, depth + 1, step.num_accepted > depth, alpha[place, depth]))
    return np.array(lines, dtype=float).reshape(-1, 4)


def staleness_metrics(lines: np.ndarray) -> dict[str, Value]:
    """What the engine kept of its first drafts against what the newest version would have; {} without any.

    lines: [m, 4] of `verified`. Depth 1 alone: deeper ones are not quite the engine's, whose draft attends
    to keys of depth 1 where the trainer's attends to those of its own depth.
    """
    lines = lines[lines[:, 1] == 1]
    if not len(lines):
        return {}
    kept, expected, count = lines[:, 2].sum(), lines[:, 3].sum(), len(lines)
    error = clustered_error(lines[:, 2] - lines[:, 3], lines[:, 0]) / count
    found: dict[str, Value] = {
        "probe/visited/observed_rate": Ratio(kept, count),
        "probe/visited/current_rate": Ratio(expected, count),
        "probe/staleness": Last((kept - expected) / count),
    }
    if not isnan(error):
        found["probe/staleness_se"] = Last(error)
    return found


def read_probes(run_dir: Path) -> list[tuple[dict[str, Any], list[ProbeTable]]]:
    """Head and tables of every probe of a run, in order; the first `fixed` tables are the fixed contexts."""
    found = []
    for _, file in step_files(run_dir / FOLDER):
        lines, _ = read_jsonl(file)
        if lines and "version" in lines[0]:
            found.append((lines[0], [ProbeTable.from_json(item) for item in lines[1:]]))
    return found


def _columns(tables: Sequence[ProbeTable], name: str) -> list[np.ndarray]:
    """A column of all contexts, depth by depth."""
    filled = [table.values[name] for table in tables if len(table.positions)]
    return list(np.concatenate(filled).T) if filled else []


def _plain(column: np.ndarray) -> list[list[float | None]]:
    return [[None if x != x else round(x, DIGITS) for x in row] for row in column.tolist()]


def _trajectory(item: Mapping[str, Any]) -> Trajectory:
    """What a probe needs of a record: the tokens, and which were sampled."""
    versions = np.repeat(*np.array(item["policy_versions"], np.int32).reshape(-1, 2).T)
    return Trajectory(
        trajectory_id=item["trajectory_id"],
        group_id=item["group_id"],
        instance_id=item["prompt_id"],
        token_ids=item["tokens"],
        loss_mask=versions >= 0,
        rollout_logprobs=item["rollout_logprobs"],
        entropies=item["entropies"],
        versions=versions,
        prompt_length=item["prompt_length"],
        reward=item["reward"],
    )
