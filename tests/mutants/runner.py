"""Runs tests in a copy of the tree, each time in a fresh fork: `python -P runner.py MODULE…`.

The modules are imported once, before any fork; ratchet and the tests are imported by the fork, as
the copy has them then. A line of JSON on stdin is a request, a line on
stdout its answer. Invariants: nothing that a request started lives on after it; a test that takes
longer than its limit ends the request.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import coverage
import pytest
from hypothesis import Phase, settings

PLUGINS = ("_hypothesis_pytestplugin", "pytest_asyncio.plugin")
OPTIONS = ("-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants")
UNFIT = "not alone and not long and not nightly and not gpu"
BETWEEN_S = 60.0
"""What collection, and what comes between and after tests, may take."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: what a fork leaves behind becomes a child of this process."""


class Chosen:
    """Runs the tests of the request, in its order, until one fails; notes which one is running."""

    def __init__(self, limits: dict[str, float], out: Path) -> None:
        self._limits, self._out = limits, out
        self._place = {name: place for place, name in enumerate(limits)}

    def limit(self, name: str) -> float | None:
        """Seconds for a test, which the request names with or without its parameters."""
        return self._limits.get(name, self._limits.get(name.partition("[")[0]))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = (item for item in items if self.limit(item.nodeid) is not None)
        items[:] = sorted(chosen, key=lambda item: self._place.get(item.nodeid, 0))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._out.write_text(item.nodeid)
        signal.setitimer(signal.ITIMER_REAL, self.limit(item.nodeid) or BETWEEN_S)
        done = yield
        signal.setitimer(signal.ITIMER_REAL, BETWEEN_S)
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(1)


class Measured:
    """Notes for each test that passes what it takes, and the lines that it executes."""

    def __init__(self, rooms: list[str], out: Path) -> None:
        include = [f"{os.path.realpath(room)}/*" for room in rooms]
        self._coverage = coverage.Coverage(None, include=include, config_file=False, messages=False)
        self._out, self._took, self._failed = out, dict[str, float](), set[str]()
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        began = time.monotonic()
        done = yield
        self._took[item.nodeid] = time.monotonic() - began
        self._coverage.switch_context("")
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        # What tests share is made once: its lines are those of every test of the file.
        if fixturedef.scope == "function":
            return (yield)
        self._coverage.switch_context("shared")
        made = yield
        self._coverage.switch_context(request._pyfuncitem.nodeid)
        return made

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data, lines = self._coverage.get_data(), defaultdict[str, dict[int, list[str]]](dict)
        passed = {name: took for name, took in self._took.items() if name not in self._failed}
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                tests = passed if "shared" in contexts else passed.keys() & set(contexts)
                if tests:
                    lines[os.path.relpath(file, os.path.realpath("."))][line] = sorted(tests)
        self._out.write_text(json.dumps({"took": passed, "lines": lines}))


def run(files: list[str], limits: dict[str, float], rooms: list[str], out: str) -> NoReturn:
    """Exits with pytest's status: runs the tests that have limits, or all, to measure them."""
    with Path(f"{out}.log").open("wb") as log, Path(os.devnull).open("rb") as nothing:
        for stream, to in enumerate((nothing, log, log)):
            os.dup2(to.fileno(), stream)
    plugin = Chosen(limits, Path(out)) if limits else Measured(rooms, Path(out))
    signal.setitimer(signal.ITIMER_REAL, BETWEEN_S if limits else 0.0)
    named = [option for plugin in PLUGINS for option in ("-p", plugin)]
    options = [*OPTIONS, *named, "-m", UNFIT, f"--basetemp={out}.tmp"]
    status = pytest.main([*options, *files], plugins=[plugin])
    os._exit(status)


def end_what_is_left() -> None:
    """Kills all children, and theirs, which become children of this process then."""
    while left := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, left):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def main() -> None:
    """Entry point; see the module's documentation."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    # The same verdict each time, and no failure is made smaller.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutants", deadline=None, derandomize=True, database=None, phases=phases
    )
    for name in (*PLUGINS, *sys.argv[1:]):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if (child := os.fork()) == 0:
            try:
                run(**request)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        end_what_is_left()
        print(status, flush=True)


if __name__ == "__main__":
    main()
