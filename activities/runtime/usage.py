"""Resources used by a worker process and all its descendants: cores, memory, GPUs.

For charts; no decision depends on it. Pages that processes share count once for each of them, and
the last seconds of a process that ends between two readings are not counted.
"""

import importlib.util
import time
from typing import Any

import psutil

Process = tuple[int, float]
"""A process by pid and creation time, since pids are reused."""


class Usage:
    """Measures this process and its descendants. Its methods block for some milliseconds."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._seconds: dict[Process, float] = {}
        self._read()

    def take(self) -> dict[str, Any]:
        """`cpu_cores` in use on average since the last call, or since this object was created;
        resident `memory_bytes` now; and the `gpus` of this machine, if it has any: {index,
        utilization from 0 to 1, memory_bytes}, used by any process.
        """
        then, before = self._at, self._seconds
        memory = self._read()
        spent = sum(
            seconds - before.get(process, 0.0) for process, seconds in self._seconds.items()
        )
        usage = {"cpu_cores": spent / (self._at - then), "memory_bytes": memory}
        return {**usage, **({"gpus": found} if (found := gpus()) else {})}

    def _read(self) -> int:
        """Reads the CPU seconds of each process; returns the resident bytes of all of them."""
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
    """The NVIDIA GPUs of this machine, as the driver reports them; none without a driver."""
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
