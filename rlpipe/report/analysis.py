"""python -m rlpipe.report.analysis RUN [RUN...]: the statistics of acceptance and the advice, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlpipe.acceptance.cuts import (
    acceptance_by,
    boundary,
    distributions,
    entropy_slope,
    judged_drafts,
    lengths,
    speedups,
)
from rlpipe.acceptance.decomposition import RATE, decompose_run
from rlpipe.acceptance.fixed_contexts import attribute_run, decompose_fixed
from rlpipe.acceptance.probe import read_probes
from rlpipe.acceptance.regression import Estimate
from rlpipe.metrics.rollouts import read_rollouts
from rlpipe.metrics.runs import RunData, load_run
from rlpipe.watch.advice import Setup, advise


def analyse(run: RunData) -> dict[str, Any]:
    """Every statistic of acceptance of one run, as plain data."""
    records = list(read_rollouts(run.path))
    drafts = judged_drafts(run, records)
    probes = read_probes(run.path)
    cuts = {key: acceptance_by(drafts, key) for key in ("depth", "position", "turn", "kind", "entropy")}
    setup = Setup.of(run.settings)
    parts = ("slope", "total", "entropy", "mismatch")
    attributed = attribute_run(run)
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


if __name__ == "__main__":
    print(json.dumps([analyse(load_run(Path(name))) for name in sys.argv[1:]], indent=1))
