"""The two lists beside this file: mutations made by hand, and survivors that change nothing."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

BY_HAND = Path(__file__).with_name("by_hand.toml")
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True)
class ByHand:
    """A fault to put into `file`, and the test that must fail by it."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def mutated(self, root: Path) -> str:
        """The code with the fault in it; raises ValueError if the place is not there once."""
        source = (root / self.file).read_text()
        if source.count(self.old) != 1:
            times = source.count(self.old)
            raise ValueError(f"{self.name}: {self.file} has its old text {times} times, not once")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Equivalent:
    """A mutant that changes nothing that can be seen, as the lines that it takes and makes."""

    file: str
    old: str
    new: str
    reason: str


def by_hand() -> list[ByHand]:
    """The list of mutations made by hand."""
    return [ByHand(**one) for one in tomllib.loads(BY_HAND.read_text()).get("mutation", [])]


def equivalents() -> list[Equivalent]:
    """The list of mutants that change nothing."""
    return [Equivalent(**one) for one in tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])]


def stale(root: Path) -> list[str]:
    """What of the lists fits the code no more."""
    wrong = []
    for fault in by_hand():
        path, _, test = fault.test.partition("::")
        name = test.partition("[")[0]
        if not (root / path).is_file() or f"def {name}(" not in (root / path).read_text():
            wrong.append(f"{fault.name}: there is no test {fault.test}")
        try:
            compile(fault.mutated(root), fault.file, "exec")
        except (ValueError, FileNotFoundError, SyntaxError) as error:
            wrong.append(str(error))
    for one in equivalents():
        path = one.file
        lines = (root / path).read_text().splitlines() if (root / path).is_file() else []
        if one.old not in map(str.strip, lines):
            wrong.append(f"equivalent.toml: {path} has no line {one.old!r}")
    return wrong
