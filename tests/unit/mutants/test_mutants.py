"""`make mutants`: what it changes, what it leaves alone, and how it judges."""

import subprocess
import textwrap
from pathlib import Path

import pytest
from cosmic_ray.mutating import mutate_code

from tests import ROOT
from tests.mutants import __main__ as program
from tests.mutants.copies import Copy
from tests.mutants.judge import ROOMS, Broken, Judge, room_of
from tests.mutants.lists import stale
from tests.mutants.operators import OPERATORS, Mutant, mutants, mutated

MUL = "ReplaceBinaryOperator_Mul_Div"
CODE = '''
"""Text with a raise: 1 + 1 == 2 and True."""
from datetime import timedelta
GRACE_S = 3 - 1

@decorated(True)
def f(a: "x and y" = None) -> "x or y":
    assert a == 1
    logger.warning("text", a + 1)
    log.note(f"{a + 1}")
    lines.append(f"{a + 1}")
    said = f"{a}" if a == 1 else "none"
    if TYPE_CHECKING:
        use(a + 1)
    start(a, summary="s" + a, start_to_close_timeout=a + 1)
    wait(timedelta(seconds=2 * 30))
    if a and not b:
        raise ValueError(f"{a - 1}")
    return -a + 1
'''


def test_operators_do_what_they_show() -> None:
    for name, operator in OPERATORS.items():
        for example in operator.examples():
            code = mutate_code(example.pre_mutation_code, operator(), example.occurrence)
            assert code == example.post_mutation_code, name


def test_text_annotations_and_durations_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(CODE)
    found = mutants(tmp_path, "m.py")
    assert [(CODE.splitlines()[one.line - 1].strip(), one.operator) for one in found] == [
        ('start(a, summary="s" + a, start_to_close_timeout=a + 1)', "DropCall"),
        ("wait(timedelta(seconds=2 * 30))", "DropCall"),
        ("if a and not b:", "AddNot"),
        ("if a and not b:", "ReplaceAndWithOr"),
        ("if a and not b:", "ReplaceUnaryOperator_Delete_Not"),
        ('raise ValueError(f"{a - 1}")', "DropRaise"),
        ("return -a + 1", "ReplaceBinaryOperator_Add_Sub"),
        ("return -a + 1", "ReplaceUnaryOperator_Delete_USub"),
    ]
    lines = {one.operator: program.changed(CODE, mutated(CODE, one) or "") for one in found}
    assert lines["DropRaise"] == ('raise ValueError(f"{a - 1}")', "pass")
    assert lines["ReplaceAndWithOr"] == ("if a and not b:", "if a or not b:")


def test_what_is_no_code_is_no_mutant() -> None:
    code = "def f(*, a):\n    return a * 2\n"
    first, second = (mutated(code, Mutant("m.py", 1, MUL, n)) for n in (0, 1))
    assert first is None and mutated("def f(a, *, b): ...", Mutant("m.py", 1, MUL, 0)) is None
    assert second == code.replace("a * 2", "a / 2")


def test_the_lists_fit_the_code() -> None:
    assert stale(ROOT) == []


def test_a_seed_draws_the_same_mutants() -> None:
    judge = Judge(ROOT)
    first, again, other = (
        [case.name for case in program.drawn(judge, seed, 12, "activities/storage/series")]
        for seed in (1, 1, 2)
    )
    assert first == again != other and len(set(first)) == 12


def test_every_file_has_tests_that_judge_it() -> None:
    judge = Judge(ROOT)
    for file in judge.files():
        assert all((ROOT / target).exists() for target in ROOMS[room_of(file)]), file
        assert judge.test_files({file}), file


def test_tests_of_a_line_are_those_of_its_statement(tmp_path: Path) -> None:
    file = "workflows/rules/half.py"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(
        "MOST = 1 + 2\n"
        "def f(\n    a,\n    b=1 + 1,\n):\n"
        "    if (\n        a\n        == b\n    ):\n"
        "        return (\n            a\n        )\n"
        "    return b + 1\n"
    )
    own, slow, dear = "rules/test_half.py::a", "test_all.py::b", "test_all.py::c"
    own, slow, dear = (f"tests/unit/workflows/{name}" for name in (own, slow, dear))
    judge = Judge(tmp_path, took={own: 2.0, slow: 1.0, dear: 95.0})
    judge.lines[file] = {6: {own, slow, dear}, 8: {slow}, 11: {slow, dear}}
    assert judge.tests_of(file, 7) == [own, slow], "no more than fit; those of its name first"
    assert judge.tests_of(file, 10) == [slow]
    assert judge.tests_of(file, 13) == [], "no test executes it"
    assert judge.tests_of(file, 1) == judge.tests_of(file, 4) == [own, slow], "executed by imports"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout with one function, and tests of half of it."""
    files = {
        "ratchet/__init__.py": "",
        "workflows/rules/half.py": """
            def half(n: int) -> int:
                if n < 0:
                    raise ValueError(n)
                return n // 2
            """,
        "pyproject.toml": "[tool.pytest.ini_options]",
        "tests/unit/workflows/test_half.py": """
            from ratchet.workflows.rules.half import half
            def test_half() -> None:
                assert half(8) == 4
            def test_that_fails() -> None:
                assert half(8) == 5
            """,
    }
    for name, text in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(textwrap.dedent(text))
    (tmp_path / "tree/ratchet/workflows").symlink_to("../workflows")
    return tmp_path / "tree"


def test_a_survivor_is_distinguished_from_what_tests_notice(tree: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    judge, said = Judge(tree, warm=()), list[str]()
    cases = list(program.drawn(judge, 0, 9, ""))
    kept = program.Kept(tmp_path / "kept" / "verdicts", tree)
    verdicts = program.judged(judge, cases, kept, 1, said.append)
    noticed = {program.changed(c.code, "")[0] and c.new: v.killed for c, v in verdicts}
    assert noticed == {
        "if not n < 0:": True,
        "if n <= 0:": False,
        "pass": False,
        "return n * 2": True,
    }
    again = program.Kept(tmp_path / "kept" / "verdicts", tree)
    assert len(again.verdicts) == len(cases)
    (tree / "tests/unit/workflows/test_half.py").write_text("")
    later = program.Kept(tmp_path / "kept" / "verdicts", tree)
    assert [v.killed for v in later.verdicts.values()] == [True, True], "survivors are judged again"


def test_what_has_no_test_any_more_is_not_judged(tree: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    judge, tests = Judge(tree, warm=()), "tests/unit/workflows/test_half.py"
    with Copy.of(tree, tmp_path / "copy", ()) as copy:
        judge.measure(copy, tests, tmp_path / "kept")
        (copy.root / tests).write_text("")
        with pytest.raises(Broken, match="finds none of"):
            judge.judge(copy, "workflows/rules/half.py", 5, "def half(n): return n")
