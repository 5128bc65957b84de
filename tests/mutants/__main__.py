"""`make mutants`: which changes of the code no test notices.

Judges the mutations of by_hand.toml, each by its own test, and a sample of all mutants of the
rooms, which the seed draws. Exits with 1 if one of the list survives or the score is too low.
Verdicts are kept as they come, so that a run that was ended goes on.
"""

import argparse
import difflib
import hashlib
import json
import queue
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests import ROOT
from tests.mutants.copies import Copy
from tests.mutants.judge import Broken, Judge, Verdict, state_of
from tests.mutants.lists import by_hand, equivalents, stale
from tests.mutants.operators import mutants, mutated

BAR = 0.9


@dataclass(frozen=True)
class Case:
    """One change to judge: a mutant, or one made by hand, which has a test of its own."""

    name: str
    file: str
    line: int
    code: str
    old: str
    new: str
    test: str = ""

    @property
    def key(self) -> str:
        """The same for the same change of the same code, judged by the same tests."""
        said = json.dumps([self.file, self.code, self.test])
        return hashlib.sha256(said.encode()).hexdigest()


class Kept:
    """Verdicts that were reached before, a line of JSON each. What survived is judged again once
    anything in the tree has changed.
    """

    def __init__(self, path: Path, tree: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._state = state_of(tree)
        lines = path.read_text().splitlines() if path.exists() else []
        self.verdicts = {
            one["key"]: Verdict(one["killed"], one["by"])
            for one in map(json.loads, lines)
            if one["killed"] or one["state"] == self._state
        }
        self._path, self.folder = path, path.parent
        self._writing = threading.Lock()

    def add(self, case: Case, verdict: Verdict) -> None:
        """Keeps a verdict."""
        line = {"key": case.key, "name": case.name, "state": self._state, **asdict(verdict)}
        with self._writing, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def changed(before: str, after: str) -> tuple[str, str]:
    """The lines that a mutant takes and those that it makes, stripped."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    taken, made = (
        "\n".join(line[2:].strip() for line in lines if line.startswith(sign))
        for sign in ("- ", "+ ")
    )
    return taken, made


def drawn(judge: Judge, seed: int, count: int, only: str) -> Iterator[Case]:
    """The first `count` mutants that compile, in the order that the seed gives all of them."""
    files = [file for file in judge.files() if file.startswith(only)]
    everything = [one for file in files for one in mutants(judge.tree, file)]
    random.Random(seed).shuffle(everything)
    for mutant in everything:
        if count == 0:
            return
        source = (judge.tree / mutant.file).read_text()
        code = mutated(source, mutant)
        if code is not None:
            count -= 1
            yield Case(str(mutant), mutant.file, mutant.line, code, *changed(source, code))


def listed(judge: Judge, only: str) -> Iterator[Case]:
    """The mutations of the list, each with its own test."""
    for one in by_hand():
        if one.file.startswith(only):
            code = one.mutated(judge.tree)
            yield Case(one.name, one.file, 0, code, one.old, one.new, one.test)


def judged(
    judge: Judge, cases: list[Case], kept: Kept, jobs: int, say: Callable[[str], None]
) -> list[tuple[Case, Verdict]]:
    """The verdicts of all cases, `jobs` at a time, each in a copy of its own."""
    left = [case for case in cases if case.key not in kept.verdicts]
    copies: queue.Queue[Copy] = queue.Queue()

    def measure(test_file: str) -> None:
        with _one_of(copies) as copy:
            judge.measure(copy, test_file, kept.folder)

    def one(case: Case) -> tuple[Case, Verdict]:
        verdict = kept.verdicts.get(case.key)
        if verdict is None:
            with _one_of(copies) as copy:
                try:
                    verdict = judge.judge(copy, case.file, case.line, case.code, case.test)
                    kept.add(case, verdict)
                except Broken as broken:
                    verdict = Verdict(False, str(broken))
        say(f"{'killed' if verdict.killed else 'SURVIVED'}  {case.name}  {verdict.by}")
        return case, verdict

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
        for number in range(min(jobs, len(left))):
            copy = Copy.of(judge.tree, scratch / str(number), judge.warm)
            copies.put(stack.enter_context(copy))
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        list(pool.map(measure, judge.test_files({case.file for case in left if not case.test})))
        return list(pool.map(one, cases))


@contextmanager
def _one_of(copies: "queue.Queue[Copy]") -> Iterator[Copy]:
    copy = copies.get()
    try:
        yield copy
    finally:
        copies.put(copy)


def main() -> int:
    """Entry point; see the module's documentation."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="mutants to draw (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (%(default)s)")
    parser.add_argument("--only", default="", help="the start of the paths of files to change")
    parser.add_argument("--by-hand", action="store_true", help="judge only the list")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout to draw from")
    parser.add_argument("--kept", type=Path, default=ROOT / ".ratchet/mutants/verdicts.jsonl")
    arguments = parser.parse_args()

    def say(text: str) -> None:
        print(text, flush=True)

    judge, kept = Judge(arguments.tree.resolve()), Kept(arguments.kept, arguments.tree)
    own = judge.tree == ROOT
    if own and (wrong := stale(ROOT)):
        say("\n".join(wrong))
        return 1
    faults = list(listed(judge, arguments.only)) if own else []
    sample = (
        []
        if arguments.by_hand
        else [*drawn(judge, arguments.seed, arguments.count, arguments.only)]
    )
    alike = {(one.file, one.old, one.new) for one in equivalents()}
    counted = [case for case in sample if (case.file, case.old, case.new) not in alike]
    say(f"{len(faults)} mutations made by hand, {len(sample)} drawn with seed {arguments.seed}")
    verdicts = judged(judge, [*faults, *counted], kept, arguments.jobs, say)
    missed = [case for case, verdict in verdicts[: len(faults)] if not verdict.killed]
    survivors = [case for case, verdict in verdicts[len(faults) :] if not verdict.killed]
    for case in (*missed, *survivors):
        say(f"\nsurvived: {case.name}")
        say("\n".join(f"  - {line}" for line in case.old.splitlines()))
        say("\n".join(f"  + {line}" for line in case.new.splitlines()))
    score = 1 - len(survivors) / len(counted) if counted else 1.0
    result = {
        "by_hand": len(faults),
        "missed": len(missed),
        "drawn": len(sample),
        "equivalent": len(sample) - len(counted),
        "survived": len(survivors),
        "score": round(score, 3),
        "seed": arguments.seed,
    }
    say(f"\n{json.dumps(result)}")
    return int(bool(missed) or score < BAR)


if __name__ == "__main__":
    sys.exit(main())
