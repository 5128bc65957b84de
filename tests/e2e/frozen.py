"""Serves a folder of weights with a plain vLLM, as the frozen model of a test.

The server is what anyone would start by hand: no control endpoints, no token-in-token-out. It is
bound to no core, so that it may stand beside an engine, and nothing of it is left afterwards.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from activities.hosting.process import ServerProcess
from activities.hosting.spec import ServerSpec
from activities.inference.engine import engine_env, engine_healthy, free_port, on_cpu
from configs.run import RunConfig


def frozen_argv(weights: Path, name: str, port: int, *, seq_len: int, cpu: bool) -> list[str]:
    """The server's command line; `seq_len` is its context in tokens."""
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    argv += ["--model", str(weights), "--served-model-name", name]
    argv += ["--dtype", "float32", "--max-model-len", str(seq_len)]
    argv += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
    if cpu:
        return [*argv, "--enforce-eager", "--kv-cache-memory-bytes", str(2**28)]
    return [*argv, "--gpu-memory-utilization", "0.1"]


@asynccontextmanager
async def frozen_model(
    weights: Path, name: str, home: Path, *, seq_len: int = 256, key: str = ""
) -> AsyncIterator[str]:
    """The address (http://host:port) of a server of `weights` under `name`, healthy.

    It asks for `key`, if one is given. State and logs are in `home`.
    """
    cpu = on_cpu()
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    config = RunConfig.model_validate({"max_steps": 1, "train": {"env": [{"id": "reverse-text"}]}})
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    env = engine_env(config, cpu=cpu) | {"OMP_NUM_THREADS": str(threads)}
    del env["VLLM_SERVER_DEV_MODE"]
    if key:
        env["VLLM_API_KEY"] = key
    home.mkdir(parents=True, exist_ok=True)
    spec = ServerSpec(
        name=f"frozen {name}",
        argv=frozen_argv(weights, name, port, seq_len=seq_len, cpu=cpu),
        address=url,
        cwd=home,
        probe=lambda: engine_healthy(url),
        env=env,
    )
    process = ServerProcess(spec, home=home, run="frozen", host=name, epoch=1)
    try:
        await process.start()
        async with asyncio.timeout(spec.start_timeout_s):
            while not await engine_healthy(url):
                if process.exited.is_set():
                    raise RuntimeError(f"vLLM did not start:\n{process.log_tail(4000)}")
                await asyncio.sleep(0.25)
        yield url
    finally:
        await process.stop()
