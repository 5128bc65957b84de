"""What the preflight says about models that cannot be used."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.training.check import check_model, shape_of
from ratchet.configs.run import RunConfig
from tests.unit.activities.training.conftest import SMALL


def config(model: dict[str, Any], evals: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "eval": {"sampling": {"max_tokens": 16}, **(evals or {})},
            "max_steps": 1,
            "train": {"env": [{"id": "x"}], "sampling": {"max_tokens": 16}},
            "model": model,
            "trainer": {"seq_len": 256, **trainer},
        }
    )


def test_default_and_a_good_folder(policy: Path) -> None:
    assert check_model(config({})) == []
    assert check_model(config({"name": str(policy)})) == []


def test_unknown_warm_start_env() -> None:
    (problem,) = check_model(config({"warm_start_env": "chess"}))
    assert problem.pointer == "/model/warm_start_env"
    assert "chess" in problem.message and "reverse-text" in problem.message


def test_too_short_for_the_gate() -> None:
    (problem,) = check_model(config({}, seq_len=24))
    assert problem.pointer == "/trainer/seq_len" and "set it to 25 or more" in problem.message
    assert check_model(config({}, seq_len=25)) == []


def test_too_long_for_the_model(policy: Path) -> None:
    long = {"seq_len": 600, "micro_batch_tokens": 600}
    (problem,) = check_model(config({"name": str(policy)}, **long))
    assert problem.pointer == "/trainer/seq_len" and "512" in problem.message


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", "no weights"),
        ("tokenizer*", "no tokenizer"),
    ],
)
def test_folder_that_lacks_a_part(tmp_path: Path, policy: Path, without: str, says: str) -> None:
    for file in policy.iterdir():
        if not file.match(without):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (problem,) = check_model(config({"name": str(tmp_path)}))
    assert problem.pointer == "/model/name" and problem.key == "model.name"
    assert says in problem.message


def test_a_folder_of_pickles_holds_no_weights(tmp_path: Path, policy: Path) -> None:
    folder = shutil.copytree(policy, tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (problem,) = check_model(config({"name": str(folder)}))
    assert "no weights (*.safetensors)" in problem.message


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({}, "no model_type"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "BertModel"),
    ],
)
def test_folder_of_something_else(
    tmp_path: Path, policy: Path, about: dict[str, Any], says: str
) -> None:
    for file in policy.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(about))
    (problem,) = check_model(config({"name": str(tmp_path)}))
    assert says in problem.message


@pytest.mark.nightly
def test_renderer_needs_its_specials(tmp_path: Path, policy: Path) -> None:
    for file in policy.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    plain = (tmp_path / "tokenizer.json").read_text().replace("<|im_end|>", "<|stop|>")
    (tmp_path / "tokenizer.json").write_text(plain)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (problem,) = check_model(config({"name": str(tmp_path), "renderer": "ratchet-chatml"}))
    assert "<|im_end|>" in problem.message and "model.renderer" in problem.message
    for fits in ("auto", "default"):
        assert check_model(config({"name": str(tmp_path), "renderer": fits})) == []


def test_a_tokenizer_without_a_template_needs_a_renderer(tmp_path: Path, policy: Path) -> None:
    shutil.copytree(policy, tmp_path / "policy")
    (tmp_path / "policy" / "chat_template.jinja").unlink()
    name = str(tmp_path / "policy")
    assert check_model(config({"name": name})) == [], "it has ChatML's tokens"
    evals = {"env": [{"id": "reverse-text"}]}
    (problem,) = check_model(config({"name": name}, evals=evals))
    assert problem.key == "eval.client" and "set eval.client to 'tokens'" in problem.message
    assert check_model(config({"name": name}, evals={**evals, "client": "tokens"})) == []
    (problem,) = check_model(config({"name": name, "renderer": "default"}))
    assert problem.key == "model.renderer" and "no chat template; set" in problem.message
    about = tmp_path / "policy" / "tokenizer.json"
    about.write_text(about.read_text().replace("<|im_end|>", "<|stop|>"))
    (tmp_path / "policy" / "tokenizer_config.json").write_text("{}")
    (problem,) = check_model(config({"name": name}))
    assert problem.key == "model.renderer"
    assert "neither a chat template nor ChatML's tokens; set model.renderer" in problem.message


@pytest.mark.nightly
def test_a_renderer_must_do_what_the_template_does(tmp_path: Path, policy: Path) -> None:
    shutil.copytree(policy, tmp_path / "policy")
    template = tmp_path / "policy" / "chat_template.jinja"
    template.write_text("{{ 'Be kind. ' }}" + template.read_text())
    name = str(tmp_path / "policy")
    (problem,) = check_model(config({"name": name, "renderer": "ratchet-chatml"}))
    assert problem.key == "model.renderer"
    assert "conversation 'one turn': token 0" in problem.message
    assert check_model(config({"name": name})) == []


def test_names_that_are_nothing() -> None:
    (problem,) = check_model(config({"name": "/no/such/folder"}))
    assert "no folder" in problem.message
    (problem,) = check_model(config({"name": "a/b/c"}))
    assert "neither a folder nor a hub name" in problem.message


def test_custom_loss(tmp_path: Path) -> None:
    loss = {"type": "custom", "function": "mine:f"}
    (problem,) = check_model(config({}, loss=loss))
    assert problem.pointer == "/trainer/loss/function" and "'mine'" in problem.message
    (problem,) = check_model(config({}, loss={**loss, "path": str(tmp_path)}))
    assert problem.pointer == "/trainer/loss/path"
    (tmp_path / "mine.py").touch()
    assert check_model(config({}, loss={**loss, "path": str(tmp_path)})) == []


def test_the_shape_of_a_folder_is_that_of_its_model(tmp_path: Path, policy: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    assert shape_of(config({"name": str(policy)}), store) == SMALL.shape
