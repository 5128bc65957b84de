"""What the commands of `ratchet` have in common: options, how lists are shown, and how failures
become a readable message and an exit status.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel
from rich.console import RenderableType
from typer.core import TyperGroup

from ratchet.api.client import printing
from ratchet.api.client.assignments import one_line
from ratchet.api.client.client import Ratchet, as_json
from ratchet.api.client.errors import NotExported, RatchetError, Refused, Unreachable
from ratchet.api.client.pages import Page
from ratchet.api.schemas.problems import field_errors, invalid_config
from ratchet.configs.load import ConfigError

Made = TypeVar("Made")
Shown = TypeVar("Shown", bound=BaseModel)

REFUSED, UNREACHABLE, INTERRUPTED = 1, 3, 130
REMEDIES = {
    "no-key": "set RATCHET_API_KEY to a key of this API",
    "scope-missing": "set RATCHET_API_KEY to a key that has the scope",
    "unknown-run": "`ratchet runs list` shows all runs",
    "unknown-rollout": "`ratchet runs rollouts RUN` lists its rollouts",
    "run-needed": "`ratchet runs archive RUN` removes it from the list and keeps its data",
    "unknown-cursor": "leave out --after to start with the first",
    "no-checkpoint": "`ratchet runs checkpoints RUN` lists its checkpoints",
    "damaged-checkpoint": "choose another with --step",
    "about:blank": "RATCHET_API is the API's address; `make status` shows whether it runs here",
}


JSON = "--json"
COMPLETED_WITHIN_S = 2.0
EMPTY_PAGES = 20
"""The API searches some 1.5 s for each page of a filtered list."""


class JsonAnywhere(TyperGroup):
    """Commands whose --json may also stand before their names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Passes a --json before a command's name on to the command."""
        place = next((i for i, word in enumerate(args) if not word.startswith("-")), len(args))
        head = [word for word in args[:place] if word != JSON]
        handed_on = [JSON] if len(head) < place < len(args) else []
        name, rest = args[place : place + 1], args[place + 1 :]
        return super().parse_args(ctx, [*head, *name, *handed_on, *rest])


def _input(run_id: str) -> str:
    if not run_id:
        raise typer.BadParameter("is empty")
    return run_id


def _ids(run_ids: list[str]) -> list[str]:
    return [_input(run_id) for run_id in run_ids]


def newest_ids(incomplete: str) -> list[str]:
    """Ids of the newest runs that begin with `incomplete`, for shell completion; none where the API
    does not answer at once.
    """
    try:
        with Ratchet(timeout_s=COMPLETED_WITHIN_S, max_retries=0) as client:
            ids = [run.id for run in client.runs.list(limit=100).data]
    except (RatchetError, ValueError):
        return []
    return [run_id for run_id in ids if run_id.startswith(incomplete)]


RunId = Annotated[
    str,
    typer.Argument(metavar="RUN", help="The run's id.", callback=_input, autocompletion=newest_ids),
]
RunIds = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="The runs' ids.", callback=_ids, autocompletion=newest_ids
    ),
]
Json = Annotated[bool, typer.Option(JSON, help="Print JSON.")]
Metadata = Annotated[
    list[str] | None, typer.Option("--metadata", metavar="NAME=VALUE", help="May be repeated.")
]
All = Annotated[bool, typer.Option("--all", help="Show all pages.")]


def _notes(error: RatchetError) -> list[str]:
    """What was noted about a failure on its way."""
    return [printing.clean(note) for note in getattr(error, "__notes__", [])]


def _lines(error: RatchetError) -> list[str]:
    """A failure in readable lines: what is wrong, where, and how to fix it."""
    if isinstance(error, Unreachable):
        return [
            str(error),
            "  `make up` starts the stack, `make status` shows what runs; set RATCHET_API to use "
            "another address",
        ]
    if not isinstance(error, Refused):
        return [str(error)]
    problem = error.problem
    lines = [f"refused ({problem.status}): {printing.clean(problem.title)}"]
    for item in problem.errors or []:
        place = item.pointer or item.key
        lines.append(f"  {printing.clean(place)}: {printing.clean(item.message)}")
    if not problem.errors:
        lines.append(f"  {printing.clean(problem.detail)}")
    if error.retry_after_s is not None:
        lines.append(f"  try again in {error.retry_after_s:.0f} s")
    if remedy := REMEDIES.get(problem.type.rpartition(":problem:")[2]):
        lines.append(f"  {remedy}")
    return lines


def _document(error: RatchetError) -> dict[str, Any]:
    """A failure as a problem document (RFC 9457)."""
    if isinstance(error, Refused):
        return error.problem.model_dump(mode="json", exclude_none=True)
    kind, title = "urn:ratchet:problem:unreachable", "The API cannot be reached"
    if isinstance(error, NotExported):
        kind, title = "urn:ratchet:problem:not-exported", "The model was not written"
    return {"type": kind, "title": title, "detail": str(error)}


@contextmanager
def asking(as_json_: bool) -> Iterator[Ratchet]:
    """A client; failures inside the block become a readable message and the exit status."""
    err = printing.console(stderr=True)

    def fail(error: RatchetError, status: int) -> typer.Exit:
        if as_json_:
            notes = {"notes": noted} if (noted := _notes(error)) else {}
            print(one_line({**_document(error), **notes}), file=sys.stderr)
        else:
            noted = [f"  {note}" for note in _notes(error)]
            err.print("ratchet: " + "\n".join([*_lines(error), *noted]), soft_wrap=True)
        return typer.Exit(status)

    try:
        with usable(Ratchet) as client:
            yield client
    except Unreachable as error:
        raise fail(error, UNREACHABLE) from None
    except RatchetError as error:
        raise fail(error, REFUSED) from None
    except ConfigError as error:
        # Worded as if the API had been asked.
        problem = invalid_config(field_errors(error.problems), error.source).document
        raise fail(Refused(problem), REFUSED) from None
    except KeyboardInterrupt:
        err.print("ratchet: interrupted; a requested change may have been made")
        raise typer.Exit(INTERRUPTED) from None


CHECKING = "workers check the config, which takes some 10 to 20 s, longer on a busy machine"


@contextmanager
def progress(text: str, *, as_json_: bool) -> Iterator[None]:
    """Says on standard error what a request waits for: a spinner on a terminal, else one line.
    Nothing with `--json`, where standard error has problem documents alone.
    """
    err = printing.console(stderr=True)
    if as_json_:
        yield
    elif err.is_terminal:
        with err.status(text):
            yield
    else:
        err.print(f"{text} …", style="dim", soft_wrap=True)
        yield


def usable(make: Callable[..., Made], *arguments: Any) -> Made:
    """What `make` returns; its ValueError is wrong usage."""
    try:
        return make(*arguments)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def show_one(item: Shown, shown: Callable[[Shown], RenderableType], *, as_json_: bool) -> None:
    """Prints `item` as `shown` renders it, or as JSON."""
    if as_json_:
        printing.print_json(as_json(item))
    else:
        printing.console().print(shown(item), soft_wrap=True)


def show_items(page: Page[Any], table: Any, *, whole: bool, as_json_: bool) -> None:
    """Prints a page, or with `whole` all pages from it on, as a table or as JSON. In place of an
    empty page that leads on it prints the first one after it with items, of the next EMPTY_PAGES. A
    list that is empty for a reason that the API states is a failure.
    """
    items, damaged = [*page.data], [*page.damaged]
    tried = 0
    while page.has_more and (whole or (not items and tried < EMPTY_PAGES)):
        page = page.next_page()
        items += page.data
        damaged += page.damaged
        tried += 1
    # Damaged items between two pages are named by both.
    damaged = [*dict.fromkeys(damaged)]
    if as_json_:
        said: dict[str, Any] = {"damaged": damaged} if damaged else {}
        said |= {"note": page.note} if page.note else {}
        shown = {"object": "list", "data": [as_json(item) for item in items]}
        follows = {"has_more": page.has_more, "next_after": page.next_after}
        printing.print_json({**shown, **follows, **said})
    else:
        _show_table(table(items), damaged, page, found=bool(items))
    if page.note and not items:
        raise typer.Exit(REFUSED)


def _show_table(table: RenderableType, damaged: list[Any], page: Page[Any], *, found: bool) -> None:
    printing.console().print(table)
    err = printing.console(stderr=True)
    if page.note:
        err.print(printing.clean(page.note), style="yellow", soft_wrap=True)
    if damaged:
        text = f"left out, because damaged: {', '.join(map(str, damaged))}"
        err.print(printing.clean(text), style="yellow", soft_wrap=True)
    if page.has_more:
        text = "there are more; --all shows them"
        searched = f"none found yet; --after {page.next_after} searches on, --all to the end"
        err.print(text if found else printing.clean(searched), style="dim", soft_wrap=True)
