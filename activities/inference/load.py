"""How loaded an engine is, according to its own metrics, and reports of it to the run.

Facts about vLLM 0.32 that this relies on:

- /metrics is served unless the engine runs with --disable-log-stats. Every value has one sample
  per engine core; counters end in '_total'.
- num_gpu_blocks counts blocks of the KV cache on CPUs too, over all cores together; each core
  repeats it. Both it and block_size are labels of cache_config_info.
- Gauges change with engine steps only: while an engine is paused they stay as they were.
- The context length it serves is in /v1/models, not among the metrics.

Invariant: an idle engine is reported once, and then again only after a change.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable

import httpx

from ratchet.activities.contracts.hosting import EngineLoad

POLL_S = 5.0
READ_LIMIT_S = 3.0

_USAGE = "vllm:kv_cache_usage_perc"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_PREEMPTIONS = "vllm:num_preemptions_total"
_CACHE = "vllm:cache_config_info"

# Rollout workers have no parser of Prometheus' format.
_REQUESTS = re.compile(rf"^({_RUNNING}|{_WAITING})(?:\{{[^}}]*\}})? ([0-9.e+]+)$", re.MULTILINE)
_IS_PAUSED = re.compile(r'"is_paused":\s*true')


def parse_load(text: str, *, index: int, epoch: int, max_model_len: int) -> EngineLoad:
    """The load in `text`, an engine's answer to GET /metrics in Prometheus' format.

    Raises ValueError if a metric is missing, as it is with --disable-log-stats, or malformed.
    """
    # Imported here: only workers with engines have it.
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, list[float]] = {
        name: [] for name in (_USAGE, _RUNNING, _WAITING, _PREEMPTIONS)
    }
    kv_tokens: list[int] = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in values:
                values[sample.name].append(sample.value)
            elif sample.name == _CACHE:
                labels = sample.labels
                kv_tokens.append(int(labels["num_gpu_blocks"]) * int(labels["block_size"]))
    missing = [name for name, result in {**values, _CACHE: kv_tokens}.items() if not result]
    if missing:
        raise ValueError(
            f"engine {index} does not report {', '.join(missing)}, which adaptive concurrency "
            "needs; remove --disable-log-stats from inference.extra_args, or set "
            "dispatch.max_inflight_rollouts to a number"
        )
    return EngineLoad(
        index=index,
        epoch=epoch,
        kv_usage=round(max(values[_USAGE]), 4),
        running=int(sum(values[_RUNNING])),
        waiting=int(sum(values[_WAITING])),
        preemptions=int(sum(values[_PREEMPTIONS])),
        kv_tokens=max(kv_tokens),
        max_model_len=max_model_len,
    )


async def report_load(
    url: str, index: int, epoch: int, send: Callable[[EngineLoad], Awaitable[None]]
) -> None:
    """Reads the load of the engine at `url` every POLL_S seconds, forever, and sends changes.

    The load of a busy engine is always sent: its receiver counts the polls. An engine that does
    not answer is skipped, since its health check decides whether it is lost. Raises ValueError if
    its answers lack required metrics.
    """
    last: EngineLoad | None = None
    async with httpx.AsyncClient(base_url=url, timeout=READ_LIMIT_S, trust_env=False) as client:
        while True:
            load = await _read(client, index, epoch, last)
            if load is not None and (load != last or load.running + load.waiting > 0):
                await send(load)
                last = load
            await asyncio.sleep(POLL_S)


async def _read(
    client: httpx.AsyncClient, index: int, epoch: int, last: EngineLoad | None
) -> EngineLoad | None:
    """The load, None without an answer. The context length is requested only the first time."""
    try:
        longest = last.max_model_len if last is not None else await _max_model_len(client)
        answer = (await client.get("/metrics")).raise_for_status()
    except httpx.HTTPError:
        return None
    return parse_load(answer.text, index=index, epoch=epoch, max_model_len=longest)


async def _max_model_len(client: httpx.AsyncClient) -> int:
    answer = (await client.get("/v1/models")).raise_for_status()
    return int(answer.json()["data"][0]["max_model_len"])


async def executing_share(client: httpx.AsyncClient) -> float:
    """The share of the time for which an engine currently executes each of its requests.

    It is 0 while the engine is paused or its computing process does not answer, 1 if no request
    waits or nobody listens: then the requests have ended.
    """
    try:
        if _IS_PAUSED.search((await client.get("/is_paused")).text):
            return 0.0
        text = (await client.get("/metrics")).text
    except httpx.TimeoutException:
        return 0.0
    except httpx.HTTPError:
        return 1.0
    counts = {_RUNNING: 0.0, _WAITING: 0.0}
    for name, value in _REQUESTS.findall(text):
        counts[name] += float(value)
    all_of_them = sum(counts.values())
    return counts[_RUNNING] / all_of_them if all_of_them else 1.0
