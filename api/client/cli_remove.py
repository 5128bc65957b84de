"""`ratchet runs archive` and `delete`: for runs that are no longer needed."""

import sys
from typing import Annotated

import typer

from ratchet.api.client import printing
from ratchet.api.client.client import as_json
from ratchet.api.client.options import Json, RunIds, asking


def archive(
    run_ids: RunIds,
    undo: Annotated[bool, typer.Option("--undo", help="Put them back into the list.")] = False,
    as_json_: Json = False,
) -> None:
    """Remove runs that have ended from the list; all their data is kept."""
    with asking(as_json_) as client:
        for run_id in run_ids:
            run = client.runs.unarchive(run_id) if undo else client.runs.archive(run_id)
            if as_json_:
                printing.print_json(as_json(run))
            else:
                print(f"{run.id} is {'in the list again' if undo else 'archived'}")


def delete(
    run_ids: RunIds,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json_: Json = False,
) -> None:
    """Delete runs that have ended, with all their data. This cannot be undone."""
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("without a terminal there is no prompt: pass --yes to delete")
    with asking(as_json_) as client:
        if not yes:
            err = printing.console(stderr=True)
            err.print(printing.runs_table(map(client.runs.retrieve, run_ids)), soft_wrap=True)
            what = "this run" if len(run_ids) == 1 else f"these {len(run_ids)} runs"
            typer.confirm(f"Delete {what} with all data, for good?", abort=True, err=True)
        for run_id in run_ids:
            gone = client.runs.delete(run_id)
            if as_json_:
                printing.print_json(as_json(gone))
            else:
                print(f"{gone.id} is deleted, {printing.amount(gone.freed)} freed")
