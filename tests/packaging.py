"""Builds the distribution and installs it in a virtual environment away from the checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from tests import ROOT

BIN = Path(sys.executable).parent


def build(source: Path, target: str, out: Path) -> Path:
    """Builds the `target` ("wheel" or "sdist") of a source tree, without a network."""
    done = run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out, cwd=source)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


def unpack(sdist: Path, out: Path) -> Path:
    """The source tree of an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    (tree,) = out.iterdir()
    return tree


def wheel_of_sdist(folder: Path) -> Path:
    """The wheel of the checkout by way of its sdist, built within a folder."""
    tree = unpack(build(ROOT, "sdist", folder / "sdist"), folder / "tree")
    return build(tree, "wheel", folder / "wheel")


def contents(wheel: Path) -> dict[str, int]:
    """The paths of the files in a wheel, each with its checksum."""
    with zipfile.ZipFile(wheel) as archive:
        return {file.filename: file.CRC for file in archive.infolist()}


class Venv:
    """A virtual environment with one wheel.

    With `borrow` it finds what else it needs among the packages of this process's environment, but
    for the editable `ratchet` there: the interpreter reads no .pth file of a borrowed folder.
    """

    def __init__(self, folder: Path, wheel: Path, *, borrow: bool) -> None:
        self.bin = folder / "bin"
        self.away = folder / "away"
        uv = BIN / "uv"
        done = run(uv, "venv", "-q", "--python", sys.executable, folder)
        assert done.returncode == 0, done.stderr
        self.away.mkdir()
        offline = ["--no-deps", "--offline"] if borrow else []
        done = run(uv, "pip", "install", "-q", "--python", self.bin / "python", *offline, wheel)
        assert done.returncode == 0, done.stderr
        (self.packages,) = folder.glob("lib/python3.*/site-packages")
        if borrow:
            (self.packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(
        self, command: str, *arguments: Any, limit_s: float = 120, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of the environment in an empty folder."""
        return run(self.bin / command, *arguments, cwd=self.away, env=env, limit_s=limit_s)

    def python(self, code: str, **env: str) -> str:
        """What a piece of code prints."""
        done = run(self.bin / "python", "-c", code, cwd=self.away, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout


def run(
    *command: Any, cwd: Path = ROOT, env: dict[str, str] | None = None, limit_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs a command with nothing of this process's Python path."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, **(env or {})},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
