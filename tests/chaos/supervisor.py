"""The stack of the fault suite, and the product's supervisor, which minds its services.

It minds Temporal, the API and the workers. Servers of runs are never touched: they are the
business of the run's hosts.
"""

import os
import time
from pathlib import Path

from ratchet.worker import supervisor
from ratchet.worker.stack import Addresses, Stack, answers
from tests.chaos.proxy import Proxy


class ChaosStack(Stack):
    """A stack whose parts reach Temporal through a proxy."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
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


class Supervisor(supervisor.Supervisor):
    """Minds the services of a stack; `restarts` are (Unix time, name)."""

    def __init__(self, stack: ChaosStack) -> None:
        self.restarts: list[tuple[float, str]] = []
        super().__init__(stack, lambda name: self.restarts.append((time.time(), name)))
