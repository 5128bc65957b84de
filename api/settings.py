"""The API's settings, from its environment; `ratchet.api.temporal.client` reads Temporal's own."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ratchet.activities.contracts.names import Queues
from ratchet.api.http.security import origin_of
from ratchet.api.schemas.keys import ApiKey, load_keys
from ratchet.configs.home import KEYS_FILE, STORES_FILE, home_folder

KIB = 1024
GIB = 1024**3


@dataclass(frozen=True)
class Settings:
    """Durations in seconds, sizes in bytes.

    `temporal_ui` is the address of Temporal's Web UI, for links; empty: no links. `keys` may use
    the API, and once `key_file` changes the keys in it; if the API is not `guarded` everyone who
    reaches it may. `hosts` are the host names under which it accepts requests; empty: any. What a
    config may name: `custom_code` lists modules and folders of code, `endpoint_hosts` hosts of
    endpoints and env servers, `key_vars` variables with endpoints' keys, `models` models,
    `engine_flags` flags of engines (see `ratchet.api.http.allowlist`); None: anything.
    `known_stores` remembers which local stores were marked; None: no store needs a mark.
    `public_url` is where browsers find the API, if a proxy forwards their requests under another
    name. The logs of processes on this machine lie below `home`.
    """

    store_url: str
    queues: Queues
    temporal_ui: str = ""
    preflight_timeout_s: float = 20.0
    rpc_timeout_s: float = 8.0
    live_max_age_s: float = 15.0
    max_body_bytes: int = 256 * KIB
    min_free_bytes: int = GIB
    keys: tuple[ApiKey, ...] = ()
    key_file: Path | None = None
    hosts: tuple[str, ...] = ()
    custom_code: tuple[str, ...] | None = None
    endpoint_hosts: tuple[str, ...] | None = None
    key_vars: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    engine_flags: tuple[str, ...] | None = None
    public_url: str = ""
    home: Path = field(default_factory=home_folder)
    known_stores: Path | None = None

    @property
    def guarded(self) -> bool:
        """Whether keys are required: also when all keys have been revoked."""
        return bool(self.keys) or self.key_file is not None

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> "Settings":
        """Reads RATCHET_*; raises ValueError naming a variable that cannot be used."""
        home = home_folder(env)
        listed_keys, file = env.get("RATCHET_API_KEYS"), home / KEYS_FILE
        keys = load_keys(listed_keys, file)
        key_file = file if not listed_keys and file.exists() else None
        guarded = bool(keys) or key_file is not None

        def allowed(name: str) -> tuple[str, ...] | None:
            # Without keys only this machine's own users get here, who may run code anyway.
            listed = env.get(name)
            result = tuple(part.strip() for part in (listed or "").split(",") if part.strip())
            return result if listed is not None or guarded else None

        return Settings(
            store_url=env.get("RATCHET_STORE") or f"file://{home}/store",
            queues=Queues.prefixed(env.get("RATCHET_QUEUE_PREFIX") or "ratchet"),
            temporal_ui=(env.get("RATCHET_TEMPORAL_UI") or "").rstrip("/"),
            preflight_timeout_s=_seconds(env, "RATCHET_PREFLIGHT_TIMEOUT_S", 20.0),
            keys=keys,
            key_file=key_file,
            custom_code=allowed("RATCHET_CUSTOM_CODE"),
            endpoint_hosts=allowed("RATCHET_ENDPOINT_HOSTS"),
            key_vars=allowed("RATCHET_KEY_VARS"),
            models=allowed("RATCHET_MODELS"),
            engine_flags=allowed("RATCHET_ENGINE_FLAGS"),
            public_url=_origin(env, "RATCHET_PUBLIC_URL"),
            home=home,
            known_stores=home / STORES_FILE if _writable(home) else None,
        )


def _writable(folder: Path) -> bool:
    """Whether files can be created in a folder, or the folder itself; an API whose store is
    elsewhere needs none.
    """
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return os.access(there, os.W_OK)


def _origin(env: Mapping[str, str], name: str) -> str:
    text = env.get(name) or ""
    origin = origin_of(text)
    if text and not origin:
        raise ValueError(f"{name}={text!r}: must look like https://ratchet.example.org")
    return origin


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 3600:
        raise ValueError(f"{name}={text!r}: must be a number of seconds above 0, at most 3600")
    return value
