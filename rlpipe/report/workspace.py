"""`rlpipe workspace RUN [RUN...]`: creates a W&B workspace and report on reward, acceptance and entropy.

Owns the choice of panels (Bebop Fig. 2, 3, 6, 7 and 8), the spec file and the command; the package
wandb-workspaces owns the schema, and sinks.py the login. Making a spec works offline: `make_spec` reads run
directories, and `write_spec` validates the spec by building W&B's objects from it and writes JSON. After a
login, `apply` creates workspace and report on the server. On a machine with a login but without the runs,
`--spec FILE` sends a spec that was written earlier.

The data of Fig. 3 is `acceptance_split/*`, which every run logs after its early phase.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlpipe.diagnosis.acceptance_split import PARTS
from rlpipe.diagnosis.decomposition import ENTROPY, LENGTH, RATE
from rlpipe.metrics.bus import STEP
from rlpipe.metrics.names import declared
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.sinks import default_entity, logged_in
from rlpipe.report.figures import STEP_PHASES
from rlpipe.report.write import load_runs

NAME = "wandb_workspace.json"
HELD_OUT = re.compile(r"val/([^/]+/)?reward")
STALE = "training/off_policy/trajectory_staleness"
PHASES = tuple(name for name, _, _ in STEP_PHASES)


def make_spec(runs: Sequence[RunData], *, entity: str = "", project: str = "") -> dict[str, Any]:
    """Return the spec of the workspace and the report, as JSON data.

    entity: if "", it is filled in before sending. project: if "", the project of the runs. Returns
    {"title", "entity", "project", "runs": [{"name", "id"}], "sections": [{"name", "runs", "panels"}]}; a
    panel is {"figure", "title", "x", "y"} with optional "points" or "area". A section's "runs" are the ids of
    the runs that it displays, or [] for all.

    Raises ValueError if the runs were logged to different projects.
    """
    projects = {(run.settings.get("metrics") or {}).get("wandb_project", "rlpipe") for run in runs}
    if not project and len(projects) > 1:
        raise ValueError(f"the runs are in different W&B projects {sorted(projects)}. Choose one: --project.")

    depths = sorted(
        {name for run in runs for name in run.names() if name.startswith(f"{RATE}/depth_")},
        key=lambda name: int(name.rpartition("_")[2]),
    )

    held_out = sorted({name for run in runs for name in run.names() if HELD_OUT.fullmatch(name)})

    sections = [
        {
            "name": "Training",
            "runs": [],
            "panels": [
                _panel("", "Training reward", ["critic/rewards/mean"]),
                *([_panel("", "Held-out reward", held_out)] if held_out else []),
                _panel("", "Staleness of trained trajectories", [f"{STALE}/mean", f"{STALE}/max"]),
                _panel("", "Engines against the newest weights", ["probe/staleness"]),
            ],
        },
        {
            "name": "Acceptance",
            "runs": [],
            "panels": [
                *(_panel("Fig. 2", f"Acceptance rate, depth {d.rpartition('_')[2]}", [d]) for d in depths),
                _panel("Fig. 6", "Acceptance length", [LENGTH]),
                _panel("Fig. 8", "Acceptance length against entropy", [LENGTH], x=ENTROPY, points=True),
                _panel("", "Entropy of the target", [ENTROPY]),
            ],
        },
        {
            "name": "Step latency",
            "runs": [],
            "panels": [
                _panel("Fig. 7", "Seconds per step", ["timing_s/step"]),
                _panel("Fig. 7", "Where a step's time goes", list(PHASES), area=True),
                _panel("", "Rollout tokens per second", ["perf/tokens_per_s/rollout"]),
                _panel("", "Utilisation", ["perf/utilisation/rollout", "perf/utilisation/trainer"]),
            ],
        },
    ]
    if why := [_panel("Fig. 3", title, names) for title, names in _split_panels(runs) if names]:
        sections.insert(2, {"name": "Why acceptance moved", "runs": [], "panels": why})

    return {
        "title": "Reward, acceptance and entropy",
        "entity": entity,
        "project": project or projects.pop(),
        "runs": [{"name": run.name, "id": run_id(run)} for run in runs],
        "sections": sections,
    }


def _split_panels(runs: Sequence[RunData]) -> Iterator[tuple[str, list[str]]]:
    """Yield (title, metrics) of the panels that split the change of acceptance, overall and by depth."""
    observed = {name for run in runs for name in run.names() if name.startswith("acceptance_split/total")}
    depths = sorted(int(name.rpartition("_")[2]) for name in observed if re.search(r"/depth_\d+$", name))
    seen = {name for run in runs for name in run.names()}
    for label, suffix in [("all depths", ""), *((f"depth {depth}", f"/depth_{depth}") for depth in depths)]:
        names = [f"acceptance_split/{part}{suffix}" for part in PARTS]
        yield f"Change of acceptance since the early phase, {label}", [n for n in names if n in seen]


def run_id(run: RunData) -> str:
    """Return the id of the run on W&B; "" if it was not logged there."""
    file = run.path / "wandb" / "run_id"
    return file.read_text().strip() if file.is_file() else ""


def write_spec(spec: dict[str, Any], path: Path) -> None:
    """Write the spec as JSON. Raises ValueError if it does not match the schema of wandb-workspaces."""
    build(spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec, indent=2) + "\n")


def export_spec(run_dir: Path, path: Path) -> None:
    """Write the spec of a run at its end, without a check that would need wandb-workspaces."""
    path.write_text(json.dumps(make_spec(load_runs([run_dir])), indent=2) + "\n")


def apply(spec: dict[str, Any]) -> list[str]:
    """Create the workspace and the report on the server; needs a login. Returns their URLs."""
    workspace, report = build(spec)
    workspace.save()
    report.save()
    return [workspace.url, report.url]


def build(spec: dict[str, Any]) -> tuple[Any, Any]:
    """Build W&B's Workspace and Report from a spec, without saving them.

    Raises ValueError if wandb-workspaces is missing or the spec does not match its schema (pydantic's
    ValidationError is a ValueError).
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise ValueError('this needs wandb-workspaces: pip install -e ".[dashboards]".') from error

    entity, project = spec["entity"], spec["project"]

    # The workspace shows every run, so it omits sections about a single run; only the report has them.
    workspace = workspaces.Workspace(
        entity=entity,
        project=project,
        name=spec["title"],
        sections=[
            workspaces.Section(
                name=section["name"],
                panels=[_built(panel, reports) for panel in section["panels"]],
                is_open=True,
            )
            for section in spec["sections"]
            if not section["runs"]
        ],
    )

    # Each section of the report has a filter of runs, so that a section can be about a single run.
    blocks: list[Any] = [reports.TableOfContents()]
    for section in spec["sections"]:
        filters = f"ID in {json.dumps(section['runs'])}" if section["runs"] else ""
        runset = reports.Runset(entity=entity, project=project, name=section["name"], filters=filters)

        panels = [_built(panel, reports) for panel in section["panels"]]
        blocks += [reports.H2(section["name"]), reports.PanelGrid(runsets=[runset], panels=panels)]

    report = reports.Report(entity=entity, project=project, title=spec["title"], blocks=blocks, width="fluid")
    return workspace, report


def _panel(figure: str, title: str, y: list[str], *, x: str = STEP, **more: object) -> dict[str, Any]:
    for name in (*y, x):
        declared(name)  # raises ValueError for a metric that no run logs
    return {"figure": figure, "title": f"{figure}: {title}" if figure else title, "x": x, "y": y, **more}


def _built(panel: dict[str, Any], reports: Any) -> Any:
    options: dict[str, Any] = {}
    if panel.get("points"):
        options["line_marks"] = dict.fromkeys(panel["y"], "points")
    if panel.get("area"):
        options["plot_type"] = "stacked-area"
    return reports.LinePlot(title=panel["title"], x=panel["x"], y=panel["y"], **options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="rlpipe workspace",
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
    options = parser.parse_args(arguments)

    try:
        return _make(options)
    except (ValueError, OSError) as error:
        print(f"rlpipe workspace: {error}", file=sys.stderr)
        return 2


def _make(options: argparse.Namespace) -> int:
    """Write or read a spec; if logged in, create it on W&B. Return the exit status."""
    if bool(options.runs) == bool(options.spec):
        raise ValueError("name run directories to make a spec of, or --spec FILE to send one.")

    if options.spec:
        out = options.spec
        spec = json.loads(out.read_text())
    else:
        spec = make_spec(load_runs(options.runs), project=options.project)
        out = options.out or options.runs[0] / NAME
        write_spec(spec, out)
        print(f"spec: {out}")

    # Without a login the spec is still useful: it can be sent later from another machine.
    if options.offline or not logged_in():
        print(
            "not sent: after `wandb login` and `wandb sync` of the runs, "
            f"rlpipe workspace --spec {out} creates it."
        )
        return 0

    return _send(spec | {"entity": options.entity or spec["entity"]}, out)


def _send(spec: dict[str, Any], out: Path) -> int:
    """Create the workspace and the report on W&B; after a failure, print how to send the spec again."""
    try:
        spec["entity"] = spec["entity"] or default_entity()
        addresses = apply(spec)
    except Exception as error:  # errors of wandb, its HTTP client and the server have no common class
        print(
            f"rlpipe workspace: W&B did not take it ({type(error).__name__}: {str(error)[:300]}). "
            f"Try again: rlpipe workspace --spec {out}",
            file=sys.stderr,
        )
        return 1

    print("\n".join(f"created: {address}" for address in addresses))
    return 0
