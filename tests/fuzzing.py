"""schemathesis against a served OpenAPI: no 5xx, no undocumented status, replies as described."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 10
"""Requests to one operation: as many that fit its description, and as many that do not."""
ENDS = ("stop", "cancel")
"""What ends a run: these have one of their own each."""
AFTER = ("archive", "unarchive", "delete")
"""What is done to a run that has ended: these have one of their own each, too."""
UNLIKELY = {"PATCH /v1/runs/{run_id}"}
"""Hardly any change of many keys at random gives a config that can work."""


def ask(operation: Any, mode: Any, known: dict[str, str], checks: list[Any]) -> set[int]:
    """Sends many requests of one mode to an operation, about half of them about what is `known`;
    returns the statuses that it answered with. Raises Unsatisfiable where none is of the mode.
    """
    told: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans())
    def one(case: Any, real: bool) -> None:
        if real:
            names = case.path_parameters or {}
            names.update({name: known[name] for name in names})
        response = case.call(timeout=30)
        told.add(response.status_code)
        case.validate_response(response, checks=checks)

    one()
    return told


def fuzz(
    url: str, about: dict[str, str], after: Callable[[str], None] = lambda operation: None
) -> dict[str, set[int]]:
    """Asks every operation; returns the statuses that each answered with. What `about` names like
    an operation is the run that this one is about. `after` is called when an operation was asked.
    """
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    answered: dict[str, set[int]] = {}
    for operation in (result.ok() for result in schema.get_all_operations()):
        ends = "delete" if operation.method == "delete" else operation.path.rpartition("/")[2]
        known = {**about, "run_id": about.get(ends, about["run_id"])}
        told = ask(operation, GenerationMode.POSITIVE, known, checks)
        # An operation that is given nothing can be given nothing wrong.
        with suppress(Unsatisfiable):
            told |= ask(operation, GenerationMode.NEGATIVE, known, checks)
        answered[operation.label] = told
        after(operation.label)
    return answered


def undone(answered: dict[str, set[int]]) -> set[str]:
    """Operations of which no request was carried out, so that little is known of them."""
    done = {name for name, told in answered.items() if any(status < 300 for status in told)}
    return answered.keys() - done - UNLIKELY
