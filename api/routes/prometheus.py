"""`GET /metrics` for Prometheus: the API's requests, and the current runs, workers and engines.

Scrapes within a few seconds share one query of Temporal and of the store. Labels are bounded:
routes, not paths; open runs, not all runs.
"""

import asyncio
import collections
import time
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import Depends, FastAPI, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.api.http.conventions import require_known_query
from ratchet.api.http.shared_call import Shared
from ratchet.api.routes.machines import engines_of, workers_of
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.services.core import Served, Services
from ratchet.api.services.run_view import FALLBACK, status_of
from ratchet.api.temporal.client import Execution

MEDIA = "text/plain; version=0.0.4; charset=utf-8"
EXAMPLE = 'ratchet_run_step{run="reverse-1a2b3c"} 12.0\nratchet_temporal_up 1.0\n'
FRESH_S = 3.0
MOST_RUNS = 200
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Requests:
    """Counts requests by route. Streams count when they end, and have no duration."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.count = Counter(
            "ratchet_api_requests",
            "Requests by route and status.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.refused = Counter(
            "ratchet_api_refused",
            "Requests refused before they were read, by the kind of problem.",
            ["problem"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "ratchet_api_request_seconds",
            "Time until a reply was sent completely.",
            ["method", "route"],
            buckets=BUCKETS,
            registry=self.registry,
        )


class Counted:
    """Middleware that counts requests."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, streamed = time.perf_counter(), 500, False

        async def send_seen(message: Message) -> None:
            nonlocal status, streamed
            if message["type"] == "http.response.start":
                status = message["status"]
                streamed = any(
                    name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message.get("headers", ())
                )
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if route != "other" else "other"
            self._requests.count.labels(method, route, str(status)).inc()
            if not streamed:
                seconds = time.perf_counter() - began
                self._requests.seconds.labels(method, route).observe(seconds)


class _Found(Collector):
    """Gauges computed for this scrape."""

    def __init__(self, families: list[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The gauges."""
        return self._families


def _gauge(name: str, text: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"ratchet_{name}", text, labels=labels)


def _tally(name: str, text: str, label: str, values: Iterable[str]) -> GaugeMetricFamily:
    """The number of occurrences of each value."""
    family = _gauge(name, text, [label])
    for value, count in sorted(collections.Counter(values).items()):
        family.add_metric([value], count)
    return family


def run_gauges(runs: list[Execution], ended: Mapping[str, int]) -> list[GaugeMetricFamily]:
    """How many runs are in each status, and the progress of those that have not ended; `ended`
    counts the ended ones, by Temporal's status.
    """
    by_status = _gauge(
        "runs", "Runs that Temporal retains; a resumed run counts once per end.", ["status"]
    )
    counts = collections.Counter(map(status_of, runs))
    for state, count in ended.items():
        counts[FALLBACK.get(state, "failed")] += count
    for status, count in sorted(counts.items()):
        by_status.add_metric([status], count)
    reported = {
        "step": _gauge("run_step", "Trainer steps done.", ["run"]),
        "policy_version": _gauge("run_policy_version", "Version the engines serve.", ["run"]),
        "reward": _gauge("run_reward", "Mean train reward of the last step.", ["run"]),
    }
    restarts = _gauge("run_restarts", "Restarts of servers.", ["run", "role"])
    for run in sorted(runs, key=lambda run: run.started)[-MOST_RUNS:]:
        for key, family in reported.items():
            value = run.memo.get(key)
            if isinstance(value, int | float):
                family.add_metric([run.id], float(value))
        for role, count in (run.memo.get("restarts") or {}).items():
            restarts.add_metric([run.id, role], count)
    return [by_status, *reported.values(), restarts]


def machine_gauges(roles: Iterable[str], states: Iterable[str]) -> list[GaugeMetricFamily]:
    """How many workers poll by role, and how many engines there are by state."""
    return [
        _tally("workers", "Worker processes that poll Temporal.", "role", roles),
        _tally("engines", "Inference engines of runs.", "state", states),
    ]


def away_gauge() -> GaugeMetricFamily:
    """Whether what all other gauges are made of was there."""
    return _gauge("temporal_up", "Whether Temporal answers the API.", [])


async def _families(services: Services) -> list[GaugeMetricFamily]:
    runs, ended, workers, engines = await asyncio.gather(
        services.run_list.open(),
        services.temporal.ended(),
        workers_of(services),
        engines_of(services),
    )
    roles, states = (worker.role for worker in workers), (engine.state for engine in engines)
    return [*run_gauges(runs, ended), *machine_gauges(roles, states)]


def install(app: FastAPI) -> Requests:
    """Counts the app's requests and serves /metrics."""
    requests = Requests()
    shared: Shared[Any] = Shared(FRESH_S)
    app.add_middleware(Counted, requests=requests)

    @app.get(
        "/metrics",
        operation_id="scrape_metrics",
        tags=["health"],
        dependencies=[Depends(require_known_query)],
        response_class=Response,
        responses={
            200: {
                "description": "Metrics as text.",
                "content": {"text/plain": {"schema": {"type": "string"}, "example": EXAMPLE}},
            }
        },
    )
    async def metrics(services: Served) -> Response:
        """Metrics in Prometheus' text format. While Temporal is away, only those of the API."""
        away = away_gauge()
        try:
            families = await shared.get("", lambda: _families(services))
            away.add_metric([], 1)
        except ApiProblem:
            families = []
            away.add_metric([], 0)
        result = CollectorRegistry()
        result.register(_Found([*families, away]))
        return Response(
            generate_latest(requests.registry) + generate_latest(result), media_type=MEDIA
        )

    return requests
