"""What a worker process and all that it started use of their machine: cores, memory, GPUs.

A curve for people; nothing decides anything by it. Pages that processes share count once for each
of them, and a process that ended between two readings takes its last seconds along.
"""

import importlib.util
import time
from typing import Any

import psutil

Process = tuple[int, float]
"""A process by its pid and when it was created: pids are used again."""


class Usage:
    """Reads what this process and its descendants use. Its methods block for some milliseconds."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._seconds: dict[Process, float] = {}
        self._read()

    def take(self) -> dict[str, Any]:
        """`cpu_cores`: how many cores computed for them on average since the last call, or since
        this object was made; `memory_bytes`: what is resident now; and `gpus` of this machine, if
        there are any: {index, utilization from 0 to 1, memory_bytes}, whoever uses them.
        """
        then, before = self._at, self._seconds
        memory = self._read()
        spent = sum(
            seconds - before.get(process, 0.0) for process, seconds in self._seconds.items()
        )
        usage = {"cpu_cores": spent / (self._at - then), "memory_bytes": memory}
        return {**usage, **({"gpus": found} if (found := gpus()) else {})}

    def _read(self) -> int:
        """Reads the CPU seconds of each process; returns the bytes that all of them hold."""
        memory, seconds = 0, {}
        root = psutil.Process()
        for process in (root, *root.children(recursive=True)):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    memory += process.memory_info().rss
                    seconds[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue
        self._at, self._seconds = time.monotonic(), seconds
        return memory


def gpus() -> list[dict[str, Any]]:
    """NVIDIA's GPUs of this machine, as its driver reports them; none without a driver."""
    if importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    devices = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        utilization = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        devices.append({"index": index, "utilization": utilization, "memory_bytes": memory})
    pynvml.nvmlShutdown()
    return devices
