"""Specifies for the host activity how to run a trainer process."""

import asyncio
import hashlib
import os
import secrets
import tempfile
from dataclasses import replace
from pathlib import Path

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.hosting.spec import ServerSpec, free_port
from ratchet.activities.inference.devices import DEVICES
from ratchet.activities.runtime import machine
from ratchet.activities.runtime.children import module_command
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.training.client import TrainerClient, TrainerFailed, TrainerGone
from ratchet.configs.trainer import TrainerConfig

SOCKET_PATH_LIMIT = 107 - len(".63")
"""Most bytes of a Unix socket's path on Linux (sun_path, without the final NUL), less the suffix
that a rank adds.
"""
PROCESS, LAUNCHER = "ratchet.activities.training.process", "torch.distributed.run"


def socket_path(home: Path, host: HostInput, epoch: int) -> Path:
    """A fresh socket path below `home`, or in the temporary folder if that path is too long."""
    run = hashlib.sha256(host.run_id.encode()).hexdigest()[:8]
    name = f"t{run}-{host.index}-{epoch}-{secrets.token_hex(3)}"
    path = home.resolve() / "sockets" / name
    if len(str(path).encode()) > SOCKET_PATH_LIMIT:
        path = Path(tempfile.mkdtemp(prefix="ratchet-")) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


async def trainer_spec(ctx: WorkerContext, host: HostInput, epoch: int) -> ServerSpec:
    """The trainer of `epoch`, with the backend and the mode of the run's config, and its share of
    the devices.
    """
    config = await asyncio.to_thread(ctx.config, host.run_id)
    spec = process_spec(ctx.home, host, epoch, config.trainer)
    return replace(spec, env=spec.env | DEVICES.share(host, config))


def process_spec(home: Path, host: HostInput, epoch: int, config: TrainerConfig) -> ServerSpec:
    """A trainer process: healthy once it answers a ping, also before anything is loaded."""
    path = socket_path(home, host, epoch)
    client = TrainerClient(f"unix://{path}")

    async def probe() -> bool:
        try:
            await client.ping(timeout_s=2.0)
        except (TrainerGone, TrainerFailed, TimeoutError):
            return False
        return True

    process = [PROCESS, "--socket", str(path), "--backend", config.backend]
    process += ["--deterministic"] if config.deterministic else []
    # It only ever loads folders of the store. Waiting threads that spin would take the cores of
    # engines on this machine.
    env = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    alone = config.ranks == 1
    return ServerSpec(
        name=f"trainer {host.index}",
        argv=module_command(*process) if alone else launched(process, config.ranks),
        address=f"unix://{path}",
        cwd=path.parent,
        probe=probe,
        env=env if alone else {**env, **rank_env(config.ranks)},
        start_timeout_s=60.0 if alone else 120.0,
    )


def launched(process: list[str], ranks: int) -> list[str]:
    """A module with its arguments, started `ranks` times by torch's launcher, which ends all of
    them when one ends.
    """
    # Not --standalone, whose launcher unpickles for as long as it runs what its port is sent.
    launcher = [LAUNCHER, "--rdzv-backend", "static", "--master-addr", "127.0.0.1"]
    launcher += ["--master-port", str(free_port()), "--max-restarts", "0"]
    launcher += ["--nproc-per-node", str(ranks), "--log-dir", os.devnull, "-m", *process]
    return module_command(*launcher, "--ranks", str(ranks))


def rank_env(ranks: int) -> dict[str, str]:
    """Environment variables of several ranks: each gets its share of the cores, and they connect to
    each other on this machine only.
    """
    threads = max(1, machine.cores() // ranks)
    # The launcher starts Python without -P.
    own = {"PYTHONSAFEPATH": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {"OMP_NUM_THREADS": str(threads), **own}
