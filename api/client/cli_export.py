"""`ratchet runs export`: a run's trained model, as a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from typer.core import TyperCommand

from ratchet.api.client import printing
from ratchet.api.client.client import as_json
from ratchet.api.client.options import Json, RunId, asking
from ratchet.api.schemas.artifacts import Model

BEST = "--best"


class BestAlone(TyperCommand):
    """A command whose --best may be used without a value."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Reads a --best that is last, or before another option, as one with an empty value."""
        given = []
        for argument, following in zip(args, [*args[1:], "-"], strict=True):
            alone = argument == BEST and following.startswith("-")
            given.append(f"{BEST}=" if alone else argument)
        return super().parse_args(ctx, given)


def _taken(model: Model) -> str:
    """Which version was exported, and why."""
    if model.best_of is not None:
        why = f", the best of {model.best_of}: {printing.number(model.evals[model.best_of])}"
    else:
        why = {"checkpoint": ", the last checkpoint", "newest": ", the newest"}.get(
            model.chosen, ""
        )
    what = "the adapter of " if model.kind == "adapter" else ""
    return f"{what}step {model.step} of {model.run_id}{why}"


def export(
    run_id: RunId,
    to: Annotated[Path, typer.Option("--to", help="The folder to write; it must not exist.")],
    step: Annotated[int | None, typer.Option(min=0, help="The version after this step.")] = None,
    best: Annotated[
        str | None,
        typer.Option(
            BEST,
            metavar="[EVAL]",
            help="The version with the highest mean of an eval, by default the first eval.",
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="For a run that trains an adapter: the whole merged model."),
    ] = False,
    as_json_: Json = False,
) -> None:
    """Write a run's model as a Hugging Face folder, by default its last checkpoint."""
    if step is not None and best is not None:
        raise typer.BadParameter("--step and --best both choose a version; use only one")
    err = printing.console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    drawn = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    with asking(as_json_) as client, drawn as bar:
        task = bar.add_task("", total=None)

        def on_model(model: Model) -> None:
            bar.update(task, total=model.size)
            err.print(_taken(model), highlight=False, soft_wrap=True)

        model = client.runs.export_model(
            run_id,
            to,
            step=step,
            best=best,
            merge=merge,
            on_model=on_model,
            on_bytes=lambda done: bar.update(task, completed=done),
        )
    if as_json_:
        printing.print_json({**as_json(model), "to": str(to)})
    else:
        text = f"{to} holds {len(model.files) + 1} files, {model.size / 2**20:.1f} MiB"
        printing.console().print(text, highlight=False, soft_wrap=True)
