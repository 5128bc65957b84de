"""How a vLLM engine is started for a run.

Facts about vLLM 0.32 that this relies on:

- Weight pushes (/pause, /collective_rpc, /update_weight_version, /resume) are served only with
  VLLM_SERVER_DEV_MODE=1, token-in-token-out generation only with --enable-scale-out.
- With VLLM_ENABLE_V1_MULTIPROCESSING=0 a CPU engine runs its one worker inside the engine core:
  one process fewer, with its imports and memory, and the same numbers.
- VLLM_CPU_KVCACHE_SPACE takes whole GiB and overrides --kv-cache-memory-bytes, which takes bytes;
  with the latter and eager execution nothing is warmed up.
- Even with eager execution the first request for log-probabilities compiles a small kernel
  (seconds, and a C++ compiler), unless TORCHDYNAMO_DISABLE is set; this makes nothing slower.
- Adapters are loaded and unloaded at run time only with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. One
  step samples with at most --max-loras of them, and --max-cpu-loras are kept in memory; one more
  is read from its files again when a request names it. --max-lora-rank takes the RANKS alone.
- Without --lora-target-modules the output head takes adapters, too, and then a request for
  log-probabilities of its prompt ends a CPU engine.
- Thread binding 'auto' pins every engine of a machine to the same cores, so it is off, and the
  thread count is set instead.

The engine's control endpoints have no authentication: it listens on the loopback interface unless
RATCHET_ADVERTISE_HOST names an address for other machines, which must then be on a private network.
"""

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.hosting.spec import ServerSpec, free_port
from ratchet.activities.inference import fingerprints
from ratchet.activities.inference.devices import DEVICES
from ratchet.activities.inference.load import report_load
from ratchet.activities.runtime.children import module_command
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.tls import shared_context
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.run import RunConfig
from ratchet.configs.trainer import ALL_LINEAR, MOST_SERVED_RANK, LoraConfig

ADVERTISE = "RATCHET_ADVERTISE_HOST"
PROBE_LIMIT_S = 3.0
READER = "ratchet.activities.inference.compat.Reader"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MOST_SERVED_RANK)
KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that they never race a close."""


def served_name(run_id: str, index: int, epoch: int) -> str:
    """The served model name: no two engines or epochs of a run share one."""
    return f"policy-{run_id}-{index}-e{epoch}"


def engine_argv(
    config: RunConfig, *, weights: Path, bind: str, port: int, model: str, cpu: bool
) -> list[str]:
    """The engine's command line."""
    inference = config.inference
    argv = module_command("vllm.entrypoints.openai.api_server")
    argv += ["--host", bind, "--port", str(port)]
    argv += ["--model", str(weights), "--served-model-name", model]
    # Other formats run code when they are loaded.
    argv += ["--load-format", "safetensors"]
    argv += ["--seed", str(config.seed), "--dtype", inference.dtype]
    argv += ["--max-model-len", str(config.context)]
    argv += ["--max-num-seqs", str(inference.max_num_seqs)]
    argv += ["--enable-scale-out", "--enable-prefix-caching"]
    # The trainer's ratio is relative to the sampled distribution, temperature included.
    argv += ["--logprobs-mode", "processed_logprobs"]
    # A generation_config.json in the weights must not change how rollouts are sampled.
    argv += ["--generation-config", "vllm"]
    argv += ["--disable-uvicorn-access-log"]
    # The gate reads the engine's bits through this extension.
    argv += ["--worker-extension-cls", READER]
    if cpu:
        argv += ["--enforce-eager"]
        argv += ["--kv-cache-memory-bytes", str(int(inference.kv_cache_gib * 2**30))]
    else:
        argv += ["--gpu-memory-utilization", str(inference.gpu_memory_utilization)]
    return argv + adapter_argv(config, weights) + inference.extra_args


def adapter_argv(config: RunConfig, base: Path) -> list[str]:
    """What an engine is started with to hold several adapters: those of as many versions as batches
    may lag behind, with the newest and the one before, and in memory as old as rollouts may be.
    """
    lora = config.trainer.lora
    if lora is None or config.transfer != "adapter":
        return []
    rank = min(rank for rank in RANKS if rank >= lora.rank)
    at_once, kept = config.train.max_lag + 2, config.train.max_off_policy_steps + 2
    sizes = {"--max-lora-rank": rank, "--max-loras": at_once, "--max-cpu-loras": kept}
    flags = [text for flag, n in sizes.items() for text in (flag, str(n))]
    return ["--enable-lora", *flags, "--lora-target-modules", *adapted_kinds(lora, base)]


def adapted_kinds(lora: LoraConfig, base: Path) -> list[str]:
    """The last parts of the names of layers that an adapter of the weights in `base` may change."""
    if lora.targets != ALL_LINEAR:
        return sorted({target.rpartition(".")[2] for target in lora.targets})
    held = fingerprints.read(base)
    assert held is not None, "a trainer of adapters refuses a base without fingerprints"
    # Embeddings and the output head are matrices, too, but in no numbered layer.
    matrices = [name.split(".")[:-1] for name, shape in held.shapes.items() if len(shape) == 2]
    return sorted({name[-1] for name in matrices if any(part.isdecimal() for part in name)})


def engine_env(*, cpu: bool) -> dict[str, str]:
    """Additions to the engine's environment, besides its share of the devices."""
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Weights are always a local folder.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if cpu:
        env |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
        }
    return env


HEALTH = ("/health",)
"""Every vLLM server answers this, even if its computing process stands still."""
CONTROLLED = (*HEALTH, "/is_paused")
"""Answered by an engine with control endpoints; the second by its computing process."""


async def engine_healthy(url: str, paths: Sequence[str] = CONTROLLED) -> bool:
    """Whether the vLLM server at `url` answers at all of `paths` within PROBE_LIMIT_S."""
    async with httpx.AsyncClient(
        timeout=PROBE_LIMIT_S, verify=shared_context(), trust_env=False
    ) as client:
        try:
            answers = [await client.get(f"{url}{path}") for path in paths]
            return all(answer.status_code == 200 for answer in answers)
        except httpx.HTTPError:
            return False


def first_weights(store: ArtifactStore, host: HostInput, *, base: bool = False) -> ArtifactRef:
    """The initial weights of an engine: those that its host was opened with, or version 0, which is
    never pruned, once they were, and as the `base` of adapters. Either way traffic waits until the
    newest ones are pushed.
    """
    assert host.weights is not None, "an engine starts from weights"
    kept = None if base else store.committed(host.weights.key)
    return kept or store.require(keys.weights(host.run_id, 0))


async def engine_spec(ctx: WorkerContext, host: HostInput, epoch: int) -> ServerSpec:
    """The engine of `host` for `epoch`, on a fresh port, serving `first_weights`.

    Raises CorruptArtifact if the weights are damaged, RuntimeError without vLLM.
    """
    config = ctx.config(host.run_id)
    adapters = config.transfer == "adapter"
    first = await asyncio.to_thread(first_weights, ctx.store, host, base=adapters)
    weights = await asyncio.to_thread(ctx.store.fetch_folder, first)
    advertised = os.environ.get(ADVERTISE, "")
    bind = "0.0.0.0" if advertised else "127.0.0.1"
    port = free_port(bind)
    address = f"http://{advertised or bind}:{port}"
    model = served_name(host.run_id, host.index, epoch)
    cpu = not DEVICES.accelerators()
    return ServerSpec(
        name=f"engine {host.index}",
        argv=engine_argv(config, weights=weights, bind=bind, port=port, model=model, cpu=cpu),
        address=address,
        cwd=ctx.scratch(f"engine-{host.index}"),
        probe=lambda: engine_healthy(address),
        env=engine_env(cpu=cpu)
        | ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if adapters else {})
        | {"VLLM_FLOAT32_MATMUL_PRECISION": config.trainer.matmul_precision}
        | DEVICES.share(host, config),
        model=model,
        lost_after_s=config.inference.stalled_after_s,
        report_load=partial(report_load, address, host.index, epoch) if host.report_load else None,
    )
