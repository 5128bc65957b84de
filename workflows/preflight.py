"""Checks that only workers can make: does the taskset load, does the model folder hold a model.

Runs before anything is started, on the env and trainer queues side by side.
"""

import asyncio
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import (
    CheckInput,
    CheckProblem,
    CheckResult,
    load_limits,
)
from ratchet.configs.pointers import pointer_to
from ratchet.configs.upgrades import read_config
from ratchet.workflows.protocol.activities import (
    CHECK_ALGORITHMS,
    CHECK_ENVS,
    CHECK_MODEL,
    Activity,
)
from ratchet.workflows.protocol.messages import PREFLIGHT, PreflightInput
from ratchet.workflows.rules.curriculum import too_large

LOADING_SLACK_S = 60.0
OUTSIDE = ("custom", "echo", "opd", "opsd", "sft")


async def run_preflight(arg: PreflightInput) -> CheckResult:
    """All problems of the config that workers find, the number of examples per env, the run's needs
    of memory and disk, and the cores that its envs have.
    """

    config = read_config(arg.config)

    async def check(
        activity: Activity[CheckInput, CheckResult],
        summary: str,
        timeout: timedelta | None = None,
    ) -> CheckResult:
        try:
            input = CheckInput(arg.config, arg.restored)
            return await activity(input, arg.queues, summary, timeout=timeout)
        except ActivityError as error:
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.type == names.BAD_INPUT:
                return CheckResult([CheckProblem("", "(config)", str(cause))])
            raise

    # The activity bounds each process that loads environments; this bounds a worker that hangs.
    loading = timedelta(seconds=max(load_limits(config).values()) + LOADING_SLACK_S)
    checks = [
        check(CHECK_ENVS, "check the environments", loading),
        check(CHECK_MODEL, "check the model"),
    ]
    if _looks_outside(arg.config):
        summary = "check what the algorithms name: functions, models, renderers"
        checks.append(check(CHECK_ALGORITHMS, summary))
    results = await asyncio.gather(*checks)
    problems = [problem for result in results for problem in result.problems]
    examples = {name: count for result in results for name, count in result.examples.items()}
    # A restored run may continue with the counts that it began with.
    if not problems and not arg.restored:
        problems = [
            CheckProblem(pointer_to(key), key, message)
            for key, message in too_large(config, examples)
        ]
    estimates = {what: parts for result in results for what, parts in result.estimates.items()}
    return CheckResult(problems, examples, estimates, max(result.cores for result in results))


def _looks_outside(config: dict[str, Any]) -> bool:
    """Whether an algorithm uses something that only a worker can check: a user's function, another
    model, a renderer that attributes tokens.
    """
    places = [config, *config["train"]["env"]]
    return any((place.get("algo") or {}).get("type") in OUTSIDE for place in places)


@workflow.defn(name=PREFLIGHT)
class Preflight:
    """The preflight on its own, for the API to answer 422 before a run exists."""

    @workflow.run
    async def run(self, arg: PreflightInput) -> CheckResult:
        """Returns the results; starts nothing."""
        return await run_preflight(arg)
