"""What of a run's config decides its data."""

from typing import Any

import pytest

from ratchet.configs.load import ConfigError, validate
from ratchet.configs.run import RunConfig, data_of


@pytest.mark.parametrize(
    ("env", "same"),
    [
        ({"log_level": "debug"}, True),
        ({"start_timeout_s": 900}, True),
        ({"ratio": 3}, True),
        ({"workers": 4}, True),
        ({"args": {"n": 1}}, False),
    ],
)
def test_how_an_env_is_served_decides_no_data(env: dict[str, Any], same: bool) -> None:
    before, after = (
        validate({"max_steps": 1, "train": {"env": [{"id": "a", **more}]}}) for more in ({}, env)
    )
    assert (data_of(before) == data_of(after)) is same


def _pushing(transfer: str, lora: dict[str, Any] | None, **trainer: Any) -> RunConfig:
    return validate(
        {
            "max_steps": 1,
            "train": {"env": [{"id": "a"}]},
            "trainer": {"lora": lora, **trainer},
            "inference": {"transfer": transfer},
        }
    )


@pytest.mark.parametrize(
    ("lora", "trainer", "why"),
    [
        (None, {}, "trainer.lora is not set"),
        ({"modules_to_save": ["embed_tokens"]}, {}, "with trainer.lora.modules_to_save"),
        ({"targets": ["q_proj", "lm_head"]}, {}, "the output head is among trainer.lora.targets"),
        ({"rank": 513}, {}, "ranks up to 512, and trainer.lora.rank is 513"),
        ({}, {"ranks": 2}, "trainer.ranks is 2"),
    ],
)
def test_what_cannot_be_pushed_as_an_adapter_alone_is_refused_or_merged(
    lora: dict[str, Any] | None, trainer: dict[str, Any], why: str
) -> None:
    assert _pushing("auto", lora, **trainer).transfer == "store"
    assert _pushing("store", lora, **trainer).transfer == "store"
    with pytest.raises(ConfigError, match=why):
        _pushing("adapter", lora, **trainer)


@pytest.mark.parametrize("lora", [{}, {"targets": ["q_proj"], "rank": 512}])
def test_an_adapter_is_pushed_alone_where_it_is_asked_for(lora: dict[str, Any]) -> None:
    found = {named: _pushing(named, lora).transfer for named in ("store", "auto", "adapter")}
    assert found == {"store": "store", "auto": "adapter", "adapter": "adapter"}
