"""What a machine has, as seen by a process in a container."""

import os
from pathlib import Path

import pytest

from ratchet.activities.runtime import machine


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        (None, 8),
        ("max 100000", 8),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
    ],
)
def test_cores_are_those_of_the_process_within_its_containers_share(
    limit: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    file = tmp_path / "cpu.max"
    if limit is not None:
        file.write_text(f"{limit}\n")
    assert machine.cores(file) == cores
