"""python -m rlpipe.wandb_workspace RUN [RUN...]: a W&B workspace and report about acceptance. No torch.

Always writes the spec as JSON; sends it to W&B when logged in, or later with the same command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlpipe.metrics.report import load_runs
from rlpipe.metrics.sinks import default_entity, logged_in


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rlpipe.wandb_workspace",
        description="Make a W&B workspace and report about acceptance and entropy.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
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
    from rlpipe.metrics import workspace

    online = logged_in() and not given.offline
    entity = given.entity or (default_entity() if online else "")
    spec = workspace.make_spec(load_runs(given.runs), entity=entity, project=given.project)
    out = given.out or given.runs[0] / workspace.NAME
    workspace.write_spec(spec, out)
    print(f"spec: {out}")
    if online:
        print("\n".join(f"created: {address}" for address in workspace.apply(spec)))
    else:
        print("not sent: after `wandb login` and `wandb sync` of the runs, the same command creates it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
