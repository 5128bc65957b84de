"""What may be said of sampling where, and what of it reaches an engine."""

from typing import Any

import pytest

from ratchet.activities.rollouts import frozen
from ratchet.configs.env import SamplingConfig
from ratchet.configs.load import ConfigError, validate
from ratchet.configs.reference import FrozenModelConfig
from ratchet.configs.run import RunConfig

MODEL = {"base_url": "http://h:1/v1", "name": "m"}
SFT = {"type": "sft", "source": MODEL}


def config(train: dict[str, Any], **more: Any) -> RunConfig:
    return validate({"max_steps": 1, "train": {"env": [{"id": "a"}], **train}, **more})


def refused(train: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ConfigError) as error:
        config(train, **more)
    (problem,) = error.value.problems
    return problem.message


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
def test_a_truncated_distribution_is_for_evals_and_frozen_models_only(cut: dict[str, Any]) -> None:
    ((key, value),) = cut.items()
    message = refused({"sampling": cut})
    assert message.startswith(f"train sampling of 'a' has {key} = {value}: engines would sample")
    assert "drop it there (evals may have it, in [eval.sampling])" in message
    assert key in refused({"env": [{"id": "a", "sampling": cut}]})
    evals = {"env": [{"id": "a"}], "sampling": cut}
    assert config({}, eval=evals).sampling("a", "eval").truncation == cut
    own = config({}, eval={"env": [{"id": "a", "sampling": cut}]})
    assert own.sampling("a", "eval").truncation == cut
    assert config({"sampling": cut}, algo=SFT).sampling("a", "train").truncation == cut


def test_what_truncates_nothing_may_be_said_anywhere() -> None:
    plain = {"top_p": 1.0, "min_p": 0.0}
    assert config({"sampling": plain}).sampling("a", "train").truncation == {}


def test_a_frozen_model_has_no_stop_strings() -> None:
    stop = {"stop": ["\n"]}
    assert config({"sampling": stop}).sampling("a", "train").stop == ["\n"]
    assert "set `sampling` without `stop` on that env" in refused({"sampling": stop}, algo=SFT)
    without = {"env": [{"id": "a", "sampling": {}}], "sampling": stop}
    assert config(without, algo=SFT).sampling("a", "train").stop == []


@pytest.mark.parametrize(
    "wrong",
    [{"stop": [""]}, {"stop": ["a"] * 17}, {"top_p": 0.0}, {"top_k": 0}, {"min_p": 1.5}],
)
def test_values_that_no_engine_takes(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config({}, eval={"env": [{"id": "a"}], "sampling": wrong})


def test_a_request_leaves_out_what_changes_nothing() -> None:
    assert SamplingConfig().request() == {"temperature": 1.0, "max_tokens": 1024}
    said = {"temperature": 0.5, "max_tokens": 7, "stop": ["</a>"], "top_p": 0.9, "top_k": 3}
    assert SamplingConfig(**said, min_p=0.1).request() == {**said, "min_p": 0.1}


def test_a_frozen_model_is_sampled_as_its_env_says() -> None:
    model = FrozenModelConfig.model_validate(MODEL)
    asked = frozen.request(model, SamplingConfig(top_k=3), {})["sampling"]
    assert asked == {"temperature": 1.0, "max_tokens": 1024, "top_k": 3}
