"""The page on using what was trained: its configs are valid, its commands and code run."""

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.training import adapters
from ratchet.activities.training.model import export
from ratchet.activities.training.policy import build_model
from ratchet.activities.training.tokenizer import build_tokenizer
from ratchet.api.client import cli
from ratchet.configs.load import load, validate
from ratchet.configs.model import ModelConfig
from ratchet.configs.trainer import LoraConfig
from tests import ROOT
from tests.unit.activities.training.conftest import SMALL
from tests.unit.api.client.support import on_server
from tests.unit.api.conftest import listening
from tests.unit.api.leaving import app_of, leave, put_eval

RUN = "reverse-1a2b3c"
PAGE = (ROOT / "docs" / "use-what-you-trained.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_readme_leads_there() -> None:
    assert "(docs/use-what-you-trained.md)" in (ROOT / "README.md").read_text()


def test_configs_are_valid(tmp_path: Path) -> None:
    kept, *whole = blocks("toml")
    for text in whole:
        (tmp_path / "config.toml").write_text(text)
        assert load(tmp_path / "config.toml").model.lineage
    run = 'max_steps = 1\n[[train.env]]\nid = "reverse-text"\n'
    (tmp_path / "config.toml").write_text(run + kept)
    assert load(tmp_path / "config.toml").checkpoint.keep_every == 10


def test_the_defaults_are_those_that_it_names() -> None:
    config = validate({"max_steps": 1, "train": {"env": [{"id": "e"}]}})
    assert f"(`retention.weights`, {config.retention.weights})" in PAGE
    assert "the last two (`checkpoint.keep_last`)" in PAGE and config.checkpoint.keep_last == 2


def test_commands_have_the_options_that_it_names() -> None:
    lines = [line for text in blocks("sh") for line in text.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("ratchet ")]
    assert len(commands) == 7
    root = typer.main.get_command(cli.app)
    for _, *arguments in commands:
        assert isinstance(root, TyperGroup)
        context = root.make_context("ratchet", [*arguments], resilient_parsing=True)
        group: Any = root.commands[arguments[0]]
        command = group.commands[arguments[1]]
        command.make_context(arguments[1], arguments[2:], parent=context)


def test_an_adapter_loads_on_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = build_model(SMALL, 7)
    export(base, build_tokenizer(SMALL.max_positions), tmp_path / "my-base")
    adapters.write(adapters.adapt(base, LoraConfig(), ModelConfig()), tmp_path / "my-adapter")
    names: dict[str, Any] = {}
    exec(blocks("python")[0], names)
    assert names["model"].peft_config["default"].r == 16


@on_server
async def test_its_code_exports_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ArtifactStore(f"file://{tmp_path}/store")
    evals = {"env": [{"id": "reverse-text", "name": "my-eval"}]}
    leave(store, RUN, weights=[0], eval=evals)
    made = tmp_path / "made"
    export(build_model(SMALL, 7), build_tokenizer(SMALL.max_positions), made)
    store.put_folder(keys.weights(RUN, 3), made, attempt="t")
    put_eval(store, RUN, "my-eval", 3, 0.75)
    monkeypatch.chdir(tmp_path)
    _, first, second = (text.replace("RUN", RUN) for text in blocks("python"))
    async with listening(app_of(store)) as http:
        monkeypatch.setenv("RATCHET_API", str(http.base_url).rstrip("/"))
        await asyncio.to_thread(exec, first, {})
    assert capsys.readouterr().out == "3 {'my-eval': 0.75}\n"
    await asyncio.to_thread(exec, second, {})
    assert capsys.readouterr().out.strip() != ""
