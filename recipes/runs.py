"""Helpers shared by the studies: start a run unless it is complete, read its records, and make figures."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

if TYPE_CHECKING:
    from rlpipe.metrics.statistics import Estimate


def play(recipe: str, directory: Path, *overrides: str, afresh: bool = False) -> Path:
    """Run `rlpipe run +recipe=RECIPE`, unless that run has finished successfully; return its directory.

    An interrupted run continues or, with afresh, starts again. Raises CalledProcessError.
    """
    events = directory / "events.jsonl"
    if not (events.is_file() and '"outcome": "done"' in events.read_text()):
        if afresh:
            shutil.rmtree(directory, ignore_errors=True)
        command = [sys.executable, "-m", "rlpipe.run", f"+recipe={recipe}", f"run.dir={directory}"]
        subprocess.run([*command, *overrides], check=True)
    return directory


def records(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all lines of a run's metrics.jsonl, and the lines of training steps."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return lines, [line for line in lines if "timing_s/step" in line]


def validation(lines: list[dict[str, Any]], name: str = "val") -> list[list[float]]:
    """Return [step, reward, standard error] for each line in which NAME/reward was measured."""
    found = [line for line in lines if f"{name}/reward" in line]
    return [
        [line["training/global_step"], round(line[f"{name}/reward"], 4), round(line[f"{name}/reward_se"], 4)]
        for line in found
    ]


def by_step(steps: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return reward of training batches, entropy and acceptance length by training step."""
    return {
        "train_reward": [round(r["critic/rewards/mean"], 4) for r in steps],
        "entropy": [round(r["rollout/entropy"], 4) for r in steps],
        "acceptance_length": [round(r["spec/acceptance_length"], 3) for r in steps],
    }


def over_seeds(values: Sequence[float]) -> Estimate:
    """Estimate the mean of one value per seed, with Student's 95% interval (nan for a single seed)."""
    from rlpipe.metrics.statistics import Estimate  # imported here: most studies only need rlpipe's command

    count = len(values)
    error = statistics.stdev(values) / count**0.5 if count > 1 else math.nan
    return Estimate(value=statistics.fmean(values), se=error, df=max(1, count - 1))


def rounded_over_seeds(values: Iterable[SupportsFloat]) -> list[float]:
    """Return mean, low and high end of `over_seeds`, to four decimals as studies write them."""
    one = over_seeds([float(value) for value in values])
    return [round(x, 4) for x in (one.value, one.interval.low, one.interval.high)]


def as_text(estimate: Sequence[float] | None) -> str:
    """Format a mean with the ends of its interval; a dash for None."""
    return "–" if estimate is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*estimate)


def seeds_to_decide(values: Sequence[float], most: int = 200) -> int | None:
    """Return how many seeds with this mean and spread have an interval that excludes 0; None above `most`.

    >>> seeds_to_decide([1.0, 2.0, 3.0])
    4
    """
    from rlpipe.metrics.statistics import Estimate

    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    for count in range(2, most + 1):
        one = Estimate(value=mean, se=deviation / count**0.5, df=count - 1)
        if one.low > 0 or one.high < 0:
            return count
    return None


def choose_rate(tried: Mapping[float, float]) -> dict[str, Any]:
    """Return the learning rate with the largest value, and whether it is the smallest or largest tried."""
    best = max(tried, key=tried.__getitem__)
    sweep = {f"{lr:g}": round(value, 4) for lr, value in tried.items()}
    return {"lr": best, "edge": best in (min(tried), max(tried)), "sweep": sweep}


def kept(file: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a JSON file. If the file is absent, compute and write it, so studies resume."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(compute()) + "\n")
    return json.loads(file.read_text())


def save(figure: Any, out: Path, fontsize: int) -> None:
    """Save a matplotlib figure with grids and legends; the bytes are reproducible."""
    for axis in figure.axes:
        legend(axis, fontsize=fontsize)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def legend(axis: Any, to: Any = None, **settings: Any) -> None:
    """Draw a legend on axis `to`, in which each label of `axis` occurs once even if many lines have it."""
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    (to or axis).legend(handles.values(), handles.keys(), **settings)
