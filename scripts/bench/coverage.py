"""How often do the intervals of a run's split of acceptance cover the truth, in cases where it is known?

    python scripts/bench/coverage.py --json scripts/bench/results/coverage.json

Every case is sampled `--draws` times and goes through `AcceptanceSplit` as a run does: values step by step,
and probes of fixed contexts every twentieth step. The nominal level is .95. `rest` is the part of the change
that a given slope does not explain. `total`, `mismatch` and `contexts` are the parts published as metrics;
their intervals hold for either slope. If the early steps do not determine a slope, the case counts under
`no slope between steps`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlpipe.diagnosis.acceptance_split import SECOND_ENTROPY, STEP, AcceptanceSplit
from rlpipe.diagnosis.decomposition import ENTROPY, RATE
from rlpipe.diagnosis.probe import COLUMNS, ProbeTable

STEPS, EARLY, SIGMA, WOBBLE = 120, 20, 0.01, 0.06
PROBES, TRAJECTORIES, CONTEXTS = 20, 24, 16  # steps between probes; contexts, from TRAJECTORIES
WITHIN, CONTEXT_SIGMA = -0.3, 0.05
DEPTH_1 = f"{RATE}/depth_1"
CASES = {  # correlation of residuals, noise of the entropy in its standard deviations, slope between prompts
    "white": (0.0, 0.0, -0.3),
    "correlated .45": (0.45, 0.0, -0.3),
    "correlated .8": (0.8, 0.0, -0.3),
    "noisy entropy": (0.0, 1.0, -0.3),
    "prompt slope unlike training slope": (0.0, 0.0, -1.2),
    "unlike slopes, correlated .45": (0.45, 0.0, -1.2),
    "unlike slopes, noisy entropy": (0.0, 1.0, -1.2),
}


def correlated(rng: np.random.Generator, correlation: float, n: int) -> np.ndarray:
    """Sample n values of an AR(1) process with unit variance."""
    series = rng.standard_normal(n)
    for t in range(1, n):
        series[t] = correlation * series[t - 1] + np.sqrt(1 - correlation**2) * series[t]
    return series


def fixed_contexts(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sample a probe's entropy and acceptance [TRAJECTORIES, CONTEXTS], with slope WITHIN over contexts."""
    size = TRAJECTORIES, CONTEXTS
    entropy = 0.9 + 0.3 * rng.standard_normal((TRAJECTORIES, 1)) + 0.4 * rng.standard_normal(size)
    noise = CONTEXT_SIGMA * (rng.standard_normal((TRAJECTORIES, 1)) + rng.standard_normal(size))
    return entropy, 0.9 + WITHIN * entropy + noise


def tables(entropy: np.ndarray, acceptance: np.ndarray) -> list[ProbeTable]:
    """Return the tables of a probe of depth 1."""
    found = []
    for number, (h, a) in enumerate(zip(entropy, acceptance, strict=True)):
        values = {name: np.full((len(h), 1), np.nan) for name in COLUMNS}
        values |= {"target_entropy": h[:, None], "rejection": a[:, None]}
        found.append(ProbeTable(trajectory_id=str(number), positions=np.arange(len(h)), values=values))
    return found


def coverage(name: str, draws: int, seed: int = 7, mismatch: float = 0.0) -> dict[str, float]:
    """Return, for each interval, the share of a case's samples in which it contains the truth.

    Training moves the entropy by -0.2 nat along a slope of -0.3; prompts move it from step to step along
    their own slope. mismatch: a change not caused by entropy, which begins after the early steps.
    """
    correlation, noise, between = CASES[name]
    rng = np.random.default_rng(seed)
    time = np.arange(STEPS) / STEPS
    trained = -0.2 * time
    drift = mismatch * np.clip(np.arange(STEPS) - EARLY, 0, None) / (STEPS - EARLY)
    hits: dict[str, list[bool]] = {}
    for _ in range(draws):
        prompts = WOBBLE * rng.standard_normal(STEPS)
        y = 0.9 + WITHIN * trained + between * prompts + drift + SIGMA * correlated(rng, correlation, STEPS)
        entropy, second = (
            0.9 + trained + prompts + noise * WOBBLE * rng.standard_normal(STEPS) for _ in range(2)
        )
        fixed_entropy, fixed_alpha = fixed_contexts(rng)

        split = AcceptanceSplit(early=EARLY, rule="rejection")
        for step in range(STEPS):
            if step % PROBES == 0 or step == STEPS - 1:
                moved = WITHIN * trained[step] + drift[step]
                split.probed(step + 1, tables(fixed_entropy + trained[step], fixed_alpha + moved))
            record = {STEP: step + 1, DEPTH_1: y[step], ENTROPY: entropy[step]}
            split.see(record | ({SECOND_ENTROPY: second[step]} if noise else {}))
        found = split.at(1)

        # Probes of the late steps, or the last two, against those of the early ones.
        late = slice(STEPS - split.window, STEPS)
        moved, drifted = (s[late].mean() - s[:EARLY].mean() for s in (trained, drift))
        probes = [s for s in range(STEPS) if s % PROBES == 0 or s == STEPS - 1]
        probed = drift[probes[-2:]].mean() - drift[[p for p in probes if p < EARLY]].mean()
        rest = found.rests
        hits.setdefault("no slope between steps", []).append("between steps" not in rest)
        seen = {}
        if "between steps" in rest:
            seen["slope between steps"] = found.slopes["between steps"].covers(between)
            seen["rest, between steps"] = rest["between steps"].covers(drifted + (WITHIN - between) * moved)
        seen |= {
            "slope within contexts": found.slopes["within contexts"].covers(WITHIN),
            "rest, within contexts": rest["within contexts"].covers(drifted),
            "total": found.parts["total"].covers(WITHIN * moved + drifted),
            "mismatch": found.parts["mismatch"].covers(probed),
            "contexts": found.parts["contexts"].covers(drifted - probed),
        }
        for key, value in seen.items():
            hits.setdefault(key, []).append(value)
    return {key: float(np.mean(value)) for key, value in hits.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases and write one JSON; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--json", type=Path, metavar="OUT")
    given = parser.parse_args(arguments)
    cases = {
        f"{name}{', with mismatch' if mismatch else ''}": coverage(name, given.draws, mismatch=mismatch)
        for name in CASES
        for mismatch in (0.0, -0.05)
    }
    lowest = min(v for case in cases.values() for k, v in case.items() if k != "no slope between steps")
    for name, case in cases.items():
        print(f"{name:50s}", "  ".join(f"{key} {value:.3f}" for key, value in case.items()))
    print(f"lowest {lowest:.4f}")
    if given.json:
        from harness import commit, write_result  # next to this file, which a test reads by its path

        report = {
            "commit": commit(),
            "command": "python scripts/bench/coverage.py " + " ".join(sys.argv[1:]),
            "draws": given.draws,
            "steps": STEPS,
            "early": EARLY,
            "nominal": 0.95,
            "lowest": lowest,
            "cases": cases,
        }
        write_result(given.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
