"""Public signals: any payload is understood or ignored, and none raises."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.workflows.protocol.messages import normal_signal_name, parse_stop, parse_trigger_eval


@given(
    st.one_of(st.none(), st.binary(), st.text(), st.integers(), st.lists(st.none()), st.floats())
)
def test_public_signals_never_raise(value: Any) -> None:
    assert parse_stop(value).reason
    request, _ = parse_trigger_eval(value, ["a", "b"])
    assert set(request.envs) <= {"a", "b"}


@pytest.mark.parametrize(
    ("value", "envs", "warned"),
    [
        (None, ["a", "b"], False),
        ("b", ["b"], False),
        ({"envs": ["b", "x"]}, ["b"], True),
        (b'{"env": "a"}', ["a"], False),
        ('["a"]', ["a"], False),
        ("x", [], True),
        ({}, ["a", "b"], False),
        (7, ["a", "b"], True),
    ],
)
def test_trigger_eval_reads_what_clis_send(value: Any, envs: list[str], warned: bool) -> None:
    request, warning = parse_trigger_eval(value, ["a", "b"])
    assert request.envs == envs and bool(warning) == warned


@pytest.mark.parametrize(
    "value",
    ["1" * 5000, "[" * 200_000, '"\\ud800"', b'"\\ud800"', {"reason": "\ud800"}, [["\ud800"] * 9]],
    ids=["huge number", "deep nest", "surrogate", "surrogate bytes", "in a dict", "in a list"],
)
def test_hostile_payloads_become_text_that_any_converter_carries(value: Any) -> None:
    parse_stop(value).reason.encode()
    _, warning = parse_trigger_eval(value, ["a"])
    warning.encode()


def test_signal_names_have_spellings() -> None:
    spellings = ["Stop", "stop-run", "trigger-eval", "TriggerEval", "reload"]
    known = [normal_signal_name(name) for name in spellings]
    assert known == ["stop", "stop", "trigger_eval", "trigger_eval", "reload"]
