"""Algorithms of runs on a rollout worker: made once per run and env, and checked before a run.

A user's function is imported here, in the process that will call it; nothing else of theirs is.
"""

import asyncio
import threading

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.context import WorkerContext
from activities.contracts import names
from activities.contracts.checks import CheckInput, CheckProblem, CheckResult
from activities.hosting.heartbeat import heartbeats
from activities.scoring.algorithms import Algorithm, CreditError, build
from activities.scoring.algorithms.custom import load_function
from configs.algorithm import AlgorithmConfig, CustomConfig
from configs.run import RunConfig


def bad_input(error: CreditError) -> ApplicationError:
    """The user's mistake as an activity's failure, which is not retried."""
    return ApplicationError(str(error), type=names.BAD_INPUT, non_retryable=True)


class AlgorithmLibrary:
    """The algorithms of all runs of this process. Methods may be called from any thread."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._made: dict[tuple[str, str], Algorithm] = {}
        self._lock = threading.Lock()

    def algorithm(self, run_id: str, env: str) -> Algorithm:
        """The algorithm of a train env; imports a user's function on first use.

        Raises ApplicationError BAD_INPUT if that cannot be had; a later call tries again.
        """
        with self._lock:
            if (run_id, env) not in self._made:
                config = self._ctx.config(run_id)
                try:
                    made = build(config.algorithm(env), seq_len=config.trainer.seq_len)
                except CreditError as error:
                    raise bad_input(error) from error
                self._made[run_id, env] = made
            return self._made[run_id, env]


def check_algorithms(config: RunConfig) -> list[CheckProblem]:
    """Imports each user's function that a run names; blocks for as long as that takes."""
    places: list[tuple[str, AlgorithmConfig | None]] = [("algo", config.algo)]
    places += [(f"train.env.{i}.algo", env.algo) for i, env in enumerate(config.train.env)]
    problems = []
    for key, algo in places:
        if not isinstance(algo, CustomConfig):
            continue
        try:
            load_function(algo)
        except CreditError as error:
            pointer = "/" + key.replace(".", "/") + "/function"
            problems.append(CheckProblem(pointer, f"{key}.function", str(error)))
    return problems


class AlgorithmActivities:
    """Activities about algorithms themselves."""

    def __init__(self, ctx: WorkerContext) -> None:
        self.ctx = ctx

    @activity.defn(name=names.CHECK_ALGORITHMS)
    async def check_algorithms(self, given: CheckInput) -> CheckResult:
        """Problems of the functions that the config names."""
        config = RunConfig.model_validate(given.config)
        async with heartbeats():
            return CheckResult(await asyncio.to_thread(check_algorithms, config))
