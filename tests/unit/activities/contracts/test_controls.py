"""Public signals: any payload is understood or ignored, and none raises."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.controls import CONTROLS, verb_of
from ratchet.activities.contracts.statuses import STATUSES


def heard(name: str, value: Any) -> tuple[dict[str, Any], str]:
    body, warning = CONTROLS[name].heard(value)
    return body.model_dump(), warning


@given(
    st.one_of(
        st.none(),
        st.binary(),
        st.text(),
        st.integers(),
        st.lists(st.none()),
        st.floats(),
        st.dictionaries(st.sampled_from(["reason", "mode", "envs", "env"]), st.integers()),
    )
)
def test_no_verb_raises_and_each_says_what_its_handler_reads(value: Any) -> None:
    for name, verb in CONTROLS.items():
        said, _ = heard(name, value)
        assert said.keys() == verb.body.model_fields.keys()
        assert verb.body.model_validate(said).model_dump() == said


@pytest.mark.parametrize(
    ("value", "envs", "warned"),
    [
        (None, [], False),
        ("b", ["b"], False),
        ({"envs": ["b", "x"]}, ["b", "x"], False),
        (b'{"env": "a"}', ["a"], False),
        ('["a"]', ["a"], False),
        ("", [], False),
        ([], [], False),
        ({}, [], False),
        (7, [], True),
    ],
)
def test_an_eval_reads_what_clis_send(value: Any, envs: list[str], warned: bool) -> None:
    said, warning = heard("eval", value)
    assert said == {"envs": envs, "reason": ""} and bool(warning) == warned


@pytest.mark.parametrize("envs", [None, [], ["b"]])
def test_an_eval_has_a_reason(envs: list[str] | None) -> None:
    said, _ = heard("eval", {"envs": envs, "reason": "a jump"})
    assert said == {"envs": envs or [], "reason": "a jump"}


@pytest.mark.parametrize(
    ("value", "mode", "reason"),
    [
        (None, "drain", ""),
        ("drain", "drain", ""),
        (b'"cancel"', "cancel", ""),
        ("the GPUs are needed", "drain", "the GPUs are needed"),
        ({"mode": "cancel", "reason": "lunch"}, "cancel", "lunch"),
        ('{"mode": "later", "reason": 7}', "drain", "7"),
        (["cancel"], "drain", ""),
        (7, "drain", ""),
    ],
)
def test_a_pause_reads_what_clis_send(value: Any, mode: str, reason: str) -> None:
    assert heard("pause", value) == ({"mode": mode, "reason": reason}, "")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, ""),
        ("enough", "enough"),
        (b'{"reason": "enough"}', "enough"),
        ({"reason": ""}, ""),
        ({"reason": 7}, "7"),
        (["enough"], ""),
        (7, ""),
        ("x" * 999, "x" * 200),
    ],
)
def test_a_stop_reads_what_clis_send(value: Any, reason: str) -> None:
    assert heard("stop", value) == ({"reason": reason}, "")


@pytest.mark.parametrize(
    "value",
    ["1" * 5000, "[" * 200_000, '"\\ud800"', b'"\\ud800"', {"reason": "\ud800"}, [["\ud800"] * 9]],
    ids=["huge number", "deep nest", "surrogate", "surrogate bytes", "in a dict", "in a list"],
)
def test_hostile_payloads_become_text_that_any_converter_carries(value: Any) -> None:
    for verb in CONTROLS.values():
        body, warning = verb.heard(value)
        (body.model_dump_json() + warning).encode()


def test_signal_names_have_spellings() -> None:
    for name, spellings in {
        "stop": "Stop stop-run stopRun STOP_RUN",
        "eval": "eval trigger-eval TriggerEval trigger_eval",
        "pause": "pause PauseRun",
        "resume": "resume unpause resume-run",
        "checkpoint": "Checkpoint saveCheckpoint",
    }.items():
        found = [verb_of(spelling) for spelling in spellings.split()]
        assert found == [CONTROLS[name]] * len(found)
    # A run is cancelled by Temporal, not by a signal.
    assert verb_of("reload") is verb_of("cancel") is verb_of("") is None


def test_a_verb_is_offered_where_it_is_not_refused_and_its_words_fit() -> None:
    for verb in CONTROLS.values():
        assert {*verb.offered, *verb.refused} <= {*STATUSES}
        assert not {*verb.offered} & {*verb.refused}
        fields = verb.body.model_fields
        assert {*verb.fields} <= {*fields} and {*fields} <= {*verb.labels}
        verb.body.model_validate(dict(verb.example))
