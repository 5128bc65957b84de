"""`ratchet env-server`: a real server started by hand, and what keeps one from being started."""

import asyncio
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from ratchet.activities.envs.probe import probe
from ratchet.activities.hosting.spec import free_port
from ratchet.api.client import cli_env
from ratchet.api.client.cli import app
from ratchet.api.client.cli_env import read_args
from ratchet.configs.env import EnvConfig
from tests import ROOT

PAGE = (ROOT / "docs" / "env-servers.md").read_text()
COMMAND = [sys.executable, "-m", "ratchet.api.client", "env-server"]


@pytest.mark.nightly
async def test_a_server_started_by_hand_answers(tmp_path: Path) -> None:
    """As `address` of a config wants it; its arguments are on no command line once it serves."""
    address = f"tcp://127.0.0.1:{free_port()}"
    args = json.dumps({"num_examples": 12, "seed": {"env_var": "MY_SEED"}})
    process = subprocess.Popen(
        [*COMMAND, "--id", "reverse-text", "--args", args, "--bind", address],
        env={**os.environ, "MY_SEED": "5", "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        async with asyncio.timeout(60):
            while await probe(address, 1.0) != "up":
                assert process.poll() is None, process.communicate()[1]
                await asyncio.sleep(0.1)
        line = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert "num_examples" not in line and "ratchet.activities.envs.server" in line
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bind", "0.0.0.0:5000"], "must have the form tcp://host:port"),
        (["--args", "[1]"], "must be a table"),
        (["--args", "n: 3"], "cannot be read"),
        (["--args", "@/no/such/file.toml"], "No such file"),
        (["--path", "/no/such/folder"], "does not exist"),
        (["--log-level", "loud"], "loud"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["env-server", "--id", "reverse-text", *arguments])
    assert done.exit_code == 2 and words in " ".join(re.sub(r"[│╭╰─╮╯]", "", done.stderr).split())


def test_an_install_without_the_extra_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_env, "NEEDED", "a_package_nobody_has")
    assert importlib.util.find_spec(cli_env.NEEDED) is None
    done = CliRunner().invoke(app, ["env-server", "--id", "reverse-text"])
    assert done.exit_code == 1 and "pip install 'ratchet-rl[rollout]'" in done.stderr


@pytest.mark.parametrize("text", ['{"n": 3}', "{ n = 3 }", "@args.toml", "@args.json"])
def test_arguments_are_json_or_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "args.toml").write_text("n = 3\n")
    (tmp_path / "args.json").write_text('{"n": 3}')
    assert read_args(text) == {"n": 3}


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def _parsed(words: list[str]) -> dict[str, Any]:
    """What the command makes of its arguments; the folder and file of the page are not there."""
    assert words[:2] == ["ratchet", "env-server"]
    words = [word for word in words[2:] if word not in ("--path", "/envs")]
    command = typer.main.get_command(app).commands["env-server"]  # type: ignore[attr-defined]
    found: dict[str, Any] = command.make_context("env-server", words).params
    return found


def test_the_page_says_what_the_command_takes() -> None:
    assert "(docs/env-servers.md)" in (ROOT / "README.md").read_text()
    (by_hand,) = [line for line in _blocks("sh")[0].splitlines() if line.startswith("ratchet")]
    (compose, kubernetes) = _blocks("yaml")
    service = yaml.safe_load(compose)["services"]["my-env"]
    deployment, exposed = yaml.safe_load_all(kubernetes)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for words in (shlex.split(by_hand), service["command"], container["command"]):
        found = _parsed(words)
        assert found["bind"] == "tcp://0.0.0.0:5000"
        if not found["args"].startswith("@"):
            assert read_args(found["args"]) == {"difficulty": 3}
    assert service["build"]["target"] == "rollout" and exposed["spec"]["ports"] == [{"port": 5000}]
    (section,) = re.findall(r'address = "(.*)"', _blocks("toml")[0])
    name = exposed["metadata"]["name"]
    assert EnvConfig(id="my-env", address=section).address == f"tcp://{name}:5000"
