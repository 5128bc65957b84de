"""Sample changes: files and patches that a page shows, applied to a copy of the product and run.

A page's section holds its sample as fenced blocks: a Python block begins with the path of the file
that it adds, a diff block names the files that it changes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## How to add ")[1:])
LIMITS = {
    "an algorithm with state": 3,
    "a role": 3,
    "a weight transfer": 3,
    "a trainer backend": 3,
    "devices": 3,
    "a verb": 4,
    "a panel": 1,
    "a metric": 2,
}
"""The seams, and how many files of the product a sample of each may touch."""
ROOMS = ("configs", "activities", "workflows", "api", "worker")


def blocks(section: str, language: str) -> list[str]:
    """The blocks of a language in a section."""
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.M | re.S)


def modules(section: str) -> dict[str, str]:
    """The section's Python files by the path that each begins with."""
    return {
        block.split("\n", 1)[0].removeprefix("# "): block for block in blocks(section, "python")
    }


class Copy:
    """A copy of the product in a folder; `touches` are the files that samples added or changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.touches: set[str] = set()
        shutil.copytree(ROOT / "ratchet", root / "ratchet", symlinks=True)
        # Compiled files come along, each with the time of its source: starting is quick.
        for room in ROOMS:
            shutil.copytree(ROOT / room, root / room)

    def apply(self, section: str) -> None:
        """Puts a section's sample into the copy. A file without a folder is a user's own."""
        for path, text in modules(section).items():
            if "/" in path:
                assert not (self.root / path).exists()
                (self.root / path).write_text(text)
                self.touches.add(path)
        for diff in blocks(section, "diff"):
            self._patch(diff)

    def _patch(self, diff: str) -> None:
        """Applies hunks to the files that they name; each must fit in one place exactly."""
        for part in diff.split("+++ ")[1:]:
            path, body = part.split("\n", 1)
            text = (self.root / path).read_text()
            for hunk in body.split("@@\n"):
                lines = hunk.splitlines(keepends=True)
                old = "".join(line[1:] for line in lines if line[0] in " -")
                assert f"\n{text}".count(f"\n{old}") == 1, f"{path}:\n{hunk}"
                new = "".join(line[1:] for line in lines if line[0] in " +")
                text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
            (self.root / path).write_text(text)
            self.touches.add(path)

    def run(self, script: str, *args: str) -> Any:
        """What `script` prints as its last line, run on the copy."""
        done = subprocess.run(
            [sys.executable, "-P", "-c", script, *args],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root)},
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
