"""Judges a mutant: runs tests in a copy of the tree, the likely ones first.

Invariants: the tree itself is never changed; a copy holds one change at a time and is checked to be
what its tests import; tests count as noticing a change only if they pass without it.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOMS = {
    "activities/storage": (
        "tests/unit/activities/storage",
        "tests/unit/activities/training/test_fencing.py",
        "tests/unit/activities/runtime",
    ),
    "activities/training": ("tests/unit/activities/training",),
    "workflows/protocol": ("tests/unit/workflows",),
    "workflows/rules": ("tests/unit/workflows",),
    "workflows": ("tests/unit/workflows", "tests/workflow"),
}
"""The tests of a room, by the start of a file's path; the first that fits counts."""

UNFIT = "not alone and not long and not nightly and not gpu"
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider")
PROFILE = "mutants"
"""Of hypothesis, in tests/conftest.py: the same examples each time, and none made smaller."""
SPARE_S, TIMES = 30.0, 4.0
"""A run of tests may take this much longer than without the mutant, and this many times as long."""
FIRST_AT_MOST_S = 3600.0


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant, and the tests that noticed it."""

    killed: bool
    by: str = ""


class Broken(Exception):
    """The tests cannot judge: they fail, or are not there, without any mutant."""


@dataclass
class Copy:
    """A copy of a tree, in which tests run."""

    root: Path

    @staticmethod
    def of(tree: Path, root: Path) -> "Copy":
        """Copies what git tracks or would track, links as links."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=tree, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            source, target = tree / name, root / name
            if os.path.lexists(source):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        copy = Copy(root)
        where = "import ratchet.configs as room; print(room.__path__[0])"
        said = subprocess.run(
            [sys.executable, "-P", "-c", where],
            cwd=root,
            env=copy.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert Path(said.stdout.strip()).resolve().is_relative_to(root.resolve()), said.stdout
        return copy

    @property
    def environment(self) -> dict[str, str]:
        # No compiled files: a mutant of the same length and second would be taken for the original.
        return {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}

    def test(self, targets: tuple[str, ...], at_most_s: float) -> int | None:
        """The exit status of pytest; None if it took too long."""
        command = [sys.executable, "-P", "-m", "pytest", *OPTIONS, "-m", UNFIT, *targets]
        # Older trees lack it.
        if f'"{PROFILE}"' in (self.root / "tests" / "conftest.py").read_text():
            command.append(f"--hypothesis-profile={PROFILE}")
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(at_most_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass
class Judge:
    """Judges mutants in copies of a tree; what tests take without a mutant is measured once."""

    tree: Path
    took: dict[tuple[str, ...], float] = field(default_factory=dict)
    measuring: threading.Lock = field(default_factory=threading.Lock)

    def files(self) -> list[str]:
        """The files that are mutated, sorted."""
        paths = (path for room in ROOMS for path in (self.tree / room).rglob("*.py"))
        return sorted({str(path.relative_to(self.tree)) for path in paths})

    def stages(self, file: str) -> list[tuple[str, ...]]:
        """The tests that judge a mutant of a file: those of the same name, then its room's."""
        room = next(room for room in ROOMS if file.startswith(f"{room}/"))
        stem = Path(file).stem.strip("_")
        same = [
            str(path.relative_to(self.tree))
            for target in ROOMS[room]
            for path in sorted((self.tree / target).glob(f"**/test_{stem}*.py"))
        ]
        there = [(target,) for target in ROOMS[room] if (self.tree / target).exists()]
        return [tuple(same), *there] if same else there

    def judge(self, copy: Copy, file: str, code: str, stages: list[tuple[str, ...]]) -> Verdict:
        """Runs the stages with `code` in place of a file until one of them fails; raises Broken."""
        for targets in stages:
            self._measure(copy, targets)
            original = (copy.root / file).read_text()
            (copy.root / file).write_text(code)
            try:
                status = copy.test(targets, SPARE_S + TIMES * self.took[targets])
            finally:
                (copy.root / file).write_text(original)
            if status != 0:
                slow = " (took too long)" if status is None else ""
                return Verdict(True, " ".join(targets) + slow)
        return Verdict(False)

    def _measure(self, copy: Copy, targets: tuple[str, ...]) -> None:
        with self.measuring:
            if targets not in self.took:
                began = time.monotonic()
                status = copy.test(targets, FIRST_AT_MOST_S)
                if status != 0:
                    raise Broken(f"cannot judge, pytest ends with {status}: {' '.join(targets)}")
                self.took[targets] = time.monotonic() - began
