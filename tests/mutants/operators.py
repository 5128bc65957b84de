"""Which changes of code are mutants: operators, and the places where none is wanted.

Most operators are cosmic-ray's, one replacement for each thing that can be replaced, so that the
sample is not mostly about comparisons. Two are our own, written as its operators are: a call that
is left out, and a raise. Invariants: a mutant is named by operator and occurrence in a file, as
cosmic-ray counts them; it compiles.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword, PythonNode

Place = tuple[int, int]
"""Line from 1 and column from 0."""

COMPARISON = (
    "Eq_NotEq",
    "NotEq_Eq",
    "Lt_LtE",
    "LtE_Lt",
    "Gt_GtE",
    "GtE_Gt",
    "Is_IsNot",
    "IsNot_Is",
)
BOOLEAN = ("ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue")
ARITHMETIC = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "Pow_Mul")
BRANCH = ("AddNot", "ZeroIterationForLoop", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak")

SAID = ("note", "show", "print", "say", "_say", "basicConfig")
"""Calls that only say something."""
TEXTS = ("summary", "timeout_summary", "static_summary", "static_details", "description", "strict")
WAITS = ("timeout", "interval", "delay", "_s")
TIMES = re.compile(r"[A-Z][A-Z0-9_]*_S|[A-Z0-9_]*(TIMEOUT|INTERVAL|EVERY|AFTER|AT_MOST|WITHIN)")


class Dropped(Operator):
    """Leaves out a statement of one kind."""

    @staticmethod
    def wanted(node: Any) -> bool:
        """Whether a statement is of the kind."""
        raise NotImplementedError

    def mutation_positions(self, node: Any) -> Iterator[tuple[Place, Place]]:
        if node.type == "simple_stmt" and self.wanted(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children[0] = parso.parse(node.get_first_leaf().prefix + "pass")
        return node


class DropCall(Dropped):
    """Leaves out a call whose result nobody uses."""

    @staticmethod
    def wanted(node: Any) -> bool:
        if not isinstance(node, PythonNode) or node.type not in ("atom_expr", "power"):
            return False
        last = node.children[-1]
        return bool(last.type == "trailer" and last.children[0] == "(")

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("if x:\n    a.f(1)\n", "if x:\n    pass\n"),
            Example("async def f():\n    await g()\n", "async def f():\n    pass\n"),
        )


class DropRaise(Dropped):
    """Goes on where it should raise."""

    @staticmethod
    def wanted(node: Any) -> bool:
        bare = isinstance(node, Keyword) and node.value == "raise"
        return bool(node.type == "raise_stmt" or bare)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("if x:\n    raise E(1) from None\n", "if x:\n    pass\n"),
            Example(
                "try:\n    f()\nexcept E:\n    raise\n", "try:\n    f()\nexcept E:\n    pass\n"
            ),
        )


def _chosen() -> dict[str, type[Operator]]:
    core = OperatorProvider()
    names = [
        *(f"ReplaceComparisonOperator_{pair}" for pair in COMPARISON),
        *BOOLEAN,
        "ReplaceUnaryOperator_Delete_Not",
        *(f"ReplaceBinaryOperator_{pair}" for pair in ARITHMETIC),
        "ReplaceUnaryOperator_Delete_USub",
        *BRANCH,
    ]
    return {**{name: core[name] for name in names}, "DropCall": DropCall, "DropRaise": DropRaise}


OPERATORS = _chosen()


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one file of the product."""

    file: str
    line: int
    operator: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator} {self.occurrence}"


def mutants(root: Path, file: str) -> list[Mutant]:
    """All mutants of a file that are wanted, in order."""
    source = (root / file).read_text()
    unwanted = list(_unwanted(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name, made in OPERATORS.items():
        operator = made()
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(places):
            if not any(first <= start < last for first, last in unwanted):
                found.append(Mutant(file, start[0], name, occurrence))
    return sorted(found)


def mutated(source: str, mutant: Mutant) -> str | None:
    """The code with the mutant in it; None if that is no code, or the same but for how a function
    may be called: the star of a signature is no product.
    """
    code: str | None = mutate_code(source, OPERATORS[mutant.operator](), mutant.occurrence)
    try:
        before, after = ast.parse(source), ast.parse(code or source)
    except SyntaxError:
        return None
    same = ast.dump(before) == ast.dump(after) or _signatures(before) != _signatures(after)
    return None if same else code


def _signatures(tree: ast.Module) -> list[tuple[int, int]]:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.arguments))
    return [(len(one.posonlyargs), len(one.kwonlyargs)) for one in found]


def _span(node: Any) -> tuple[Place, Place]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _unwanted(tree: ast.Module) -> Iterator[tuple[Place, Place]]:
    """Text, annotations, durations, log lines, and what no run comes to (as of `zip(strict=)`)."""
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr() | ast.Assert():
                yield _span(node)
            case ast.arg(annotation=ast.expr() as said) | ast.AnnAssign(annotation=said):
                yield _span(said)
            case ast.keyword(arg=str(name)) if name in TEXTS or name.endswith(WAITS):
                yield _span(node)
            case ast.Call() if _only_says(node) or _name(node.func) == "timedelta":
                yield _span(node)
            case ast.Assign(targets=[ast.Name(id=name)]) if TIMES.fullmatch(name):
                yield _span(node)
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                yield _span(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield _span(node)
            case ast.IfExp(body=one, orelse=other) if _is_text(one) and _is_text(other):
                yield _span(node)
            case _:
                pass
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                yield _span(decorator)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield _span(node.returns)


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _only_says(call: ast.Call) -> bool:
    """Whether a call logs, or shows something to people."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    logs = isinstance(owner, ast.Name | ast.Attribute) and _name(owner).endswith("logger")
    writes = _name(call.func) == "append" and isinstance(call.args[0], ast.JoinedStr)
    return logs or writes or _name(call.func) in SAID


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
