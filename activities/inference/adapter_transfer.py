"""LoRA adapters through the artifact store: in an engine each version has a name of its own.

The engine was started with version 0, the base, which no push changes. Facts about vLLM 0.32 that
this relies on:

- Loading an adapter does not pause an engine. A request keeps the adapter that it named, and its
  cached keys and values belong to that name and path.
- Unloading makes a name unknown; the tensors stay until others take their place.
- An adapter name that is unknown is answered with 404, never by the base.
"""

from ratchet.activities.contracts.training import adapter_name, label_of
from ratchet.activities.contracts.weights import Engine
from ratchet.activities.inference.store_transfer import Fetched, StoreTransfer
from ratchet.activities.storage.keys import ADAPTER_FOLDER

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class AdapterTransfer(StoreTransfer):
    """The transfer 'adapter'. Version 0 has none: it is the base, under the engine's own name."""

    def name(self, model: str, weights: Fetched, label: str) -> str:
        """One of its own for each push."""
        return adapter_name(model, label) if _has_adapter(weights) else model

    async def push(self, engine: Engine, weights: Fetched) -> None:
        """Loads the adapter. The base is there from the start."""
        if _has_adapter(weights):
            path = str(weights.folder / ADAPTER_FOLDER)
            await engine.post(LOAD, json={"lora_name": engine.model, "lora_path": path})

    async def retire(self, engine: Engine, served: list[str], oldest: int) -> None:
        """Unloads adapters of versions below `oldest`."""
        for name in served:
            label = label_of(name)
            if label and int(label.partition(".")[0]) < oldest:
                await engine.post(UNLOAD, json={"lora_name": name})


def _has_adapter(weights: Fetched) -> bool:
    return (weights.folder / ADAPTER_FOLDER).is_dir()
