"""A worker's settings, from its environment; `ratchet.worker.client` reads Temporal's own."""

import os
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.roles import WORKER_ROLES
from ratchet.configs.home import home_folder


@dataclass(frozen=True)
class Deployment:
    """The build of this worker, and the worker deployment it is a version of."""

    name: str
    build_id: str


@dataclass(frozen=True)
class WorkerSettings:
    """Where state lives, which queues are polled, and on which port health is served (0: none).

    Without a `deployment` workers are unversioned.
    """

    home: Path
    store_url: str
    queues: Queues
    health_port: int
    deployment: Deployment | None = None

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> "WorkerSettings":
        """Reads RATCHET_*; raises ValueError naming a variable that cannot be used."""
        home = home_folder(env)
        port = env.get("RATCHET_HEALTH_PORT") or "0"
        if not port.isdigit() or int(port) > 65535:
            raise ValueError(f"RATCHET_HEALTH_PORT={port!r}: must be a port number, or 0 for none")
        return WorkerSettings(
            home=home,
            store_url=env.get("RATCHET_STORE") or f"file://{home}/store",
            queues=Queues.prefixed(env.get("RATCHET_QUEUE_PREFIX") or "ratchet"),
            health_port=int(port),
            deployment=_deployment(env),
        )


def _deployment(env: Mapping[str, str]) -> Deployment | None:
    build, name = env.get("RATCHET_BUILD_ID") or "", env.get("RATCHET_DEPLOYMENT") or "ratchet"
    # Temporal writes both as <name>.<build> and <name>:<build>.
    if not re.fullmatch(r"[\w-]{1,100}", name):
        raise ValueError(
            f"RATCHET_DEPLOYMENT={name!r}: must be at most 100 letters, digits, '-' or '_'"
        )
    if build and not re.fullmatch(r"[\w.-]{1,100}", build):
        raise ValueError(
            f"RATCHET_BUILD_ID={build!r}: must be at most 100 letters, digits, '-', '_' or '.', "
            "such as a release or a commit"
        )
    return Deployment(name, build) if build else None


def parse_roles(text: str) -> list[str]:
    """Roles from a comma-separated list; raises ValueError naming what is allowed."""
    roles = [role.strip() for role in text.split(",") if role.strip()]
    unknown = [role for role in roles if role not in WORKER_ROLES]
    if unknown or not roles:
        what = f"unknown role {unknown[0]!r}" if unknown else "no role specified"
        raise ValueError(f"{what}; allowed: {', '.join(WORKER_ROLES)}")
    return list(dict.fromkeys(roles))


def own_queue(role_queue: str) -> str:
    """A task queue that only this process polls."""
    return f"{role_queue}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
