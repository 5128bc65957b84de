"""What a demo leaves of the stack that it started."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ratchet.worker import demo
from ratchet.worker.stack import Addresses
from tests import ROOT


@pytest.mark.parametrize(
    ("ran", "supervisor", "kept", "stops"),
    [
        ([], None, "", True),
        (["api"], None, "", False),
        ([], 42, "", False),
        ([], None, "1", False),
    ],
)
def test_a_demo_stops_only_a_stack_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ran: list[str],
    supervisor: int | None,
    kept: str,
    stops: bool,
) -> None:
    stopped = []

    class Double:
        home = tmp_path

        def running(self) -> list[str]:
            return ran

        def up(self) -> Addresses:
            return Addresses("localhost:7233", "", "http://127.0.0.1:8080")

        def down(self) -> None:
            stopped.append(True)

    def perform(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("RATCHET_DEMO_KEEP", kept)
    monkeypatch.setattr(demo, "Stack", lambda home: Double())
    monkeypatch.setattr(demo, "perform", perform)
    monkeypatch.setattr(demo, "supervisor_of", lambda home: supervisor)
    console = Console(record=True, width=200)
    with pytest.raises(KeyboardInterrupt):
        demo.demo(str(ROOT / "configs/examples/reverse_text.toml"), [], console)
    assert bool(stopped) is stops
    assert ("`make up` keeps it" in console.export_text()) is (supervisor is not None)


def test_an_interrupt_while_the_run_is_created_cancels_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, cancelled = [], []

    def create(config: Any, *, idempotency_key: str) -> Any:
        keys.append(idempotency_key)
        if len(keys) == 1:
            raise KeyboardInterrupt
        return SimpleNamespace(id="late-1a2b3c")

    client: Any = SimpleNamespace(address="http://h", runs=SimpleNamespace(create=create))
    monkeypatch.delenv("RATCHET_DEMO_KEEP", raising=False)
    monkeypatch.setattr(demo, "give_up", lambda address, run, console: cancelled.append(run))
    config: Any = None
    with pytest.raises(KeyboardInterrupt):
        demo.requested(client, config, Console(record=True))
    assert cancelled == ["late-1a2b3c"] and len(keys) == 2 and len(set(keys)) == 1
