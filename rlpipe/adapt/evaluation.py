"""Acceptance of a draft on every held-out set, expected and in generation.

Owns the figures and their file, evaluations/step_N.json:

    step, gamma, temperature
    domains.NAME.in_domain
    domains.NAME.expected.MODE    expected counts by prompt on recorded rollouts (see `expectation`)
    domains.NAME.overlap          mean of sum min(p, q) by depth on these rollouts
    domains.NAME.played.MODE      counts by prompt (see `estimates.PromptCounts`), tokens and busy seconds
    domains.NAME.teacher_forced   on the trajectories of the first mode that samples drafts from q: alpha by
                                  depth, and the engine's counts that the visit recursion predicts

Prediction and observation refer to the same sequences and the same figure (tokens that a verify step emits
within turns), so they can be compared to within about a percent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.adapt.domains import Domain
from rlpipe.adapt.estimates import (
    TOKENS,
    AnyCounts,
    ExpectedCounts,
    PromptCounts,
    count,
    counts_from_json,
    difference,
    estimate,
    expected_figures,
    figures,
    to_json,
)
from rlpipe.adapt.expectation import ACCEPT, Table, expected_counts, mean_overlap
from rlpipe.adapt.generation import DomainRollouts, OnEvent, generate_domains
from rlpipe.config.run import Config
from rlpipe.config.spec import SpecMode
from rlpipe.metrics.values import Last, Ratio, Value
from rlpipe.types import Trajectory

if TYPE_CHECKING:
    from rlpipe.drafts.loss.stats import MtpStats

TeacherForced = Callable[[Sequence[Trajectory]], "MtpStats"]
FROM_Q = (SpecMode.REJECTION.value, SpecMode.BLOCK.value)  # modes that sample their drafts


@dataclass(slots=True, kw_only=True)
class ModeCounts:
    """Counts of a domain under one mode. tokens: generated tokens. seconds: time the engine was busy."""

    counts: dict[str, PromptCounts]
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per busy second; the time includes prefill, and pauses of episodes."""
        return self.tokens / self.seconds if self.seconds else float("nan")


@dataclass(slots=True, kw_only=True)
class DomainEvaluation:
    """Figures of one domain.

    in_domain: whether its kind is trained on. expected: expected counts by verification mode and prompt.
    overlap: mean of sum min(p, q) by depth. Both are empty if they are not computed. by_mode: counts of
    generation by mode, empty without generation. teacher_forced: statistics on the generated tokens, see the
    module's docstring.
    """

    in_domain: bool
    expected: dict[str, dict[str, ExpectedCounts]] = field(default_factory=dict)
    overlap: list[float | None] = field(default_factory=list)
    by_mode: dict[str, ModeCounts] = field(default_factory=dict)
    teacher_forced: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """Figures of the draft after `step` steps, by name of the domain."""

    step: int
    gamma: int
    temperature: float
    domains: dict[str, DomainEvaluation] = field(default_factory=dict)

    def counts(self, domain: str, mode: str) -> dict[str, PromptCounts]:
        """Return the counts of a domain and mode, by prompt."""
        return self.domains[domain].by_mode[mode].counts

    def metrics(self) -> dict[str, Value]:
        """Return the metrics of this evaluation under flat names, `adapt/...`."""
        values: dict[str, Value] = {}
        for name, domain in self.domains.items():
            for mode, counts in domain.expected.items():
                for figure in expected_figures(self.gamma):
                    key = f"adapt/{name}/{mode}/expected/{figure}"
                    fractions = [prompt.fraction(figure) for prompt in counts.values()]
                    values[key] = Ratio(sum(n for n, _ in fractions), sum(d for _, d in fractions))
                    if "/" not in figure:
                        values[f"{key}_se"] = Last(estimate(counts, figure).se if len(counts) > 1 else None)

            for mode, generated in domain.by_mode.items():
                prefix = f"adapt/{name}/{mode}"
                for figure in figures(self.gamma):
                    fractions = [prompt.fraction(figure) for prompt in generated.counts.values()]
                    values[f"{prefix}/{figure}"] = Ratio(
                        sum(n for n, _ in fractions), sum(d for _, d in fractions)
                    )

                    # Rates by depth are reported without an error.
                    if "/" not in figure:
                        error = estimate(generated.counts, figure).se if len(generated.counts) > 1 else None
                        values[f"{prefix}/{figure}_se"] = Last(error)
                values[f"{prefix}/tokens_per_s"] = Ratio(generated.tokens, generated.seconds)

            forced = domain.teacher_forced
            for depth, alpha in enumerate(domain.overlap or forced.get("alpha", []), 1):
                values[f"adapt/{name}/alpha/depth_{depth}"] = Last(alpha)
            if "predicted" in forced:
                values[f"adapt/{name}/predicted_tokens_per_step"] = Last(forced["predicted"])
        return values

    def lines(self) -> list[tuple[str, str]]:
        """Return each domain's name with its tokens per verify step by mode, with standard errors."""
        lines = []
        for name, domain in self.domains.items():
            by_mode: dict[str, AnyCounts] = {mode: one.counts for mode, one in domain.by_mode.items()}
            estimates = {mode: estimate(c, TOKENS) for mode, c in (by_mode | domain.expected).items() if c}
            texts = [f"{mode} {e.value:.2f} ± {e.se:.2f}" for mode, e in estimates.items()]
            lines.append((name, ", ".join(texts)))
        return lines

    def summary(self, against: Evaluation | None = None) -> dict[str, Any]:
        """Return figures with errors by domain and mode.

        against: an earlier evaluation; each figure is followed by its paired difference to it, except for a
        set that was added later.
        """
        return {
            name: {
                "in_domain": domain.in_domain,
                "expected": {mode: self._expected_rows(name, mode, against) for mode in domain.expected},
                "overlap": [_rounded(x) for x in domain.overlap],
                **{mode: self._rows(name, mode, against) for mode in domain.by_mode},
                "teacher_forced": domain.teacher_forced,
            }
            for name, domain in self.domains.items()
        }

    def _rows(self, name: str, mode: str, against: Evaluation | None) -> dict[str, Any]:
        """Return figures of generation as [value, error], with change and error since `against`."""
        generated = self.domains[name].by_mode[mode]
        rows: dict[str, Any] = {
            "prompts": len(generated.counts),
            "tokens_per_s": _rounded(generated.tokens_per_s),
        }
        for figure in figures(self.gamma):
            value = estimate(generated.counts, figure)
            rows[figure] = [_rounded(value.value), _rounded(value.se)]

            # If expectations are computed, the first evaluation does not generate.
            if against is not None and name in against.domains and mode in against.domains[name].by_mode:
                change = difference(generated.counts, against.counts(name, mode), figure)
                rows[figure] += [_rounded(change.value), _rounded(change.se)]
        return rows

    def _expected_rows(self, name: str, mode: str, against: Evaluation | None) -> dict[str, Any]:
        """Return expected figures in the form of `_rows`."""
        counts = self.domains[name].expected[mode]
        earlier = against.domains[name].expected.get(mode) if against and name in against.domains else None

        rows: dict[str, Any] = {"prompts": len(counts)}
        for figure in expected_figures(self.gamma):
            value = estimate(counts, figure)
            rows[figure] = [_rounded(value.value), _rounded(value.se)]
            if earlier:
                change = difference(counts, earlier, figure)
                rows[figure] += [_rounded(change.value), _rounded(change.se)]
        return rows

    def write(self, file: Path) -> None:
        """Write the file atomically."""
        domains: dict[str, Any] = {}
        for name, domain in self.domains.items():
            by_mode = {
                mode: {"tokens": g.tokens, "seconds": g.seconds, "counts": to_json(g.counts)}
                for mode, g in domain.by_mode.items()
            }
            domains[name] = {
                "in_domain": domain.in_domain,
                "expected": {
                    mode: {prompt: asdict(expected) for prompt, expected in counts.items()}
                    for mode, counts in domain.expected.items()
                },
                "overlap": domain.overlap,
                "played": by_mode,
                "teacher_forced": domain.teacher_forced,
            }
        data = {"step": self.step, "gamma": self.gamma, "temperature": self.temperature, "domains": domains}

        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(data))
        part.replace(file)

    @classmethod
    def read(cls, file: Path) -> Evaluation:
        """Read a file that `write` wrote."""
        data = json.loads(file.read_text())
        domains = {
            name: DomainEvaluation(
                in_domain=item["in_domain"],
                expected={
                    mode: {prompt: ExpectedCounts(**values) for prompt, values in counts.items()}
                    for mode, counts in item.get("expected", {}).items()
                },
                overlap=item.get("overlap", []),
                by_mode={
                    mode: ModeCounts(
                        counts=counts_from_json(p["counts"]), tokens=p["tokens"], seconds=p["seconds"]
                    )
                    for mode, p in item["played"].items()
                },
                teacher_forced=item["teacher_forced"],
            )
            for name, item in data["domains"].items()
        }
        return cls(step=data["step"], gamma=data["gamma"], temperature=data["temperature"], domains=domains)


def expect(
    config: Config,
    evaluation: DomainEvaluation,
    trajectories: Sequence[Trajectory],
    tables: Sequence[Table | None],
) -> None:
    """Fill in the expectations of a domain, for every mode of `adapt.eval_modes` that has them.

    trajectories: recorded from the target. tables: for each trajectory, the table of target and draft.
    """
    gamma = config.spec.gamma
    evaluation.overlap = mean_overlap(tables, gamma)
    for mode in config.adapt.eval_modes:
        if mode in ACCEPT:
            evaluation.expected[mode] = expected_counts(trajectories, tables, gamma=gamma, mode=mode)


def generate(
    config: Config,
    evaluations: Mapping[str, DomainEvaluation],
    domains: Sequence[Domain],
    *,
    weights: Mapping[str, Any] | None,
    teacher_force: TeacherForced,
    on_event: OnEvent,
) -> None:
    """Generate every domain with every mode of `adapt.eval_modes`, and score the tokens with the trainer.

    evaluations: by name of the domain; they are filled in. teacher_force: computes statistics of
    trajectories, with the same draft as in `weights`.
    """
    for mode in config.adapt.eval_modes:
        rollouts = generate_domains(config, domains, SpecMode(mode), weights=weights, on_event=on_event)
        for name, generated in rollouts.items():
            domain, counts = evaluations[name], count(generated.trajectories)
            domain.by_mode[mode] = ModeCounts(
                counts=counts, tokens=generated.tokens, seconds=generated.seconds
            )

            # Also score the first mode that samples drafts from q.
            if mode in FROM_Q and not domain.teacher_forced:
                domain.teacher_forced = _teacher_forced(
                    config, mode, generated, counts=counts, teacher_force=teacher_force
                )


def _teacher_forced(
    config: Config,
    mode: str,
    generated: DomainRollouts,
    *,
    counts: Mapping[str, PromptCounts],
    teacher_force: TeacherForced,
) -> dict[str, Any]:
    """Score generated tokens; under rejection with equal draft lengths, also predict tokens per step."""
    counted = [t for t in generated.trajectories if t.instance_id in counts]
    if not counted:
        return {}

    stats = teacher_force(counted)
    row: dict[str, Any] = {
        name: [_rounded(x) for x in (getattr(stats, name) / stats.count).tolist()]
        for name in ("alpha", "kl", "draft_entropy", "target_entropy", "top1")
    }
    row["mode"] = mode
    if len(stats.count) == config.spec.gamma and mode == SpecMode.REJECTION.value:
        row["predicted"] = _rounded(float(stats.emitted / stats.verify_steps))
        row["observed"] = _rounded(estimate(counts, TOKENS).value)
    return row


def _rounded(value: float | None) -> float | None:
    return None if value is None or isnan(value) else round(value, 5)
