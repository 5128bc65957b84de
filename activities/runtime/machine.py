"""What this machine has for a process: cores, memory, GPUs."""

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup/memory.max")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
MIB = 2**20
ONE_MACHINE = "RATCHET_ONE_MACHINE"
"""Set in the environment of workers of all roles that share one machine, as those of `make up`."""


def memory(limit: Path = CGROUP) -> int:
    """Bytes of the machine's memory, or of its container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def cores(limit: Path = CPU_LIMIT) -> int:
    """Cores on which this process may run, or as many as its container may use of them."""
    most = len(os.sched_getaffinity(0))
    quota, _, period = (limit.read_text().strip() if limit.is_file() else "max").partition(" ")
    return min(most, max(1, int(quota) // int(period))) if quota.isdigit() else most


def has_all_roles() -> bool:
    """Whether engines run on this machine, too, when it is a trainer's."""
    return os.environ.get(ONE_MACHINE) == "1"


def out_of_memory_kills(
    processes: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """How many processes of this control group the kernel has killed for memory; 0 where it does
    not report that (control groups v2 do).
    """
    lines = processes.read_text().splitlines() if processes.is_file() else []
    group = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    events = root / group / "memory.events"
    if not events.is_file():
        return 0
    counts = dict(line.split() for line in events.read_text().splitlines())
    return int(counts.get("oom_kill", 0))


def cpu_torch() -> bool:
    """Whether the installed torch is a CPU build, which uses no GPU even if there is one."""
    return "+cpu" in importlib.metadata.version("torch")


def gpus() -> list[int]:
    """Bytes of each GPU that the driver shows; where CUDA_VISIBLE_DEVICES is set, which servers
    inherit, of those that it names.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    query += [f"--id={visible}"] if visible else []
    reply = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    sizes = [int(line) for line in reply.stdout.split() if line.isdigit()]
    return [size * MIB for size in sizes] if reply.returncode == 0 else []


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU; None on a machine whose driver shows none."""
    return min(gpus(), default=None)
