"""The Grafana dashboard of the metrics that the Prometheus endpoint serves.

Owns the dashboard file: each chart of the TensorBoard layout is a panel that queries
`{__name__=~"rlpipe_..."}`. Import the file in Grafana (Dashboards, New, Import) and choose the Prometheus
server that scrapes the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlpipe.metrics.tensorboard import LAYOUT

NAME = "grafana.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
HEIGHT, WIDTH = 8, 12  # size of a panel, in Grafana's grid of 24 columns


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON model: a row per category, a panel per chart."""
    panels: list[dict[str, Any]] = []
    y = 0
    for category, charts in LAYOUT.items():
        place = {"x": 0, "y": y, "w": 2 * WIDTH, "h": 1}
        panels.append({"type": "row", "title": category, "gridPos": place, "panels": []})
        for n, (title, (_, tags)) in enumerate(charts.items()):
            place = {"x": WIDTH * (n % 2), "y": y + 1 + HEIGHT * (n // 2), "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(title, tags, place))
        y += 1 + HEIGHT * ((len(charts) + 1) // 2)

    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "rlpipe",
        "uid": None,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source]},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, 1)],
    }


def write_dashboard(path: Path) -> None:
    """Write the dashboard to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dashboard(), indent=1) + "\n")


def _panel(title: str, tags: list[str], place: dict[str, int]) -> dict[str, Any]:
    """Return a time series panel of the metrics that match `tags`. place: its position in the grid."""
    targets = [
        {
            "refId": chr(ord("A") + n),
            "datasource": SOURCE,
            "expr": f'{{__name__=~"{_names(tag)}"}}',
            "legendFormat": "{{__name__}}",
        }
        for n, tag in enumerate(tags)
    ]
    return {
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"custom": {"lineWidth": 2, "spanNulls": True}}, "overrides": []},
    }


def _names(tag: str) -> str:
    r"""Convert a regular expression of TensorBoard tags to one of Prometheus gauges.

    Prometheus anchors it and reads it from a quoted string, so the result has no ^, $ or backslash.

    >>> _names(r"^spec/acceptance_rate/depth_\d+$"), _names("^val/([^/]+/)?reward$")
    ('rlpipe_spec_acceptance_rate_depth_[0-9]+', 'rlpipe_val_(.+_)?reward')
    """
    expression = tag.strip("^$").replace("[^/]+", ".+").replace(r"\d", "[0-9]")
    return "rlpipe_" + expression.replace("/", "_")
