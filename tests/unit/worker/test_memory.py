"""How many arenas threads have, as the C library counts them, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.worker.memory import ARENAS

ALLOCATE = """
import ctypes, sys, threading
from ratchet.worker.memory import limit_arenas
if sys.argv[2] == "limited":
    limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(8)
def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.parametrize(
    ("limited", "environment", "expected"),
    [
        ("limited", {}, range(1, ARENAS + 1)),
        ("limited", {"MALLOC_ARENA_MAX": "4"}, range(3, 5)),
        ("free", {}, range(ARENAS + 1, 100)),
    ],
)
def test_threads_of_a_worker_share_arenas(
    tmp_path: Path, limited: str, environment: dict[str, str], expected: range
) -> None:
    told = tmp_path / "arenas.xml"
    kept = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    subprocess.run(
        [sys.executable, "-c", ALLOCATE, str(told), limited], env=kept | environment, check=True
    )
    assert told.read_text().count("<heap nr=") in expected
