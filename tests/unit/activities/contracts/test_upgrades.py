"""Documents of checkpoints and weights that no class decodes: which keys they must have."""

from typing import Any

import pytest

from ratchet.activities.contracts.upgrades import CANARY, CHECKPOINT_STATE, TRAINER_STATE
from ratchet.configs.versions import Versions

TRAINER = {key: f"a {key}" for key in TRAINER_STATE.keys}
"""Of the current schema; those before it lacked some."""
ADDED = {"lora", "base", "ranks"}
FIRST = {key: value for key, value in TRAINER.items() if key not in ADDED} | {"schema": 1}


@pytest.mark.parametrize("kind", [CANARY, CHECKPOINT_STATE, TRAINER_STATE])
def test_a_document_has_its_keys_and_no_other(kind: Versions) -> None:
    document = dict.fromkeys(kind.keys) | {"schema": kind.current}
    assert kind.keys and kind.upgraded(document) == document
    for key in kind.keys:
        less = {name: value for name, value in document.items() if name != key}
        with pytest.raises(ValueError, match=rf"lost keys \['{key}'\] and unknown ones \[\]"):
            kind.upgraded(less)
    with pytest.raises(ValueError, match=r"lost keys \[\] and unknown ones \['other'\]"):
        kind.upgraded(document | {"other": 1})


@pytest.mark.parametrize(
    ("lacked", "then"),
    [
        (set(), {"ranks": 1}),
        ({"optimizer", "config_revision"}, {"optimizer": "adamw", "config_revision": 0}),
    ],
)
def test_what_a_trainer_did_not_write_at_first(lacked: set[str], then: dict[str, Any]) -> None:
    old = {key: value for key, value in FIRST.items() if key not in lacked}
    now = {"schema": 3, "lora": None, "base": None, "ranks": 1, **then}
    assert TRAINER_STATE.upgraded(old, "trainer.json") == {**FIRST, **now}


@pytest.mark.parametrize("ranks", [{}, {"ranks": 4}])
def test_a_state_of_schema_2_may_name_its_ranks(ranks: dict[str, int]) -> None:
    old = {key: value for key, value in TRAINER.items() if key != "ranks"} | ranks
    now = TRAINER | {"ranks": 1, "schema": 3} | ranks
    assert TRAINER_STATE.upgraded({**old, "schema": 2}, "trainer.json") == now
