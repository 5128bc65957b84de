"""Algorithms of runs on a rollout worker: built once per run and env, and checked before a run.

A user's function is imported here, in the process that will call it; no other code of the user's
is. Models that an algorithm queries are passed to it here: a frozen one from its config, the policy
itself at the engine that served the group.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence

from temporalio import activity

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import (
    CheckInput,
    CheckProblem,
    CheckResult,
    without_secrets,
)
from ratchet.activities.contracts.rollouts import EngineTarget
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.failing import final
from ratchet.activities.runtime.heartbeat import heartbeats
from ratchet.activities.scoring.algorithms import Algorithm, CreditError, Reference, Render, build
from ratchet.activities.scoring.algorithms.custom import load_function
from ratchet.activities.scoring.reference_check import check_references
from ratchet.activities.scoring.references import ReferenceLost, References
from ratchet.configs.algorithm import teacher_of
from ratchet.configs.base import FunctionSection
from ratchet.configs.pointers import pointer_to
from ratchet.configs.reference import FrozenModelConfig, ModelReference
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import read_config


class AlgorithmLibrary:
    """The algorithms of all runs of this process. Methods may be called from any thread.

    `load_render` builds what turns a run's messages into prompts of its policy; it may block.
    """

    def __init__(
        self, ctx: WorkerContext, load_render: Callable[[str], Render] | None = None
    ) -> None:
        self.references = References()
        self._ctx = ctx
        self._load_render = load_render
        self._made: dict[tuple[str, str], Algorithm] = {}
        self._renders: dict[str, Render] = {}
        self._lock = threading.Lock()

    def algorithm(self, run_id: str, env: str, engine: EngineTarget | None = None) -> Algorithm:
        """The algorithm of a train env; imports a user's function on first use.

        One that queries the policy does so at `engine`, which is why it is built for each call.
        Raises ApplicationError BAD_INPUT if it cannot be built; a later call tries again.
        """
        config = self._ctx.config(run_id)
        asks_policy = teacher_of(config.algorithm(env)) == "policy"
        with self._lock:
            if asks_policy:
                return self._build(run_id, config, env, engine)
            if (run_id, env) not in self._made:
                self._made[run_id, env] = self._build(run_id, config, env, engine)
            return self._made[run_id, env]

    def _build(
        self, run_id: str, config: RunConfig, env: str, engine: EngineTarget | None
    ) -> Algorithm:
        algo = config.algorithm(env)
        render = self._render(run_id) if algo.needs_render else None
        try:
            return build(
                algo,
                seq_len=config.trainer.seq_len,
                reference=self._reference(teacher_of(algo), engine),
                render=render,
            )
        except CreditError as error:
            raise final(names.BAD_INPUT, error) from error

    def _reference(
        self, teacher: ModelReference | None, engine: EngineTarget | None
    ) -> Reference | None:
        if teacher is None:
            return None
        if isinstance(teacher, FrozenModelConfig):
            return self.references.frozen(teacher)
        return self.references.live(engine.url, engine.model) if engine else _NoEngine()

    def _render(self, run_id: str) -> Render:
        if run_id not in self._renders:
            assert self._load_render is not None, "this process has no renderer for algorithms"
            self._renders[run_id] = self._load_render(run_id)
        return self._renders[run_id]


class _NoEngine:
    """The policy of a group that no engine served; such a group has nothing to score."""

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        raise ReferenceLost("a group has no engine of the policy to score it", live=True)


def check_algorithms(config: RunConfig) -> list[CheckProblem]:
    """Imports each user's function that a run names; blocks for as long as that takes."""
    problems = []
    for key, algo in config.algorithm_sections().items():
        if not isinstance(algo, FunctionSection):
            continue
        try:
            load_function(algo)
        except CreditError as error:
            place = f"{key}.function"
            problems.append(CheckProblem(pointer_to(place), place, str(error)))
    return problems


class AlgorithmActivities:
    """Activities that check algorithms."""

    def __init__(self, ctx: WorkerContext) -> None:
        self.ctx = ctx

    @activity.defn(name=names.CHECK_ALGORITHMS)
    async def check_algorithms(self, input: CheckInput) -> CheckResult:
        """Problems of the functions and of the models that the config names."""
        config = read_config(input.config)
        async with heartbeats():
            problems = await asyncio.to_thread(check_algorithms, config)
            problems += await check_references(config)
            return CheckResult(without_secrets(problems))
