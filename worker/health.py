"""A worker's health over HTTP: 200 while its workers run and its event loop turns."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TICK_S = 1.0
STALLED_AFTER_S = 10.0


class Pulse:
    """When the event loop last turned. `roles` are the roles of the process."""

    def __init__(self, roles: list[str]) -> None:
        self.roles = roles
        self.ready = False
        self._beat = time.monotonic()

    async def run(self) -> None:
        """Beats until cancelled."""
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(TICK_S)

    def report(self) -> tuple[int, dict[str, object]]:
        """HTTP status and body."""
        lag = max(0.0, time.monotonic() - self._beat - TICK_S)
        healthy = self.ready and lag < STALLED_AFTER_S
        body = {
            "healthy": healthy,
            "ready": self.ready,
            "roles": self.roles,
            "event_loop_lag_s": round(lag, 3),
        }
        return (200 if healthy else 503), body


@contextmanager
def serve_health(pulse: Pulse, port: int) -> Iterator[int]:
    """Serves GET /healthz on a thread; yields the port (0 asks for none)."""
    if port == 0:
        yield 0
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = pulse.report() if self.path == "/healthz" else (404, {})
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Health checks are not worth a log line each."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield port
    finally:
        server.shutdown()
