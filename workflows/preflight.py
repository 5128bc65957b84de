"""Checks that only a worker can make: does the taskset load, does the model folder hold a model.

Runs before anything is started, on the env and trainer queues side by side.
"""

import asyncio
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.contracts import names
    from activities.contracts.checks import CheckInput, CheckProblem, CheckResult
    from workflows import policies
    from workflows.messages import PREFLIGHT, PreflightInput


async def run_preflight(arg: PreflightInput) -> CheckResult:
    """All problems of the config that workers can see, and the number of examples per env."""

    async def check(name: str, queue: str, summary: str) -> CheckResult:
        try:
            result: CheckResult = await workflow.execute_activity(
                name,
                CheckInput(arg.config),
                result_type=CheckResult,
                task_queue=queue,
                start_to_close_timeout=policies.PREFLIGHT_TIMEOUT,
                heartbeat_timeout=policies.HEARTBEAT,
                retry_policy=policies.LIGHT,
                summary=summary,
            )
            return result
        except ActivityError as error:
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.type == names.BAD_INPUT:
                return CheckResult([CheckProblem("", "(config)", str(cause))])
            raise

    checks = [
        check(names.CHECK_ENVS, arg.queues.env, "check the environments"),
        check(names.CHECK_MODEL, arg.queues.trainer, "check the model"),
    ]
    if _names_a_function(arg.config):
        summary = "check the custom algorithm"
        checks.append(check(names.CHECK_ALGORITHMS, arg.queues.rollout, summary))
    results = await asyncio.gather(*checks)
    return CheckResult(
        problems=[problem for result in results for problem in result.problems],
        examples={name: count for result in results for name, count in result.examples.items()},
    )


def _names_a_function(config: dict[str, Any]) -> bool:
    """Whether a run's credit comes from a user's function, which only a worker can import."""
    places = [config, *config["train"]["env"]]
    return any((place.get("algo") or {}).get("type") == "custom" for place in places)


@workflow.defn(name=PREFLIGHT)
class Preflight:
    """The preflight on its own, for the API to answer 422 before a run exists."""

    @workflow.run
    async def run(self, arg: PreflightInput) -> CheckResult:
        """Returns what was found; starts nothing."""
        return await run_preflight(arg)
