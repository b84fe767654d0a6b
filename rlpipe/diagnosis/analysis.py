"""`rlpipe analyse RUN [RUN...]`: the summary of a run in words, as at the top of its report.

--json    instead, every statistic of acceptance and the advice
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlpipe.diagnosis.advice import Setup, advise
from rlpipe.diagnosis.breakdown import (
    acceptance_by,
    boundary,
    distributions,
    entropy_slope,
    lengths,
    speedups,
    verified_drafts,
)
from rlpipe.diagnosis.decomposition import RATE, decompose_run
from rlpipe.diagnosis.fixed_contexts import attribute_run, decompose_fixed
from rlpipe.diagnosis.probe import read_probes
from rlpipe.diagnosis.summary import summarize
from rlpipe.diagnosis.two_slopes import split_run
from rlpipe.metrics.rollouts import read_rollouts
from rlpipe.metrics.runs import RunData, load_run
from rlpipe.metrics.statistics import Estimate


def analyse(run: RunData) -> dict[str, Any]:
    """Every statistic of acceptance of one run, as plain data."""
    records = list(read_rollouts(run.path))
    drafts = verified_drafts(run, records)
    probes = read_probes(run.path)
    cuts = {key: acceptance_by(drafts, key) for key in ("depth", "position", "turn", "kind", "entropy")}
    setup = Setup.of(run.settings)
    parts = ("slope", "total", "entropy", "mismatch")
    attributed, splits = attribute_run(run), split_run(run)
    return {
        "run": run.name,
        "mode": setup.mode,
        "by": {key: [asdict(cut) for cut in found] for key, found in cuts.items()},
        "length": {k: _plain(v) for k, v in lengths(records).items()},
        "speedup": speedups(run, setup.draft_cost),
        "entropy_slope": _plain(entropy_slope(run)),
        "rate_slope": _plain(entropy_slope(run, RATE)),
        "boundary": boundary(probes[-1][1][: probes[-1][0]["fixed"]]) if probes else [],
        "distributions": distributions(run),
        "decomposition": {
            label: {part: _plain(getattr(d, part)) for part in parts}
            for label, d in decompose_run(run).items()
        },
        "splits": None if splits is None else asdict(splits),
        "fixed_contexts": {
            f"{rule}/{'overall' if depth is None else f'depth {depth}'}": {
                part: _plain(getattr(found[-1], part)) for part in parts
            }
            for (rule, depth), found in decompose_fixed(run).items()
        },
        "attribution": {}
        if attributed is None
        else {name: _plain(x) for name, x in (("total", attributed.total), *attributed.parts().items())},
        "advice": advise(setup, run.records),
    }


def _plain(value: Estimate | float | None) -> Any:
    if not isinstance(value, Estimate):
        return value
    return {"value": value.value, "low": value.low, "high": value.high, "level": value.level}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="rlpipe analyse", description="What came out of a run, why, and what to change."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--json", action="store_true", help="print every statistic of acceptance instead")
    given = parser.parse_args(arguments)
    try:
        runs = [load_run(path) for path in given.runs]
    except ValueError as error:
        print(f"rlpipe analyse: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps([analyse(run) for run in runs], indent=1))
    else:
        print("\n\n".join(f"{run.name} ({run.outcome})\n{summarize(run).text()}" for run in runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
