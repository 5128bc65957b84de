"""What a shell is given to find the local stack."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ratchet.worker.shell import PROFILE, exports


def _started(home: Path, **ports: int) -> Path:
    (home / "stack.json").write_text(json.dumps({"ports": ports, "processes": {}}))
    return home


def test_a_shell_finds_the_commands_and_the_stack(tmp_path: Path) -> None:
    home = tmp_path / "it's a home"
    home.mkdir()
    lines = exports(_started(home, api=8081, temporal=7299), {})
    lines += ['echo "$RATCHET_HOME"', 'echo "$TEMPORAL_CONFIG_FILE"']
    lines += ["command -v temporal", "command -v ratchet"]
    command = ["sh", "-c", "\n".join(lines)]
    done = subprocess.run(command, env={"PATH": "/bin"}, capture_output=True, text=True)
    beside = Path(sys.executable).parent
    expected = [home, home / PROFILE, beside / "temporal", beside / "ratchet"]
    assert done.stdout.splitlines() == [str(path) for path in expected]
    profile = tomllib.loads((home / PROFILE).read_text())["profile"]["default"]
    assert profile == {"address": "127.0.0.1:7299", "namespace": "default"}


def test_a_server_of_the_users_own_stays_the_one(tmp_path: Path) -> None:
    lines = exports(_started(tmp_path, api=8081), {"TEMPORAL_ADDRESS": "temporal.corp:7233"})
    assert not any("TEMPORAL" in line for line in lines)
    assert not (tmp_path / PROFILE).exists()


def test_a_shell_that_lacks_the_users_own_server_gets_a_warning(tmp_path: Path) -> None:
    ports = {"api": 8081, "temporal": 7299, "temporal_ui": 8233}
    for known in (ports, {"api": 8081}):
        record = {"ports": known, "processes": {"api": {"pid": 1, "started": 1.0}}}
        (tmp_path / "stack.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match="set TEMPORAL_ADDRESS"):
            exports(tmp_path, {})
    assert not (tmp_path / PROFILE).exists()


def test_without_a_stack_it_is_said_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make up"):
        exports(tmp_path, {})
    done = subprocess.run(
        [sys.executable, "-m", "ratchet.worker.shell"],
        env={"RATCHET_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == "" and "make up" in done.stderr
