"""`make bench-transfers`: what the parts of a weight transfer on one host cost, without an engine.

A folder of MODELS ("tiny smollm2"), in float32, is written as a trainer exports it, committed
(`prepare`), fetched (`receive`) and loaded as an engine loads it: through the store, and by way of
/dev/shm, which would have to be written beside the store, since that has every version. Medians of
COUNT (5), in turn. The last line of stdout is one JSON object: by model its bytes and, of each
part, wall and CPU seconds.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ratchet.activities.storage.store import ArtifactStore

LAYERS = {"tiny": (4, 2**17), "smollm2": (30, 4_483_840)}
"""Layers, and parameters of each: 0.5M and 134.5M together."""
SHARED, FILE = Path("/dev/shm"), "model.safetensors"


class Parts:
    """Seconds of parts, in every round."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[tuple[float, float]]] = {}

    def time(self, name: str, work: Callable[..., Any], *input: Any, **options: Any) -> Any:
        """What `work` gives; notes the seconds that it took."""
        wall, cpu = time.monotonic(), time.process_time()
        result = work(*input, **options)
        took = time.monotonic() - wall, time.process_time() - cpu
        self._seconds.setdefault(name, []).append(took)
        return result

    def medians(self) -> dict[str, dict[str, float]]:
        """Of each part."""
        return {
            name: {
                "wall_s": statistics.median(wall for wall, _ in took),
                "cpu_s": statistics.median(cpu for _, cpu in took),
            }
            for name, took in self._seconds.items()
        }


def _load(folder: Path) -> float:
    """Every weight is looked at: what is mapped alone has not been loaded."""
    return sum(float(one.sum()) for one in load_file(folder / FILE).values())


def measure(model: str, count: int, home: Path) -> dict[str, Any]:
    """The result for one model."""
    layers, size = LAYERS[model]
    weights = {f"layer.{number}": torch.randn(size) for number in range(layers)}
    store, parts = ArtifactStore(str(home / "store")), Parts()
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-", dir=SHARED) as shared:
        for number in range(count):
            exported, memory = home / "exported", Path(shared) / "weights"
            for folder in (exported, memory):
                folder.mkdir()
            parts.time("export", save_file, weights, exported / FILE)
            key = f"weights/{number}"
            taken = parts.time("prepare", store.put_folder, key, exported, attempt="a")
            shutil.rmtree(exported)
            held = parts.time("receive", store.fetch_folder, taken)
            parts.time("load", _load, held)
            # What a transfer by shared memory would do beside the commit, and instead of a fetch.
            parts.time("shared_memory_write", save_file, weights, memory / FILE)
            parts.time("shared_memory_load", _load, memory)
            shutil.rmtree(memory)
            store.delete(taken)
    return {"bytes": taken.size, **parts.medians()}


def main() -> None:
    """Prints the result."""
    count = int(os.environ.get("COUNT", "5"))
    models = os.environ.get("MODELS", "tiny smollm2").split()
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-", dir=Path.cwd()) as home:
        print(json.dumps({model: measure(model, count, Path(home)) for model in models}))


if __name__ == "__main__":
    main()
