"""Durable RL post-training for language models, on Temporal.

`Ratchet` is the client of the REST API. Every import of a room passes here, so that this module
imports nothing before it is needed: the client needs neither a server framework, torch nor
temporalio.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratchet.api.client import Ratchet as Ratchet

__all__ = ["Ratchet", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Ratchet":
        from ratchet.api.client import Ratchet

        return Ratchet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
