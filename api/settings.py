"""What the API is told by its environment. Temporal's own settings are read by `api.temporal`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from activities.contracts.names import Queues
from api.keys import ApiKey, load_keys

KIB = 1024
GIB = 1024**3


@dataclass(frozen=True)
class Settings:
    """Durations in seconds, sizes in bytes.

    `temporal_ui` is the address of Temporal's Web UI, for links; empty: no links. `keys` may use
    the API; without any, everyone who reaches it may. `hosts` are the names by which the API may be
    addressed; empty: any. `custom_code` lists modules and folders of code that a config may name;
    None: any.
    """

    store_url: str
    queues: Queues
    temporal_ui: str = ""
    preflight_timeout_s: float = 20.0
    rpc_timeout_s: float = 8.0
    live_max_age_s: float = 15.0
    max_body_bytes: int = 1024 * KIB
    min_free_bytes: int = GIB
    keys: tuple[ApiKey, ...] = ()
    hosts: tuple[str, ...] = ()
    custom_code: tuple[str, ...] | None = None

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> "Settings":
        """Reads RATCHET_*; raises ValueError naming a variable that cannot be used."""
        home = Path(env.get("RATCHET_HOME") or ".ratchet").absolute()
        keys = load_keys(env.get("RATCHET_API_KEYS"), home / "api_keys.json")
        listed = env.get("RATCHET_CUSTOM_CODE")
        allowed = tuple(part.strip() for part in (listed or "").split(",") if part.strip())
        return Settings(
            store_url=env.get("RATCHET_STORE") or f"file://{home}/store",
            queues=Queues.prefixed(env.get("RATCHET_QUEUE_PREFIX") or "ratchet"),
            temporal_ui=(env.get("RATCHET_TEMPORAL_UI") or "").rstrip("/"),
            preflight_timeout_s=_seconds(env, "RATCHET_PREFLIGHT_TIMEOUT_S", 20.0),
            keys=keys,
            # Without keys only this machine's own users get here, who may run code anyway.
            custom_code=allowed if listed is not None or keys else None,
        )


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 3600:
        raise ValueError(f"{name}={text!r}: must be a number of seconds above 0, at most 3600")
    return value
