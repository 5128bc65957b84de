"""The page for those who come from elsewhere names keys of a config and methods that exist."""

import re
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from ratchet.api.client.client import Runs
from ratchet.configs.run import RunConfig
from tests import ROOT

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
SECTIONS = "|".join(RunConfig.model_fields)
KEYS = sorted(set(re.findall(rf"`((?:{SECTIONS})(?:\.\w+)+)(?: = [^`]+)?`", PAGE)))


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """All sections that a value of a type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _exists(key: str) -> bool:
    sections: list[type[BaseModel]] = [RunConfig]
    for name in key.split("."):
        fields = [cls.model_fields[name] for cls in sections if name in cls.model_fields]
        if not fields:
            return False
        sections = [section for field in fields for section in _sections(field.annotation)]
    return True


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_the_page_exists(key: str) -> None:
    theirs = {"trainer.model.seq_len", "model.ac", "model.lora", "model.optim_cpu_offload"}
    assert _exists(key) or key in theirs, key


def test_the_page_names_many_keys() -> None:
    assert len(KEYS) > 40
    assert not _exists("train.batch_sizes")
    assert not _exists("train.env.ratio.more")


def test_the_verbs_of_the_client_exist() -> None:
    verbs = re.search(r"`client\.runs\.([^`]+)`", PAGE)
    assert verbs is not None
    for verb in verbs[1].split(" / "):
        assert callable(getattr(Runs, verb)), verb
