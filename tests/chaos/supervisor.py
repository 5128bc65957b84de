"""The machine's process supervisor: starts dead services again, as systemd or Docker would.

It minds Temporal, the API and the workers. Servers of runs are never touched: they are the
business of the run's hosts. A stalled process is not dead, so it is left alone, too.
"""

import asyncio
import os
import time
from pathlib import Path

from ratchet.worker.stack import Addresses, Stack, answers
from tests.chaos.proxy import Proxy

EVERY_S = 0.5
REST_S = 2.0
"""Pause before a service is started once more."""


class ChaosStack(Stack):
    """A stack whose parts reach Temporal through a proxy, and that remembers how to start each."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._orders: dict[str, tuple[list[str], dict[str, str]]] = {}
        self.proxy: Proxy | None = None

    def up(self) -> Addresses:
        """As ever, with Temporal on a port that only the proxy and the suite itself know."""
        if self.proxy is None:
            (self.home / "logs").mkdir(parents=True, exist_ok=True)
            self._port("temporal_ui", "temporal")
            port = self._port("temporal", "temporal")
            self._start("temporal", self._temporal_command(), dict(os.environ))
            self._wait("temporal", lambda: answers(port))
            self.proxy = Proxy(port)
            self.proxy.start()
            os.environ["TEMPORAL_ADDRESS"] = f"127.0.0.1:{self.proxy.port}"
        return super().up()

    @property
    def direct(self) -> str:
        """Temporal's own address."""
        return f"127.0.0.1:{self.record['ports']['temporal']}"

    def down(self) -> None:
        """As ever; the proxy goes last."""
        super().down()
        if self.proxy is not None:
            self.proxy.close()
        os.environ.pop("TEMPORAL_ADDRESS", None)

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        self._orders[name] = (command, env)
        super()._start(name, command, env)

    def dead(self) -> list[str]:
        """Names of services that were started and have ended."""
        return [name for name in self._orders if self._alive(name) is None]

    def revive(self, name: str) -> None:
        """Starts a dead service as it was started before."""
        self._start(name, *self._orders[name])


class Supervisor:
    """Minds the services of a stack; `restarts` are (Unix time, name)."""

    def __init__(self, stack: ChaosStack) -> None:
        self.stack = stack
        self.restarts: list[tuple[float, str]] = []

    async def run(self) -> None:
        """Starts what is dead, for ever."""
        last: dict[str, float] = {}
        while True:
            for name in self.stack.dead():
                if time.monotonic() - last.get(name, -REST_S) >= REST_S:
                    last[name] = time.monotonic()
                    self.stack.revive(name)
                    self.restarts.append((time.time(), name))
            await asyncio.sleep(EVERY_S)
