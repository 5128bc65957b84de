"""The weight transfers, by the names that `inference.transfer` of a config has or stands for."""

from collections.abc import Callable
from typing import Any

from ratchet.activities.contracts.weights import WeightTransfer
from ratchet.activities.inference.adapter_transfer import AdapterTransfer
from ratchet.activities.inference.store_transfer import StoreTransfer
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.run import RunConfig

TRANSFERS: dict[str, Callable[[ArtifactStore], WeightTransfer[Any]]] = {
    "store": StoreTransfer,
    "adapter": AdapterTransfer,
}


def transfer_of(config: RunConfig, store: ArtifactStore) -> WeightTransfer[Any]:
    """The transfer of a run."""
    return TRANSFERS[config.transfer](store)
