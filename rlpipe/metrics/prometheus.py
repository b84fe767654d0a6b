"""The Prometheus endpoint http://HOST:PORT/metrics: serves the newest value of every metric.

Owns the server, which also serves the state of the run at /healthz, and the names of the gauges:
`spec/acceptance_length` becomes `rlpipe_spec_acceptance_length`, with the metric's definition as its help
text. A value stays until a newer one replaces it, so validation rewards are also served between validations.
Events are counted by kind and level. A scrape reads values in memory and never waits.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from rlpipe.metrics.bus import STEP
from rlpipe.metrics.grafana import write_dashboard
from rlpipe.metrics.names import declared


class PrometheusSink:
    """A sink that serves the newest values to Prometheus.

    host, port: address; port 0 takes a free port and sets `port` to it. dashboard: file to which the Grafana
    dashboard is written, or None. run: name of the run. quiet_s: seconds without a step after which /healthz
    answers 503 (0: never); three times as many before the first step.
    """

    name = "prometheus"

    def __init__(
        self, host: str, port: int, *, dashboard: Path | None = None, run: str = "", quiet_s: float = 0.0
    ) -> None:
        self.port = port
        self._dashboard = dashboard
        self._host, self._run, self._quiet_s = host, run, quiet_s
        self._last_step, self._outcome = time.monotonic(), ""
        self._values: dict[str, Any] = {}
        self._events: Counter[tuple[str, str]] = Counter()
        self._server: Any = None
        self._thread: Any = None

    def open(self) -> None:
        """Start the server.

        Raises ValueError when prometheus_client is missing, OSError when the port is taken.
        """
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError as error:
            raise ValueError(
                'metrics.prometheus_port needs prometheus_client: pip install -e ".[dashboards]".'
            ) from error
        if self._dashboard is not None:
            write_dashboard(self._dashboard)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._metrics_app = make_wsgi_app(registry)
        self._server = make_server(self._host, self.port, self._answer, _Server, _Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.port = self._server.server_port

    def record(self, record: dict[str, Any]) -> None:
        """Replace the values that the step observed; a non-finite one is served as NaN."""
        self._values = self._values | record
        self._last_step = time.monotonic()

    def event(self, event: dict[str, Any]) -> None:
        """Count an event."""
        self._events[event["kind"], event["level"]] += 1
        if event["kind"] == "end":
            self._outcome = str(event.get("outcome", "ended"))

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the run makes progress, and its state: running, stalled, or its outcome."""
        quiet = time.monotonic() - self._last_step
        limit = self._quiet_s if self._values else 3 * self._quiet_s
        state = self._outcome or ("stalled" if limit and quiet > limit else "running")
        step = self._values.get(STEP)
        return state == "running", {"state": state, "step": step, "seconds_since_step": round(quiet, 1)}

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer one request (WSGI)."""
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return self._metrics_app(environ, start_response)

        status, body = "404 Not Found", {"error": f"no {path}: there are /metrics and /healthz"}
        if path == "/healthz":
            is_healthy, body = self.health()
            status = "200 OK" if is_healthy else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(body).encode() + b"\n"]

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of a scrape (the Collector protocol of prometheus_client)."""
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        yield InfoMetricFamily("rlpipe_run", "The run.", value={"run": self._run, "version": _version()})

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


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each request in a separate thread."""

    daemon_threads = True


class _Handler(WSGIRequestHandler):
    """Handles requests without logging them."""

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing."""


def _version() -> str:
    try:
        return version("rlpipe")
    except PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


def _help(name: str) -> str:
    if name == "time":
        return "When the newest step was committed, in seconds since 1970."
    metric = declared(name)
    return f"{metric.definition} Unit: {metric.unit}." if name != STEP else metric.definition
