"""What a worker and its servers use of their machine."""

import importlib.util
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from ratchet.activities.runtime.usage import Usage, gpus

BUSY = "x = bytearray(64 << 20)\nprint(flush=True)\nwhile True: pass"


def test_what_a_child_uses_counts() -> None:
    usage = Usage()
    before = usage.take()
    assert before["cpu_cores"] >= 0 and before["memory_bytes"] > 10 << 20
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            first = usage.take()
            assert first["memory_bytes"] > before["memory_bytes"] + (64 << 20)
            # As long as a machine with other work needs to give it a tenth of a second.
            while psutil.Process(child.pid).cpu_times().user < 0.1:
                pass
            assert usage.take()["cpu_cores"] > 0
            assert child.pid in {pid for pid, _ in usage._seconds}
        finally:
            child.kill()
    after = usage.take()
    assert after["cpu_cores"] >= 0 and after["memory_bytes"] < first["memory_bytes"]
    assert child.pid not in {pid for pid, _ in usage._seconds}


def test_the_seconds_of_a_child_that_is_new_count_from_its_start() -> None:
    usage = Usage()
    usage.take()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
        try:
            while psutil.Process(child.pid).cpu_times().user < 0.3:
                pass
            began = usage._at
            cores = usage.take()["cpu_cores"]
            assert cores * (usage._at - began) >= 0.3
        finally:
            child.kill()


def test_gpus_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def driver(*, works: bool) -> ModuleType:
        module = ModuleType("pynvml")
        module.__spec__ = importlib.util.spec_from_loader("pynvml", None)

        def init() -> None:
            if not works:
                raise NVMLError

        for name, value in {
            "NVMLError": NVMLError,
            "nvmlInit": init,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=40 + handle),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=(handle + 1) << 30),
        }.items():
            setattr(module, name, value)
        return module

    monkeypatch.setitem(sys.modules, "pynvml", driver(works=True))
    assert gpus() == [
        {"index": 0, "utilization": 0.4, "memory_bytes": 1 << 30},
        {"index": 1, "utilization": 0.41, "memory_bytes": 2 << 30},
    ]
    assert Usage().take()["gpus"] == gpus()
    monkeypatch.setitem(sys.modules, "pynvml", driver(works=False))
    assert gpus() == [] and "gpus" not in Usage().take()
