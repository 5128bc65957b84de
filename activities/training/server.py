"""Tells the host activity how to run a trainer process."""

import asyncio
import hashlib
import secrets
import tempfile
from pathlib import Path

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.runtime.children import module_command
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.training.client import TrainerClient, TrainerFailed, TrainerGone
from ratchet.configs.trainer import TrainerConfig

SOCKET_PATH_LIMIT = 107
"""Most bytes of a Unix socket's path on Linux (sun_path, without the final NUL)."""


def socket_path(home: Path, host: HostInput, epoch: int) -> Path:
    """A fresh socket path below `home`, or in the temporary folder where that is too long."""
    run = hashlib.sha256(host.run_id.encode()).hexdigest()[:8]
    name = f"t{run}-{host.index}-{epoch}-{secrets.token_hex(3)}"
    path = home.resolve() / "sockets" / name
    if len(str(path).encode()) > SOCKET_PATH_LIMIT:
        path = Path(tempfile.mkdtemp(prefix="ratchet-")) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


async def trainer_spec(ctx: WorkerContext, host: HostInput, epoch: int) -> ServerSpec:
    """The trainer of `epoch`, of the backend and in the mode that the run's config says."""
    config = await asyncio.to_thread(ctx.config, host.run_id)
    return process_spec(ctx.home, host, epoch, config.trainer)


def process_spec(home: Path, host: HostInput, epoch: int, config: TrainerConfig) -> ServerSpec:
    """A trainer process: healthy once it answers a ping, whether or not anything is loaded."""
    path = socket_path(home, host, epoch)
    client = TrainerClient(f"unix://{path}")

    async def probe() -> bool:
        try:
            await client.ping(timeout_s=2.0)
        except (TrainerGone, TrainerFailed, TimeoutError):
            return False
        return True

    argv = module_command("ratchet.activities.training.process", "--socket", str(path))
    argv += ["--backend", config.backend]
    return ServerSpec(
        name=f"trainer {host.index}",
        argv=[*argv, "--deterministic"] if config.deterministic else argv,
        address=f"unix://{path}",
        cwd=path.parent,
        probe=probe,
        # It only ever loads folders of the store.
        env={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"},
        start_timeout_s=60.0,
    )
