"""Copies of a tree, in which tests run.

Invariants: the tree itself is never changed; what runs in a copy, and every process that it starts
by its own interpreter, imports the copy's code and nothing of the tree.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RUNNER = Path(__file__).with_name("runner.py")


@dataclass
class Copy:
    """A copy of a tree, and the process that runs tests in it."""

    root: Path
    _runner: subprocess.Popen[str]

    @staticmethod
    @contextmanager
    def of(tree: Path, root: Path, warm: tuple[str, ...]) -> Iterator["Copy"]:
        """Copies what git tracks or would track, links as links; `warm` is imported once."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=tree, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            source, target = tree / name, root / name
            if os.path.lexists(source):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        python = _interpreter(root)
        # A mutant of the same length and second would be taken for the original otherwise.
        hashed = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
        subprocess.run([python, *hashed, "ratchet"], cwd=root, check=False)
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        runner = subprocess.Popen(
            [python, "-P", RUNNER, *warm],
            cwd=root,
            env={**inherited, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Copy(root, runner)
        finally:
            runner.communicate()

    def run(
        self, files: list[str], limits: dict[str, float], rooms: tuple[str, ...] = ()
    ) -> tuple[int, str]:
        """Runs tests of some files, those that have limits in seconds or else all, to measure them:
        the exit status of pytest or the signal, and what the runner noted.
        """
        out = Path(f"{self.root}.out")
        out.write_text("")
        request = {"files": files, "limits": limits, "rooms": rooms, "out": str(out)}
        assert self._runner.stdin is not None and self._runner.stdout is not None
        print(json.dumps(request), file=self._runner.stdin, flush=True)
        return int(self._runner.stdout.readline()), out.read_text()

    @contextmanager
    def changed(self, file: str, code: str) -> Iterator[None]:
        """Has `code` in place of a file."""
        original = (self.root / file).read_text()
        (self.root / file).write_text(code)
        try:
            yield
        finally:
            (self.root / file).write_text(original)


def _interpreter(root: Path) -> Path:
    """An interpreter that finds ratchet in a copy, and the packages of the one that runs here."""
    ours, own = Path(sys.executable), root / ".venv"
    packages = Path(sysconfig.get_path("purelib"))
    inside = own / packages.relative_to(sys.prefix)
    inside.mkdir(parents=True)
    (inside / "ratchet").symlink_to(root / "ratchet")
    (inside / "packages.pth").write_text(f"{packages}\n")
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), own)
    (own / "bin").mkdir()
    for program in ours.parent.iterdir():
        (own / "bin" / program.name).symlink_to(program)
    return own / "bin" / ours.name
