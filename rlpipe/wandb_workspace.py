"""python -m rlpipe.wandb_workspace RUN [RUN...]: a W&B workspace and report about acceptance. No torch.

Always writes the spec as JSON first; then sends it to W&B when logged in. Later, or from a machine that has
the login but not the runs, `--spec FILE` sends a spec that was written before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpipe.metrics.sinks import default_entity, logged_in
from rlpipe.report.write import load_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rlpipe.wandb_workspace",
        description="Make a W&B workspace and report about acceptance and entropy.",
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--spec", type=Path, help="send this spec file instead of making one of runs")
    parser.add_argument("--entity", default="", help="W&B user or team (the default one of the login)")
    parser.add_argument("--project", default="", help="W&B project (that of the runs)")
    parser.add_argument(
        "--out", type=Path, help="spec file (wandb_workspace.json in the first run's directory)"
    )
    parser.add_argument("--offline", action="store_true", help="write the spec only")
    given = parser.parse_args(arguments)
    try:
        return _make(given)
    except (ValueError, OSError) as error:
        print(f"rlpipe.wandb_workspace: {error}", file=sys.stderr)
        return 2


def _make(given: argparse.Namespace) -> int:
    from rlpipe.report import workspace

    if bool(given.runs) == bool(given.spec):
        raise ValueError("name run directories to make a spec of, or --spec FILE to send one.")
    if given.spec:
        out = given.spec
        spec = json.loads(out.read_text())
    else:
        spec = workspace.make_spec(load_runs(given.runs), project=given.project)
        out = given.out or given.runs[0] / workspace.NAME
        workspace.write_spec(spec, out)
        print(f"spec: {out}")
    if given.offline or not logged_in():
        print(
            "not sent: after `wandb login` and `wandb sync` of the runs, "
            f"python -m rlpipe.wandb_workspace --spec {out} creates it."
        )
        return 0
    return _send(spec | {"entity": given.entity or spec["entity"]}, out)


def _send(spec: dict[str, Any], out: Path) -> int:
    """Create what a spec says; when the server refuses or cannot be reached, the spec can be sent again."""
    from rlpipe.report import workspace

    try:
        spec["entity"] = spec["entity"] or default_entity()
        addresses = workspace.apply(spec)
    except Exception as error:  # what wandb, its HTTP client and the server raise has no common class
        print(
            f"rlpipe.wandb_workspace: W&B did not take it ({type(error).__name__}: {str(error)[:300]}). "
            f"Try again: python -m rlpipe.wandb_workspace --spec {out}",
            file=sys.stderr,
        )
        return 1
    print("\n".join(f"created: {address}" for address in addresses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
