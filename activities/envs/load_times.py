"""How long an env server may take to start: three times as long as its preflight took to load it.

The preflight's measurement is kept in the store, so that it applies on every machine and to later
runs; fast loads leave nothing there.
"""

import hashlib
import json

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.env import EnvConfig

START_AT_LEAST_S = 120.0
SLACK = 3.0
"""A machine without the data may be slower than the one that measured, and a server loads twice."""


def _key(env: EnvConfig) -> str:
    loaded = json.dumps([env.id, env.args, env.path], sort_keys=True)
    return keys.load_time(hashlib.sha256(loaded.encode()).hexdigest())


def note_load(store: ArtifactStore, env: EnvConfig, seconds: float) -> None:
    """Records how long an environment took to load, if it was longer than recorded. Blocks."""
    if SLACK * seconds > start_limit(store, env):
        store.write_live(_key(env), {"load_s": round(seconds, 1)})


def start_limit(store: ArtifactStore, env: EnvConfig) -> float:
    """Seconds in which the server of an environment must be up. Blocks."""
    if env.start_timeout_s is not None:
        return env.start_timeout_s
    measured = store.read_live(_key(env)) or {"load_s": 0.0}
    return max(START_AT_LEAST_S, SLACK * float(measured["load_s"]))
