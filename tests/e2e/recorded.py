"""A recorded run: what a long run leaves in the store, written through the store's own API, and
executions in Temporal that show it. Numbers are made up, but every key and format is a run's own.
"""

import asyncio
import math
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner

from ratchet.activities.contracts.names import Queues
from ratchet.activities.storage import curves, keys
from ratchet.activities.storage.series import CHUNK_SAMPLES, Series
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.load import validate
from ratchet.worker.compat import Worker
from ratchet.workflows.protocol.messages import MEMO_KEY, TRAINING_RUN, RunInput
from tests.unit.api.leaving import put_weights, put_whole_checkpoint

STEP_S = 9.0
STEPS_TOLD = 250
"""Steps in one execution, before it continues as new."""
ENVS = ("reverse-text", "reverse-retry")
SPREAD = ("mean", "max", "min")
PHASES = ("total", "env", "overhead", "setup", "generation", "model", "scoring")
LENGTHS = ("seq_len", "prefill_len", "decode_len", "num_turns", "samples_per_rollout")
MEMORY = Path("/dev/shm")
MEMORY_FREE = 2 * 2**30
"""Bytes free there: 10,000 steps take 280 MB, and the API starts no run with less than 1 GiB."""
WORDS = ["the", "pawl", "lets", "the", "wheel", "turn", "one", "way", "and", "never", "back"]


@contextmanager
def folder(otherwise: Path) -> Iterator[Path]:
    """A temporary folder in memory, where syncing each of 10,000 records costs nothing; `otherwise`
    if there is no such place or too little of it.
    """
    usable = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_FREE
    if not usable:
        yield otherwise
        return
    with tempfile.TemporaryDirectory(prefix="ratchet-recorded-", dir=MEMORY) as made:
        yield Path(made)


def config_of(name: str, steps: int) -> dict[str, Any]:
    """The resolved config of a recorded run."""
    plain = {
        "name": name,
        "max_steps": steps,
        "metadata": {"owner": "ana", "purpose": "recorded"},
        "train": {"batch_size": 64, "group_size": 8, "env": [{"id": env} for env in ENVS]},
        "eval": {"interval": 250, "env": [{"id": ENVS[0]}]},
    }
    return validate(plain).model_dump(mode="json")


def _around(rng: random.Random, middle: float, by: float) -> dict[str, float]:
    width = abs(rng.gauss(0, by)) + by / 4
    return {"mean": middle, "max": middle + width, "min": middle - width}


def _scope(rng: random.Random, scope: str, reward: float, length: float) -> dict[str, float]:
    """Everything that a step's record says of one scope."""
    said: dict[str, float] = {}
    values = {"reward": reward, **{name: length for name in LENGTHS}, "is_truncated": 0.02}
    for name, middle in values.items():
        for statistic, value in _around(rng, middle, 0.1 * middle + 0.01).items():
            said[f"{name}/{scope}/{statistic}"] = value
    for phase in PHASES:
        for statistic, value in _around(rng, 0.4, 0.2).items():
            said[f"timing/{scope}/{phase}/{statistic}"] = abs(value)
    for name, middle in (("entropy", 1.2 - reward), ("mismatch_kl", 0.004)):
        for statistic in ("mean", "median", "std", "min", "max"):
            said[f"{name}/{scope}/{statistic}"] = abs(rng.gauss(middle, middle * 0.15))
    said[f"errored/{scope}/mean"] = 0.12 if rng.random() < 0.01 else 0.0
    said[f"zero_advantage/{scope}"] = min(1.0, max(0.0, reward - 0.3 + rng.gauss(0, 0.05)))
    said[f"solve_none/{scope}"] = max(0.0, 0.4 - reward)
    said[f"solve_all/{scope}"] = max(0.0, reward - 0.6)
    said[f"effective_batch_size/{scope}"] = 1 - said[f"zero_advantage/{scope}"]
    said[f"stop_condition/{scope}/agent_completed"] = 0.98
    said[f"filters/{scope}/is_filtered"] = 0.01
    return said


def record_of(step: int, rng: random.Random, steps: int, began: float) -> dict[str, Any]:
    """The record of one step: some 330 metrics, as two environments make them."""
    part = step / steps
    reward = 0.15 + 0.75 * (1 - math.exp(-4 * part)) + rng.gauss(0, 0.03)
    # One step in the whole run falls out, which no thinning may hide.
    reward = 0.02 if step == int(steps * 0.6183) else reward
    metrics: dict[str, float] = {}
    for i, scope in enumerate(("all", *ENVS)):
        metrics |= _scope(rng, scope, reward - 0.06 * i, 20 + 12 * part + rng.gauss(0, 1))
        if scope != "all":
            metrics[f"metrics/{scope}/exact"] = max(0.0, reward - 0.2)
        for kind in ("all", "effective"):
            at = f"train/{'agg' if scope == 'all' else scope}/{kind}"
            metrics |= {
                f"{at}/{name}/{statistic}": reward
                for name in ("reward", "seq_len", "decode_len", "is_truncated")
                for statistic in (*SPREAD, "p10", "p90")
            }
    wait = max(0.0, rng.gauss(2.5, 0.8))
    train = max(0.5, rng.gauss(4.6, 0.4))
    sync = max(0.1, rng.gauss(0.7, 0.1))
    metrics |= {
        "loss": rng.gauss(0, 0.02),
        "entropy": 1.2 - reward,
        "mismatch_kl": abs(rng.gauss(0.004, 0.001)) + (0.08 if rng.random() < 0.002 else 0),
        "grad_norm": abs(rng.gauss(1.4 - part, 0.3)),
        "lr": 1e-4 * (1 - part),
        "optim/grad_norm": abs(rng.gauss(1.4 - part, 0.3)),
        "optim/lr": 1e-4 * (1 - part),
        "perf/throughput": 2600 + rng.gauss(0, 150),
        "perf/peak_memory": 31.2,
        "staleness/mean": 0.8 + rng.random() * 0.4,
        "staleness/max": float(rng.choice((1, 1, 2))),
        "off_policy/mean": rng.random(),
        "off_policy/max": float(rng.choice((1, 2, 3))),
        "off_policy/dropped/in_flight": float(rng.random() < 0.05),
        "off_policy/dropped/in_queue": 0.0,
        "pre_filters/all/dropped_rate": 0.01 * rng.random(),
        "batch/trainable": 1 - max(0.0, reward - 0.5),
        "time/wait_for_batch": wait,
        "time/train": train,
        "time/sync_weights": sync,
        "time/ship_batch": 0.2,
        "time/step": wait + train + sync,
        "concurrency/max_inflight": 64.0,
        "progress/total_tokens": step * 2600.0,
    }
    return {"step": step, "time": began + STEP_S * step, "metrics": metrics}


def _gauges(store: ArtifactStore, run: str, steps: int, rng: random.Random, began: float) -> None:
    """The series of two rollout workers, a sample each ten seconds."""
    for source in ("rollout-alpha-71-5f0c2e", "rollout-beta-93-77aa01"):
        series = Series(run, source)
        chunk = None
        for i in range(int(steps * STEP_S / 10)):
            time = began + 10.0 * i
            evaluating = 10.0 * i % (50 * STEP_S) < 60
            train = rng.randint(20, 40) if evaluating else rng.randint(52, 64)
            said = {
                "time": time + rng.random(),
                "worker_inflight": train // 2,
                "sampled_tokens": 4000,
                "tokens_per_s": 400 + rng.gauss(0, 30),
                "event_loop_lag": {"mean": 0.001, "max": 0.03, "p99": abs(rng.gauss(0.006, 0.003))},
                "usage": {"cpu_cores": abs(rng.gauss(0.4, 0.05)), "memory_bytes": 600 << 20},
                "heard": time,
                "inflight_train": train,
                "inflight_eval": 24 if evaluating else 0,
                "inflight": {"train/reverse-text": train},
                "permits": 64,
                "version": int(10.0 * i) // 9,
                "mode": "eval" if evaluating else "train",
                "queued_eval": 8 if evaluating else 0,
                "groups": 9,
                "off_policy_max": 1,
                "off_policy_mean": 0.4,
                "waiting_for": "a free permit",
            }
            full = chunk is not None and len(chunk.samples) == 360
            if full and chunk is not None:
                chunk.write(store)
            chunk = series.add(said)
        if chunk is not None:
            chunk.write(store)


def _lags(store: ArtifactStore, run: str, steps: int, rng: random.Random, began: float) -> None:
    """Event-loop lag and usage of workers of the other roles, some of two processes."""
    for source, usual in (
        ("orchestrator-alpha-12-9d04e1", 0.004),
        ("trainer-alpha-55-31c7f2", 0.009),
        ("inference-alpha-40-b80a6d", 0.002),
        ("inference-beta-41-6e2f90", 0.003),
        ("env-beta-64-20cd5b", 0.012),
    ):
        series = Series(run, source)
        for i in range(int(steps * STEP_S / 10)):
            p99 = usual * (0.7 + 0.6 * rng.random())
            lag = {"mean": p99 / 8, "max": p99 * 3, "p99": p99}
            used = {"cpu_cores": usual * 80 * rng.random(), "memory_bytes": 900 << 20}
            time = began + 10.0 * i + rng.random()
            chunk = series.add({"time": time, "event_loop_lag": lag, "usage": used})
            if len(chunk.samples) == CHUNK_SAMPLES:
                chunk.write(store)
        chunk.write(store)


def _rollout(group: str, index: int, env: str, rng: random.Random, version: int) -> dict[str, Any]:
    """One rollout of two turns, the second of which answers the environment."""
    words = [rng.choice(WORDS) for _ in range(3)]
    answer = " ".join(word[::-1] for word in words)
    prompt, first, result, second = 12, rng.randint(6, 18), 7, rng.randint(6, 18)
    mask = [False] * prompt + [True] * first + [False] * result + [True] * second
    size = len(mask)
    sample = {
        "token_ids": [rng.randint(3, 250) for _ in range(size)],
        "loss_mask": mask,
        "logprobs": [-abs(rng.gauss(0, 1.2)) if sampled else 0.0 for sampled in mask],
        "versions": [
            -1 if not sampled else version if i < prompt + first else version + 1
            for i, sampled in enumerate(mask)
        ],
        "prompt": 0,
        "prompt_tokens": prompt,
        "observations": [["user", prompt + first, prompt + first + result]],
    }
    reward = round(rng.random(), 3)
    ask = {"role": "user", "content": f"reverse {' '.join(words)}"}
    return {
        "group": group,
        "index": index,
        "kind": group.partition("/")[0],
        "env": env,
        "example": int(rng.random() * 500),
        "temperature": 1.0,
        "version": version,
        "engine": {"index": 0, "epoch": 1},
        "reward": reward,
        "error": None,
        "labels": [f"{version}.1a"],
        "tokens": size,
        "sampled_tokens": first + second,
        "samples": [sample],
        "messages": [
            {**ask, "sampled": False, "tokens": prompt},
            {"role": "assistant", "content": answer[:9], "sampled": True, "tokens": first},
            {"role": "user", "content": "Not yet, try again.", "sampled": False, "tokens": result},
            {"role": "assistant", "content": answer, "sampled": True, "tokens": second},
        ],
        "prompts": [{"messages": [ask], "tools": None}],
        "traces": [{"agent": "policy", "reward": reward, "sampled_tokens": first + second}],
        "rewards": {"similarity": reward},
        "metrics": {"exact": float(reward > 0.9)},
        "truncated": index == 3,
        "stop": "generation_truncated" if index == 3 else "agent_completed",
        "turns": 2,
        "branches": 1,
        "responded": True,
        "timing": {
            "start": 0.0,
            "end": 0.4,
            "setup": 0.01,
            "generation": 0.3,
            "model": 0.2,
            "scoring": 0.05,
        },
    }


def _group(store: ArtifactStore, run: str, number: int, env: str, rng: random.Random) -> str:
    """A finalized group of eight with its rollouts; returns its id."""
    group = f"train/{number}"
    rollouts = [_rollout(group, i, env, rng, number // 8) for i in range(8)]
    mean = sum(r["reward"] for r in rollouts) / len(rollouts)
    members = []
    for rollout in rollouts:
        store.put_json(keys.rollout(run, group, rollout["index"]), rollout, attempt="recorded")
        advantage = rollout["reward"] - mean
        sample = rollout["samples"][0]
        advantages = [advantage if sampled else 0.0 for sampled in sample["loss_mask"]]
        streams = dict.fromkeys(("rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs"))
        same = ("reward", "turns", "truncated", "responded", "sampled_tokens", "labels")
        more = ("temperature", "stop", "timing", "metrics")
        members.append(
            {
                "rollout": rollout["index"],
                "error": None,
                **{name: rollout[name] for name in (*same, *more)},
                "samples": [{**sample, "advantages": advantages, **streams}],
                "advantage": advantage,
                "filters": {},
                "filtered": False,
                "post_filtered": False,
            }
        )
    record = {
        "schema": 1,
        "group": group,
        "kind": "train",
        "env": env,
        "algorithm": "grpo",
        "example": number % 500,
        "size": 8,
        "version_start": number // 8,
        "rejected": False,
        "observed": {},
        "rollouts": members,
    }
    store.put_json(keys.group(run, group), record, attempt="recorded")
    return group


def _evals(store: ArtifactStore, run: str, steps: int, rng: random.Random) -> None:
    for step in range(0, steps + 1, max(1, steps // 40)):
        epoch = f"{step}-{1 if step else 0}/{ENVS[0]}"
        reward = 0.2 + 0.7 * (1 - math.exp(-4 * step / steps)) + rng.gauss(0, 0.01)
        record = {
            "epoch": epoch,
            "env": ENVS[0],
            "step": step,
            "examples": 32,
            "group_size": 1,
            "rollouts": 32,
            "errored": 0,
            "reward_mean": reward,
            "versions": [step, step + 1],
            "groups": [],
            "metrics": {"avg@1": reward, "is_truncated/mean": 0.0},
        }
        store.put_json(keys.eval_record(run, epoch), record, attempt="recorded")


def write(
    store: ArtifactStore, run: str, *, steps: int, ended: float, seed: int = 0, groups: int = 24
) -> None:
    """Writes all of a run of `steps` steps to the store, the last of them done at `ended` (Unix
    time); the same arguments write the same bytes.
    """
    rng = random.Random(seed)
    began = ended - STEP_S * steps
    store.put_json(keys.config(run), config_of(run, steps), attempt="recorded")
    for step in range(1, steps + 1):
        store.put_json(
            keys.step_record(run, step), record_of(step, rng, steps, began), attempt="recorded"
        )
        curves.pack(store, run, step, attempt="recorded")
    _evals(store, run, steps, rng)
    _gauges(store, run, steps, rng, began)
    _lags(store, run, steps, random.Random(seed + 1), began)
    for step in (0, steps - 1, steps):
        put_weights(store, run, step)
    put_whole_checkpoint(store, run, steps)
    for number in range(groups):
        _group(store, run, number, ENVS[number % 2], rng)


def _stamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@workflow.defn(name=TRAINING_RUN)
class Recorded:
    """Says step by step of itself what the run would have, as fast as it can, and then no more.

    One event a step at least; what the trainer did is left out, since only activities tell that.
    """

    @workflow.run
    async def run(self, arg: RunInput, last: dict[str, Any], result: int = 0) -> None:
        """Emits the steps after `result`; `last` is the run's status at its end."""
        steps = int(last["step"])
        until = min(result + STEPS_TOLD, steps)
        now = dict(workflow.memo_value(MEMO_KEY, {}))
        for step in range(result + 1, until + 1):
            now = {**now, "status": "running", "step": step, "policy_version": step}
            now["reward"] = 0.15 + 0.73 * step / steps
            if step % 50 == 0:
                now["checkpoint"] = {"step": step}
            if step % max(1, steps // 40) == 0:
                now["eval"] = {ENVS[0]: {"step": step, "reward": now["reward"]}}
            workflow.upsert_memo({MEMO_KEY: now})
        if until < steps:
            workflow.continue_as_new(args=[arg, last, until], memo={MEMO_KEY: now})
        workflow.upsert_memo({MEMO_KEY: last})
        await workflow.wait_condition(lambda: False)


async def show(
    client: Client, queues: Queues, run: str, *, steps: int, ended: float, **memo: Any
) -> None:
    """Leaves executions that say of themselves what the run would, step by step, the last of which
    heard of an engine that was lost and came back; nobody works on it any more.
    """
    stamp = _stamp(ended - STEP_S * steps)
    config = config_of(run, steps)
    said = {
        "status": "running",
        "name": run,
        "created_at": stamp,
        "started_at": stamp,
        "metadata": config["metadata"],
        "max_steps": steps,
        "envs": [*ENVS],
        "model": "ratchet/tiny",
        "step": steps,
        "policy_version": steps,
        "reward": 0.88,
        "rollouts": {"train": steps * 64, "eval": 1280},
        "checkpoint": {"step": steps},
        "eval": {ENVS[0]: {"step": steps, "reward": 0.89}},
        "restarts": {"engine": 1},
        "waiting_for": {"name": f"rollouts of batch {steps + 1}", "since": _stamp(ended)},
        **memo,
    }
    first = {key: said[key] for key in ("name", "created_at", "metadata", "max_steps")}
    arg = RunInput(run_id=run, config=config, queues=queues, examples={}, created_at=stamp)
    worker = Worker(
        client,
        task_queue=queues.orchestrator,
        workflows=[Recorded],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with worker, asyncio.timeout(600):
        handle = await client.start_workflow(
            TRAINING_RUN,
            args=[arg, said],
            id=run,
            task_queue=queues.orchestrator,
            memo={MEMO_KEY: {**first, "status": "queued"}},
        )
        while (await (await handle.describe()).memo()).get(MEMO_KEY) != said:
            await asyncio.sleep(0.1)
    engine = {"role": "engine", "index": 0, "name": "engine-0"}
    lost = {**engine, "epoch": 1, "state": "down", "detail": "the engine's process was killed"}
    await handle.signal("host_report", lost)
    await handle.signal("host_report", {**engine, "epoch": 2, "state": "up"})
