"""`rlpipe analyse RUN [RUN...]`: prints the summary at the top of a run's report as text.

--json    prints every statistic of acceptance and the advice instead
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlpipe.diagnosis.acceptance_split import of_run
from rlpipe.diagnosis.advice import Setup, advise_run
from rlpipe.diagnosis.breakdown import (
    acceptance_by,
    boundary,
    distributions,
    entropy_slope,
    lengths,
    speedups,
    verified_drafts,
)
from rlpipe.diagnosis.comparison import compare_runs
from rlpipe.diagnosis.decomposition import RATE, Decomposition
from rlpipe.diagnosis.fixed_contexts import decompose_fixed
from rlpipe.diagnosis.probe import read_probes
from rlpipe.diagnosis.seeds import name_by_settings
from rlpipe.diagnosis.summary import summarize
from rlpipe.metrics.rollouts import read_rollouts
from rlpipe.metrics.runs import RunData, load_run
from rlpipe.metrics.statistics import Estimate


def analyse(run: RunData) -> dict[str, Any]:
    """Compute every statistic of acceptance of one run, as plain data."""
    records = list(read_rollouts(run.path))
    drafts = verified_drafts(run, records)
    probes = read_probes(run.path)
    setup = Setup.from_settings(run.settings)
    splits = of_run(run)

    return {
        "run": run.name,
        "mode": setup.mode,
        "by": {
            key: [asdict(cut) for cut in acceptance_by(drafts, key)]
            for key in ("depth", "position", "turn", "kind", "entropy")
        },
        "length": {
            name: _plain(value) if isinstance(value, Estimate) else value
            for name, value in lengths(records).items()
        },
        "speedup": speedups(run, setup.draft_cost),
        "entropy_slope": _plain(entropy_slope(run)),
        "rate_slope": _plain(entropy_slope(run, RATE)),
        # Use the fixed contexts of the last probe, which show the state at the end of the run.
        "boundary": boundary(probes[-1][1][: probes[-1][0]["fixed"]]) if probes else [],
        "distributions": distributions(run),
        "split": {
            f"depth {depth}" if depth else "overall": asdict(split)
            for depth in splits.depths
            if (split := splits.at(depth))
        },
        "fixed_contexts": {
            f"{rule}/{'overall' if depth is None else f'depth {depth}'}": _parts(changes[-1])
            for (rule, depth), changes in decompose_fixed(run).items()
        },
        "advice": advise_run(run),
    }


def _parts(change: Decomposition) -> dict[str, Any]:
    return {name: _plain(getattr(change, name)) for name in ("slope", "total", "entropy", "mismatch")}


def _plain(estimate: Estimate | None) -> dict[str, float] | None:
    if estimate is None:
        return None
    return {name: getattr(estimate, name) for name in ("value", "low", "high", "level")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="rlpipe analyse", description="What came out of a run, why, and what to change."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--json", action="store_true", help="print every statistic of acceptance instead")
    arguments = parser.parse_args(argv)

    # A wrong path is the caller's mistake, so print one line without a traceback.
    try:
        runs = [load_run(path) for path in arguments.runs]
        name_by_settings(runs)
    except ValueError as error:
        print(f"rlpipe analyse: {error}", file=sys.stderr)
        return 2

    if arguments.json:
        print(json.dumps([analyse(run) for run in runs], indent=1))
    else:
        if len(runs) > 1:
            print(compare_runs(runs).text(), end="\n\n")
        print("\n\n".join(f"{run.name} ({run.outcome})\n{summarize(run).text()}" for run in runs))
    return 0
