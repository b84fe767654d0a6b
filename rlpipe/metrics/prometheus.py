"""The Prometheus endpoint: http://HOST:PORT/metrics has the newest value of every metric.

Owns the server and the names: `spec/acceptance_length` is the gauge `rlpipe_spec_acceptance_length`, its
help text the declaration. A value stays until a newer one comes, so validation is there between two
validations. Events are counted by kind and level. A scrape reads what is in memory and never waits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlpipe.metrics.bus import STEP
from rlpipe.metrics.grafana import write_dashboard
from rlpipe.metrics.names import declared


class PrometheusSink:
    """host, port: the address of the endpoint; with port 0 a free one is used, which `port` then holds.

    dashboard: file for Grafana's dashboard of these metrics; None for none.
    """

    name = "prometheus"

    def __init__(self, host: str, port: int, *, dashboard: Path | None = None) -> None:
        self.port = port
        self._dashboard = dashboard
        self._host = host
        self._values: dict[str, Any] = {}
        self._events: Counter[tuple[str, str]] = Counter()
        self._server: Any = None
        self._thread: Any = None

    def open(self) -> None:
        """Start to serve.

        Raises ValueError when prometheus_client is missing, OSError when the port is taken.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ValueError(
                'metrics.prometheus_port needs prometheus_client: pip install -e ".[dashboards]".'
            ) from error
        if self._dashboard is not None:
            write_dashboard(self._dashboard)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = start_http_server(self.port, self._host, registry)
        self.port = self._server.server_port

    def record(self, record: dict[str, Any]) -> None:
        """Replace the values that the step observed; a non-finite one is served as NaN."""
        self._values = self._values | record

    def event(self, event: dict[str, Any]) -> None:
        """Count an event."""
        self._events[event["kind"], event["level"]] += 1

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of a scrape (the Collector protocol of prometheus_client)."""
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        for name, value in sorted(self._values.items()):
            gauge, help_text = "rlpipe_" + re.sub(r"\W", "_", name), _help(name)
            if isinstance(value, dict):
                # Prometheus counts cumulatively, up to each upper bound.
                totals = list(accumulate(value["counts"]))
                bounds = [*map(str, value["edges"][1:-1]), "+Inf"]
                yield HistogramMetricFamily(
                    gauge, help_text, buckets=list(zip(bounds, totals, strict=True)), sum_value=None
                )
            else:
                yield GaugeMetricFamily(gauge, help_text, value=float("nan") if value is None else value)

        events = CounterMetricFamily("rlpipe_events", "Events of the run so far.", labels=("kind", "level"))
        for (kind, level), count in sorted(self._events.copy().items()):
            events.add_metric((kind, level), count)
        yield events


def _help(name: str) -> str:
    if name == "time":
        return "When the newest step was committed, in seconds since 1970."
    metric = declared(name)
    return f"{metric.definition} Unit: {metric.unit}." if name != STEP else metric.definition
