"""The page on evaluating: its configs are valid, its commands have their options, its code runs."""

import asyncio
import json
import re
import shlex
import tomllib
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from ratchet.api.client import cli
from ratchet.configs.evaluation import evaluations
from ratchet.configs.load import validate
from tests import ROOT
from tests.unit.api.client.support import on_server, serving
from tests.unit.api.conftest import Served

PAGE = (ROOT / "docs" / "evaluate.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def lines(program: str) -> list[list[str]]:
    found = [line for text in blocks("sh") for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in found if line.startswith(program)]


def test_pages_lead_there() -> None:
    assert "(docs/evaluate.md)" in (ROOT / "README.md").read_text()
    assert "(evaluate.md)" in (ROOT / "docs" / "use-what-you-trained.md").read_text()


def test_configs_are_valid() -> None:
    (text,) = blocks("toml")
    (plain,) = evaluations(tomllib.loads(text))
    assert validate(plain).eval_num_examples("reverse-text") == 200
    (call,) = lines("curl")
    made = validate(json.loads(call[-1]))
    assert not made.trains and made.model.lineage


def test_commands_have_the_options_that_it_names() -> None:
    root = typer.main.get_command(cli.app)
    assert isinstance(root, TyperGroup)
    commands = lines("ratchet ")
    assert len(commands) == 5
    for _, name, *arguments in commands:
        command: Any = root.commands[name]
        if name == "runs":
            command, arguments = command.commands[arguments[0]], arguments[1:]
        else:
            # The file need not be there.
            arguments = [__file__, *arguments[1:]]
        command.make_context(name, arguments)
    known = {flag for param in root.commands["eval"].params for flag in param.opts}
    assert set(re.findall(r"^\| `(--[a-z-]+)`", PAGE, re.M)) <= known


@on_server
async def test_its_code_evaluates(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks("python")
    async with serving(served) as address:
        monkeypatch.setenv("RATCHET_API", address)
        await asyncio.to_thread(exec, code, {})
    assert len(capsys.readouterr().out.split(",")) == 2
