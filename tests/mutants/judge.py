"""Judges a mutant: runs the tests that execute the changed line, the likely ones first.

Invariants: a copy holds one change at a time; tests count as noticing a change only if they pass
without it. What a test takes and executes is measured once for its code and the product's.
"""

import ast
import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.copies import Copy

ROOMS = {
    "activities/storage": (
        "tests/unit/activities/storage",
        "tests/unit/activities/training/test_late_writers.py",
        "tests/unit/activities/training/test_token_logprobs.py",
        "tests/unit/activities/runtime",
    ),
    "activities/training": ("tests/unit/activities/training",),
    "workflows/protocol": ("tests/unit/workflows",),
    "workflows/rules": ("tests/unit/workflows",),
    "workflows": ("tests/unit/workflows", "tests/workflow"),
}
"""The tests of a room, by the start of a file's path; the first that fits counts."""
NEEDLESS = (
    "test_api.py",
    "test_compat.py",
    "test_kills.py",
    "test_rooms_are_hidden.py",
    "test_sandbox.py",
    "test_stack.py",
)
"""Files of tests that take long and execute nothing there which others do not."""
TOPS = ("activities", "api", "configs", "tests", "worker", "workflows")

WARM = (
    "fastapi.testclient",
    "httpx",
    "numpy",
    "prometheus_client",
    "pyarrow.compute",
    "pyarrow.parquet",
    "temporalio.contrib.pydantic",
    "temporalio.testing",
    "temporalio.worker",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
"""What is heavy and not ours, which no test imports again."""

BEHIND = {
    "activities/training/process.py": "activities/training/client.py",
    "workflows/protocol/messages.py": "workflows/rules/generation.py",
}
"""What runs in a process of its own or only declares, where no measurement sees it, and what tests
reach it by.
"""

SPARE_S, TIMES = 10.0, 4.0
"""A test may take this much longer than without the mutant, and this many times as long."""
AT_MOST_S, OF_FILE_S = 180.0, 60.0
"""What the tests of one mutant take without it, and those of one file with another name than its
own; the slowest are left out.
"""
BY_HAND_S = 300.0
NO_TESTS = 5
"""Pytest's status if it finds none."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant, and the test that noticed it."""

    killed: bool
    by: str = ""


class Broken(Exception):
    """The test cannot judge: it fails, or is not there, without any mutant."""


def room_of(file: str) -> str:
    """The room of a file that is mutated."""
    return next(room for room in ROOMS if file.startswith(f"{room}/"))


def state_of(tree: Path, test_file: str = "") -> str:
    """A digest of all code; with a file of tests, of what these tests may depend on."""
    digest = hashlib.sha256()
    for file in sorted(file for top in TOPS for file in (tree / top).rglob("*.py")):
        name = str(file.relative_to(tree))
        apart = name.startswith("tests/mutants/") or file.name.startswith("test_")
        if not test_file or name == test_file or not (name.startswith("tests/") and apart):
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@dataclass
class Judge:
    """Judges mutants in copies of a tree."""

    tree: Path
    warm: tuple[str, ...] = WARM
    took: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(dict))

    def files(self) -> list[str]:
        """The files that are mutated, sorted."""
        paths = (path for room in ROOMS for path in (self.tree / room).rglob("*.py"))
        return sorted({str(path.relative_to(self.tree)) for path in paths})

    def test_files(self, files: set[str]) -> list[str]:
        """The files of tests that may judge mutants of these files, the slow ones first."""
        targets = {self.tree / target for file in files for target in ROOMS[room_of(file)]}
        found = {
            str(path.relative_to(self.tree))
            for target in targets
            for path in ([target] if target.is_file() else target.rglob("test_*.py"))
            if path.name not in NEEDLESS
        }
        return sorted(found, key=lambda name: (not name.startswith("tests/workflow/"), name))

    def measure(self, copy: Copy, test_file: str, kept: Path) -> None:
        """Measures the tests of a file, unless that was done before."""
        path = kept / f"{state_of(self.tree, test_file)[:20]}.json"
        if not path.exists():
            status, noted = copy.run([test_file], {}, tuple(ROOMS))
            assert noted, f"cannot measure {test_file}, pytest ends with {status}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(noted)
        measured = json.loads(path.read_text())
        self.took |= measured["took"]
        for file, lines in measured["lines"].items():
            for line, tests in lines.items():
                self.lines[file].setdefault(int(line), set()).update(tests)

    def tests_of(self, file: str, line: int) -> list[str]:
        """The tests that execute a statement, those of the file's name and the quickest first. What
        is executed by an import has the tests of the whole file.
        """
        lines = self.lines[file]
        within, span = _around(ast.parse((self.tree / file).read_text()), line)
        found = {test for one in span for test in lines.get(one, ())}
        found.update(*self.lines[BEHIND.get(file, "")].values())
        stem, room = f"/test_{Path(file).stem.strip('_')}", ROOMS[room_of(file)]
        if not within:
            found.update(*lines.values())

        def likely(test: str) -> tuple[bool, float]:
            return stem not in test, self.took[test]

        chosen, spent = list[str](), Counter[str]()
        for test in sorted((one for one in found if one.startswith(room)), key=likely):
            of, took = test.partition("::")[0], self.took[test]
            of_file = took if stem in test else spent[of] + took
            if not chosen or (of_file <= OF_FILE_S and spent.total() + took <= AT_MOST_S):
                chosen.append(test)
                spent[of] += took
        return chosen

    def judge(self, copy: Copy, file: str, line: int, code: str, test: str = "") -> Verdict:
        """Runs tests with `code` in place of a file until one of them fails: `test`, which is seen
        to pass first, or those of the line; raises Broken.
        """
        if test:
            status, _ = copy.run(_files([test]), {test: BY_HAND_S})
            if status != 0:
                raise Broken(f"cannot judge, pytest ends with {status}: {test}")
        tests = [test] if test else self.tests_of(file, line)
        if not tests:
            return Verdict(False, "no test executes it")
        limits = {one: SPARE_S + TIMES * self.took.get(one, BY_HAND_S) for one in tests}
        with copy.changed(file, code):
            status, at = copy.run(_files(tests), limits)
        if status == NO_TESTS:
            raise Broken(f"cannot judge {file}:{line}, pytest finds none of {tests}")
        # A mutant that cannot be imported is noticed before any test begins.
        at = at or "the import of its tests"
        return Verdict(status != 0, f"{at} (took too long)" if status < 0 else at)


def _files(tests: list[str]) -> list[str]:
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))


def _around(tree: ast.Module, line: int) -> tuple[bool, range]:
    """Whether a line is inside a function, and the lines of its statement: of one that has a body,
    those of its head.
    """
    within, span = False, range(line, line + 1)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = node.cases[0].pattern if isinstance(node, ast.Match) else None
            body = body or next(iter(getattr(node, "body", ())), None)
            end = (node.end_lineno or 0) + 1 if body is None else body.lineno
            span = range(node.lineno, end) if line < end else range(line, line + 1)
            if line >= end and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                within = True
    return within, span
