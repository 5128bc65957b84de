"""`ratchet eval`: evaluates models without training, and `ratchet runs compare`: one eval against
another on the same examples.
"""

from pathlib import Path
from typing import Annotated

import typer

from ratchet.api.client import printing
from ratchet.api.client.cli_read import watched
from ratchet.api.client.client import Ratchet, as_json
from ratchet.api.client.comparing import comparison_table
from ratchet.api.client.options import (
    CHECKING,
    REFUSED,
    Json,
    RunId,
    asking,
    newest_ids,
    progress,
)
from ratchet.api.schemas.evals import EvalComparison
from ratchet.api.schemas.run import Run
from ratchet.configs.load import ConfigError, read


def _started(client: Ratchet, runs: list[Run]) -> None:
    out = printing.console()
    for run in runs:
        where = f"{client.address}{run.links.dashboard}"
        out.print(f"{run.id} evaluates {run.model}: {run.status}  {where}", soft_wrap=True)
    base, *others = runs
    for run in others:
        page = f"{client.address}/dashboard/#/compare?runs={base.id},{run.id}"
        text = f"once both have ended: ratchet runs compare {run.id} {base.id}, or {page}"
        printing.console(stderr=True).print(text, style="dim", soft_wrap=True)


def _show(client: Ratchet, comparisons: list[EvalComparison]) -> None:
    out = printing.console()
    for comparison in comparisons:
        out.print(comparison_table(comparison, client.address), soft_wrap=True)


def evaluate(
    config: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The config, .toml or .json.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys by dots, e.g. eval.group_size=4."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="What to evaluate, as `model.name` has it, or RUN@STEP; may be repeated. Without "
            "it the config's own model.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", help="One of the config's eval envs; may be repeated. Else all."),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Watch until all have ended, then show results and comparisons."
        ),
    ] = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="Repeating the key starts no second runs."),
    ] = None,
    as_json_: Json = False,
) -> None:
    """Evaluate models on the eval envs of a config, without training: a run for each, one after
    another.
    """
    with asking(as_json_) as client:
        plain = read(config, changes or [])
        try:
            with progress(CHECKING, as_json_=as_json_):
                started = client.runs.evaluate(
                    plain, models=model or [], envs=env or [], idempotency_key=idempotency_key
                )
                runs = [*started]
        except ConfigError as error:
            raise ConfigError(error.problems, str(config)) from None
        if not as_json_:
            _started(client, runs)
        if not follow:
            if as_json_:
                printing.print_json({"object": "list", "data": [as_json(run) for run in runs]})
            return
        # What one run lacks keeps nothing back of the others.
        ended = [watched(client, run, from_start=True, as_json_=as_json_) for run in runs]
        base, *others = runs
        comparisons = [it for run in others for it in client.runs.compare_evals(run.id, base.id)]
        if as_json_:
            printing.print_json(
                {
                    "evals": {
                        run.id: [as_json(it) for it in client.runs.evals(run.id)] for run in runs
                    },
                    "comparisons": [as_json(it) for it in comparisons],
                }
            )
        else:
            for run in runs:
                printing.console().print(f"{run.model} ({run.id})", soft_wrap=True)
                printing.console().print(printing.evals_table(client.runs.evals(run.id)))
            _show(client, comparisons)
    if not all(ended):
        raise typer.Exit(REFUSED)


def compare(
    run_id: RunId,
    to: Annotated[
        str | None,
        typer.Argument(
            metavar="[OTHER]",
            help="The run to compare with; else this run's own evals of step 0.",
            autocompletion=newest_ids,
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Of RUN, the evals of this step; else the last.")
    ] = None,
    to_step: Annotated[
        int | None, typer.Option(min=0, help="Of OTHER, the evals of this step; else the last.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="Compare only this env (default: all).")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="By pass@K; else by reward.")] = None,
    as_json_: Json = False,
) -> None:
    """Compare evals of two runs, or of two steps, on the same examples."""
    with asking(as_json_) as client:
        page = client.runs.compare_evals(run_id, to, step=step, to_step=to_step, env=env, k=k)
        found = [*page]
        if as_json_:
            printing.print_json({"object": "list", "data": [as_json(it) for it in found]})
        else:
            _show(client, found)
    if not any(comparison.problem is None for comparison in found):
        if not found:
            printing.console(stderr=True).print("neither run has an eval env", style="yellow")
        raise typer.Exit(REFUSED)
