"""`--multirun`: every combination of the swept settings is a run, in a separate process and directory.

Hydra calls `main` for each job; `run_job` runs the job as `rlpipe run` would. If a job fails, the others
still run. Ctrl-C ends the sweep after the job in progress has saved its checkpoint.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rlpipe.config.paths import resolve
from rlpipe.report.table import runs_table
from rlpipe.report.write import write_report

COMPARISON = "compare.html"


@dataclass(slots=True, kw_only=True)
class Job:
    """A job that has ended. directory: its run directory. settings: "key=value" texts. status: exit code."""

    directory: Path
    settings: list[str]
    status: int


class Sweep:
    """The jobs of one `--multirun`, in order."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._root: Path | None = None  # run.dir of the first job, whose name contains the time

    def run_job(self, composed: DictConfig) -> int:
        """Run a job in a separate process; return its exit status."""
        hydra = HydraConfig.get()
        self._root = self._root or resolve(composed.run.dir)

        # Put all jobs below the first job's directory, since run.dir may contain the time.
        directory = self._root / str(hydra.job.num)
        composed.run.dir = str(directory)
        settings = list(hydra.overrides.task)
        print(f"rlpipe: job {hydra.job.num}: {' '.join(settings)} run.dir={directory}", flush=True)

        status = _in_a_process(OmegaConf.to_yaml(composed, resolve=True))
        self.jobs.append(Job(directory=directory, settings=settings, status=status))
        return status

    def finish(self) -> int:
        """Print the table of the jobs and write the report that compares them; return the exit status."""
        assert self._root is not None

        # In the table, name a job by the settings that differ between jobs.
        common = set.intersection(*(set(job.settings) for job in self.jobs))
        swept = {
            job.directory: " ".join(word for word in job.settings if word not in common) for job in self.jobs
        }

        print(runs_table(list(swept), swept))
        if recorded := [path for path in swept if (path / "metrics.jsonl").exists()]:
            write_report(recorded, self._root / COMPARISON)
            print(f"report: {self._root / COMPARISON}")

        failed = [job for job in self.jobs if job.status]
        for job in failed:
            setting = f" ({swept[job.directory]})" if swept[job.directory] else ""
            print(f"rlpipe: {job.directory}{setting} ended with status {job.status}", file=sys.stderr)

        return 1 if failed else 0


def _in_a_process(resolved: str) -> int:
    """Run a composed configuration in a child process; a signal is forwarded to it and ends the sweep."""
    stopped: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        process.send_signal(number)

    code = "import sys; from rlpipe.cli.run import run_composed; sys.exit(run_composed(sys.stdin.read()))"

    # Use a separate process group, so that Ctrl-C reaches the child only once, through `hand_on`.
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, text=True, process_group=0
    )

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process.communicate(resolved)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    if stopped:
        sys.exit(128 + stopped[0])

    return process.returncode
