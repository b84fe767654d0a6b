"""The probe set: fixed contexts that the trainer evaluates again every few steps with its newest weights.

Owns the choice of contexts, the steps at which they are read, the files in RUN/probe/ (docs/run_directory.md)
and the probe/* metrics. The caller computes the tables.

    step's groups --chosen once--> fixed contexts --.
    step's recorded rollouts ----> visited ---------+--> tables (trainer) --> files, probe/* metrics

On fixed contexts, acceptance changes only because target or draft changed. On visited contexts the engine has
just verified drafts, so its acceptance can be compared with the newest version's; the difference is
staleness. A draft that is trained online is also evaluated on held-out contexts of the first validation,
which are never trained on (`probe/held_out`). Cost: a forward pass over two or three times
`metrics.probe.contexts` positions.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, zip_longest
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.config.probe import ProbeConfig
from rlpipe.diagnosis.regression import clustered_error
from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.metrics.rollouts import Recorder, remove_steps_after, rollout_record, step_file, step_files
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
MIN_TRAJECTORIES = 3  # fewer do not determine a standard error or a slope


@dataclass(slots=True, kw_only=True)
class ProbeTable:
    """Results of target and draft on one trajectory.

    positions: [n] index of the token that depth 1 drafts; depth k drafts the token at positions + k - 1.
    values: [n, K] for each name in COLUMNS; nan if the drafted token would be beyond the end of the turn.
    """

    trajectory_id: str
    positions: np.ndarray
    values: dict[str, np.ndarray]

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain data, which `from_json` reads."""
        return {
            "trajectory_id": self.trajectory_id,
            "positions": self.positions.tolist(),
            **{name: _plain(column) for name, column in self.values.items()},
        }

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> ProbeTable:
        """Return the table from plain data, rounded to `DIGITS` digits."""
        return cls(
            trajectory_id=item["trajectory_id"],
            positions=np.array(item["positions"], dtype=int),
            values={name: np.array(item[name], dtype=float) for name in COLUMNS},
        )


Read = Callable[[list[Trajectory]], Awaitable[list[ProbeTable]]]


class Probe:
    """The probe set of one run.

    last_step: a step that is always probed, so that a run ends with a reading.
    fixed: tables of the fixed contexts in the newest reading.
    """

    def __init__(self, config: ProbeConfig, run_dir: Path, *, last_step: int, recorder: Recorder) -> None:
        self._recorder = recorder
        self._config, self._folder, self._last_step = config, run_dir / FOLDER, last_step
        self._fixed = self._stored(CONTEXTS)
        self._held_out = self._stored(HELD_OUT)
        self.fixed: list[ProbeTable] = []

    def due(self, step: int) -> bool:
        """Return whether a step (1, 2, ...) is probed."""
        return _is_due(step, every=self._config.every, last_step=self._last_step)

    def remove_after(self, step: int) -> None:
        """Remove the files that a run resumed after `step` writes again; with step 0, also the contexts."""
        remove_steps_after(self._folder, step)
        if not step:
            for name in (CONTEXTS, HELD_OUT):
                (self._folder / name).unlink(missing_ok=True)
            self._fixed, self._held_out = [], []

    def hold_out(self, trajectories: Sequence[Trajectory], version: int) -> None:
        """Choose the held-out contexts from trajectories that are not trained on; later calls do nothing."""
        if self._config.every and not self._held_out:
            self._held_out = self._choose(HELD_OUT, trajectories, step=0, version=version)

    async def measure(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        visited: Sequence[Trajectory],
        version: int,
        read: Read,
        rule: str | None,
    ) -> dict[str, Value]:
        """Read the probe set and write the step's file.

        Args:
            step: the step that will be trained next.
            groups: the groups of this step; the first probe chooses its contexts from them.
            visited: trajectories of the step with recorded drafts; at most `contexts` positions are read.
            version: version of the trainer.
            read: computes the tables of trajectories with the trainer's weights.
            rule: column of the engine's rule if it verifies chains token by token. None for any other rule;
                staleness is then not measured.
        Returns:
            probe/* metrics and timing_s/probe.
        """
        started = time.perf_counter()
        if not self._fixed:
            # First attempts are first in this list, so that the contexts come from many prompts.
            siblings = zip_longest(*(g.trajectories for g in groups))
            first = [t for row in siblings for t in row if t]
            self._fixed = self._choose(CONTEXTS, first, step=step, version=version)

        # One call of the trainer reads all three sets.
        visited = within([t for t in visited if t.drafts], self._config.contexts)
        tables = await read([*self._fixed, *visited, *self._held_out])
        num_fixed, num_recorded = len(self._fixed), len(self._fixed) + len(visited)
        of_fixed, of_visited = tables[:num_fixed], tables[num_fixed:num_recorded]
        # The tables are rounded as in the file, so that a reader of the file computes the same numbers.
        self.fixed = [ProbeTable.from_json(table.to_json()) for table in of_fixed]
        seconds = time.perf_counter() - started

        head = {"step": step, "version": version, "seconds": round(seconds, 3), "fixed": num_fixed}
        lines = [head, *(table.to_json() for table in tables[:num_recorded])]
        self._recorder.write(step_file(self._folder, step), lines)

        metrics = table_metrics(of_fixed, "probe/fixed") | table_metrics(of_visited, "probe/visited")
        metrics |= table_metrics(tables[num_recorded:], "probe/held_out")
        if rule is not None:
            drafts = {t.trajectory_id: t.drafts or [] for t in visited}
            metrics |= staleness_metrics(verified(of_visited, drafts, rule))
        metrics["probe/contexts"] = Last(sum(len(table.positions) for table in tables))
        metrics["timing_s/probe"] = Mean(seconds, 1)
        return metrics

    def _choose(
        self, name: str, trajectories: Sequence[Trajectory], *, step: int, version: int
    ) -> list[Trajectory]:
        """Choose contexts and write them to a file of that name."""
        chosen = within(trajectories, self._config.contexts)
        lines = [rollout_record(t, step, version) | {"drafts": None} for t in chosen]
        self._recorder.write(self._folder / name, lines)
        return chosen

    def _stored(self, name: str) -> list[Trajectory]:
        """Read the contexts that an earlier start of the run chose."""
        file = self._folder / name
        return [_trajectory(item) for item in read_jsonl(file)[0]] if file.is_file() else []


def step_of_probe(number: int, *, after: int, every: int, last_step: int = 0) -> int:
    """Return the step of the `number`-th probe after a step.

    >>> step_of_probe(1, after=12, every=5), step_of_probe(2, after=12, every=5, last_step=18)
    (16, 18)
    """
    due = (step for step in count(after + 1) if _is_due(step, every=every, last_step=last_step))
    return next(islice(due, number - 1, None))


def _is_due(step: int, *, every: int, last_step: int) -> bool:
    return bool(every) and ((step - 1) % every == 0 or step == last_step)


def within(trajectories: Sequence[Trajectory], contexts: int) -> list[Trajectory]:
    """Return the first trajectories that together have at most `contexts` sampled tokens.

    Returns at least `MIN_TRAJECTORIES`, even if they have more tokens.
    """
    chosen, used = [], 0
    for trajectory in trajectories:
        if trajectory.status is not TrajectoryStatus.COMPLETE or trajectory.response_length < 2:
            continue
        used += trajectory.response_length
        if len(chosen) >= MIN_TRAJECTORIES and used > contexts:
            break
        chosen.append(trajectory)
    return chosen


def table_metrics(tables: Sequence[ProbeTable], under: str) -> dict[str, Value]:
    """Average every column over all contexts by depth, and also the predicted acceptance lengths.

    Args:
        tables: the tables of one set of contexts.
        under: prefix of the metric names.
    Returns:
        The metrics; {} without contexts.
    """
    metrics: dict[str, Value] = {}
    if not any(len(table.positions) for table in tables):
        return metrics

    for name in COLUMNS:
        for depth, column in enumerate(_columns(tables, name), 1):
            known = column[~np.isnan(column)]
            metrics[f"{under}/{name}/depth_{depth}"] = Mean(float(known.sum()), len(known))
    for rule, lengths in predicted_lengths(tables).items():
        metrics[f"{under}/acceptance_length/{rule}"] = Mean(float(lengths.sum()), len(lengths))
    return metrics


def predicted_lengths(tables: Sequence[ProbeTable]) -> dict[str, np.ndarray]:
    """Predict the tokens per verify step for each rule, at every context that has all depths.

        1 + sum_j alpha_j prod_{i<j} a_i

    alpha_j is the acceptance probability at depth j. a_i is min(1, q_i / p_i) at the sampled token for
    rejection, and 1[sampled token = argmax q_i] for target-only. This is exact in expectation over tokens
    that the target sampled.

    Returns:
        rejection, target_only: [n].
    Source: Leviathan et al., Alg. 1, with a change of measure (`recipes/theory.py`).
    """
    lengths = {}
    for rule, passed in (("rejection", "accept"), ("target_only", "top")):
        alpha, pass_prob = np.stack(_columns(tables, rule), -1), np.stack(_columns(tables, passed), -1)
        complete = ~np.isnan(alpha).any(-1)
        alpha, pass_prob = alpha[complete], pass_prob[complete]

        # A depth is reached when all depths before it passed.
        reach = np.concatenate([np.ones_like(pass_prob[:, :1]), np.cumprod(pass_prob, -1)[:, :-1]], -1)
        lengths[rule] = 1 + (reach * alpha).sum(-1)
    return lengths


def verified(
    tables: Sequence[ProbeTable], drafts: Mapping[str, Sequence[DraftStep]], rule: str
) -> np.ndarray:
    """Pair every verified draft token with its acceptance probability alpha under the newest version.

    A step that accepts n draft tokens has verified depths 1..n + 1. The accepted tokens are the context of
    each depth, so the table's alpha at this context is the acceptance probability under the newest version.

    Args:
        tables: tables of the visited trajectories.
        drafts: verify steps by trajectory_id.
        rule: column of alpha.
    Returns:
        [m, 4], one row per token: index of the table, depth, accepted (0 or 1), alpha.
    """
    lines = []
    for number, table in enumerate(tables):
        row_by_position = {int(position): i for i, position in enumerate(table.positions)}
        alpha = table.values[rule]
        for step in drafts.get(table.trajectory_id, ()):
            row = row_by_position.get(step.position)
            if row is None:
                continue
            for depth in range(min(step.num_accepted + 1, len(step.tokens), alpha.shape[1])):
                if not np.isnan(alpha[row, depth]):
                    lines.append((number, depth + 1, step.num_accepted > depth, alpha[row, depth]))
    return np.array(lines, dtype=float).reshape(-1, 4)


def staleness_metrics(lines: np.ndarray) -> dict[str, Value]:
    """Compare what the engine accepted of its drafts with what the newest version would have accepted.

    The values are exact only at depth 1. At greater depths the engine's drafts attend to keys of depth 1, but
    the trainer's attend to keys of the same depth, so the drafts differ slightly. There only the change over
    a run is meaningful.

    Args:
        lines: [m, 4], the result of `verified`.
    Returns:
        The metrics; {} without a draft token of depth 1. A single trajectory has no staleness_se.
    """
    first = lines[lines[:, 1] == 1]
    if not len(first):
        return {}

    gap, error = _gap(first)
    metrics: dict[str, Value] = {
        "probe/visited/observed_rate": Ratio(first[:, 2].sum(), len(first)),
        "probe/visited/current_rate": Ratio(first[:, 3].sum(), len(first)),
        "probe/staleness": Last(gap),
    }
    if not isnan(error):
        metrics["probe/staleness_se"] = Last(error)

    by_depth = {f"depth_{depth:.0f}": lines[lines[:, 1] == depth] for depth in np.unique(lines[:, 1])}
    for label, chosen in ({"overall": lines} | by_depth).items():
        gap, error = _gap(chosen)
        metrics[f"probe/staleness/{label}"] = Last(gap)
        if not isnan(error):
            metrics[f"probe/staleness_se/{label}"] = Last(error)
    return metrics


def _gap(lines: np.ndarray) -> tuple[float, float]:
    """Return observed minus expected acceptance of verified drafts, and its error clustered by trajectory."""
    gaps = lines[:, 2] - lines[:, 3]
    return float(gaps.mean()), clustered_error(gaps, lines[:, 0]) / len(lines)


def read_probes(run_dir: Path) -> list[tuple[dict[str, Any], list[ProbeTable]]]:
    """Read the head and tables of every probe of a run. The first head["fixed"] tables are fixed contexts."""
    probes = []
    for _, file in step_files(run_dir / FOLDER):
        lines, _ = read_jsonl(file)
        if lines and "version" in lines[0]:
            probes.append((lines[0], [ProbeTable.from_json(item) for item in lines[1:]]))
    return probes


def _columns(tables: Sequence[ProbeTable], name: str) -> list[np.ndarray]:
    """Join a column over all contexts; return an array [n] for each depth."""
    filled = [table.values[name] for table in tables if len(table.positions)]
    return list(np.concatenate(filled).T) if filled else []


def _plain(column: np.ndarray) -> list[list[float | None]]:
    return [[None if x != x else round(x, DIGITS) for x in row] for row in column.tolist()]


def _trajectory(item: Mapping[str, Any]) -> Trajectory:
    """Read the inputs of a probe from a record: the tokens, and which of them were sampled."""
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
