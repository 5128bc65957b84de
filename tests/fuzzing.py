"""schemathesis against a served OpenAPI: no 5xx, no undocumented status, replies as described; also
with a key, and with headers that no client sends.
"""

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
ODD_NAMES = (
    "Authorization",
    "Host",
    "Origin",
    "Content-Type",
    "Accept",
    "Idempotency-Key",
    "Last-Event-ID",
    "Range",
    "If-None-Match",
    "X-Forwarded-For",
    "Expect",
    "Content-Encoding",
)
ODD_VALUES = (
    "",
    "Bearer",
    "Bearer  ",
    "Bearer rk_\xe9\xff",
    "Basic OnJrXw==",
    "[",
    "http://[::1",
    "http://a:99999999",
    "//",
    "application/json; charset=\xff",
    "application/toml",
    "text/event-stream, */*;q=x",
    "multipart/form-data",
    "bytes=9-1,-",
    "\x7f\t\xa0",
    "0." * 500,
    "a.-1.-1",
    "%00%ff",
    "x" * 7000,
)
"""What a header may hold on the wire, and no program of ours sends."""
UNREAD = b"Invalid HTTP request received."
"""What cannot be read as HTTP is answered so (400) by the server below the API."""
MADE_UP = ("after", "revision", "source", "step")
"""Parameters that lead nowhere when they are drawn at random: half of the requests lack them."""
ENDS = ("stop", "cancel")
"""What ends a run: these have one of their own each."""
AFTER = ("archive", "unarchive", "delete")
"""What is done to a run that has ended: these have one of their own each, too."""
UNLIKELY = {"PATCH /v1/runs/{run_id}"}
"""Hardly any change of many keys at random gives a config that can work."""


def agree(body: Any) -> None:
    """Makes a run's config train: that steps and train envs go together, no schema says."""
    if isinstance(body, dict) and isinstance(body.get("train"), dict) and "max_steps" in body:
        body["max_steps"] = 1 if body["max_steps"] == 0 else body["max_steps"]
        body["train"]["env"] = body["train"].get("env") or [{"id": "reverse-text"}]


def ask(
    operation: Any,
    mode: Any,
    known: dict[str, str],
    checks: list[Any],
    headers: dict[str, str],
    odd: st.SearchStrategy[dict[str, str]],
    examples: int,
) -> set[int]:
    """Sends many requests of one mode to an operation, half of them about what is `known`; returns
    the statuses that it answered with. Raises Unsatisfiable where none is of the mode.
    """
    reported: set[int] = set()

    @settings(
        max_examples=examples // 2,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), further=odd)
    def one(real: bool, case: Any, further: dict[str, str]) -> None:
        if real:
            names = case.path_parameters or {}
            names.update({name: known[name] for name in names})
            for name in MADE_UP:
                (case.query or {}).pop(name, None)
            if mode is GenerationMode.POSITIVE:
                agree(case.body)
        # Bytes: what no header of a well-behaved client holds is sent all the same.
        sent = {name: value.encode("latin-1") for name, value in {**headers, **further}.items()}
        response = case.call(timeout=30, headers=sent)
        reported.add(response.status_code)
        odd_ones = bool(further) or response.content == UNREAD
        case.validate_response(response, checks=[not_a_server_error] if odd_ones else checks)

    # Not by a drawn coin: hypothesis begins with the least there is, which each half is to have.
    one(True)
    one(False)
    return reported


def fuzz(
    url: str,
    about: dict[str, str],
    after: Callable[[str], None] = lambda operation: None,
    *,
    key: str = "",
    malformed: bool = False,
    examples: int = EXAMPLES,
) -> dict[str, set[int]]:
    """Asks every operation; returns the statuses that each answered with. What `about` names like
    an operation is the run that this one is about. `after` is called when an operation was asked.
    All requests carry the `key`, if there is one; half of those that may be `malformed` carry
    headers as no client sends them, too.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    odd = st.dictionaries(
        st.sampled_from(ODD_NAMES), st.sampled_from(ODD_VALUES), max_size=3 if malformed else 0
    )
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
        asked = (known, checks, headers, odd, examples)
        reported = ask(operation, GenerationMode.POSITIVE, *asked)
        # An operation that is given nothing can be given nothing wrong.
        with suppress(Unsatisfiable):
            reported |= ask(operation, GenerationMode.NEGATIVE, *asked)
        answered[operation.label] = reported
        after(operation.label)
    return answered


def undone(answered: dict[str, set[int]]) -> set[str]:
    """Operations of which no request was carried out, so that little is known of them."""
    done = {name for name, reported in answered.items() if any(status < 300 for status in reported)}
    return answered.keys() - done - UNLIKELY
