"""The `ratchet` command: runs over the API, for people and, with `--json`, for programs.

Commands that start and steer runs are here; those that only read are in
`ratchet.api.client.cli_read`.

Results go to standard output, everything else to standard error. Exit status: 0 done; 1 the request
was refused, or the run that was followed did not succeed; 2 wrong usage; 3 the API cannot be
reached, or no worker for a dry run; 130 Ctrl-C, which never affects a run.
"""

import json
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from ratchet import __version__
from ratchet.activities.contracts.controls import CONTROLS, Verb
from ratchet.api.client import cli_read, printing
from ratchet.api.client.assignments import nested, one_line, pairs
from ratchet.api.client.cli_env import env_server
from ratchet.api.client.cli_eval import compare, evaluate
from ratchet.api.client.cli_export import BestAlone, export
from ratchet.api.client.cli_keys import keys
from ratchet.api.client.cli_remove import archive, delete
from ratchet.api.client.client import Ratchet, as_json
from ratchet.api.client.options import (
    CHECKING,
    UNREACHABLE,
    Json,
    JsonAnywhere,
    Metadata,
    RunId,
    asking,
    progress,
    show_one,
    usable,
)
from ratchet.api.schemas.run import ResolvedConfig, Run
from ratchet.configs.load import load

EPILOG = (
    "Exit status: 0 done; 1 refused, or the run that was followed failed or was cancelled; 2 wrong "
    "usage; 3 the API cannot be reached, or no worker for a dry run; 130 Ctrl-C. RATCHET_API names "
    "the API (by default the stack of `make up`), RATCHET_API_KEY is the key to send. "
    "--json may stand anywhere, except for env-server: results are then JSON, and failures problem "
    "documents."
)

app = typer.Typer(
    cls=JsonAnywhere,
    help="Ratchet's command line.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
runs = typer.Typer(
    cls=JsonAnywhere,
    help="Start, watch and steer runs.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(runs, name="runs")
app.add_typer(keys, name="keys")
app.command("env-server")(env_server)
app.command("eval")(evaluate)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"ratchet {__version__}")
        raise typer.Exit


@app.callback()
def _ratchet(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Ratchet's command line."""


Follow = Annotated[bool, typer.Option("--follow", "-f", help="Watch the run until it ends.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check, also on workers, and plan; start nothing.")
]
Key = Annotated[
    str | None,
    typer.Option("--idempotency-key", help="Repeating the key starts no second run."),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted keys, e.g. train.batch_size=64."),
]


def _started(client: Ratchet, run: Run, *, follow: bool, as_json_: bool) -> None:
    if as_json_:
        print(one_line(as_json(run)), flush=True) if follow else printing.print_json(as_json(run))
    else:
        where = f"{client.address}{run.links.dashboard}"
        printing.console().print(f"{run.id} is {run.status}  {where}", soft_wrap=True)
        if run.unchecked is not None:
            text = printing.clean(f"not checked yet: {run.unchecked}")
            printing.console(stderr=True).print(text, style="yellow", soft_wrap=True)
    if follow:
        cli_read.watch_to_end(client, run, from_start=True, as_json_=as_json_)


def _planned(answer: ResolvedConfig, *, as_json_: bool) -> None:
    """Shows a dry run; one that no worker has checked fails."""
    show_one(answer, printing.plan_table, as_json_=as_json_)
    err = printing.console(stderr=True)
    if answer.unchecked is not None:
        text = f"the config is valid; not checked: {printing.clean(answer.unchecked)}"
        err.print(text, style="yellow", soft_wrap=True)
        raise typer.Exit(UNREACHABLE)
    err.print("the config is valid, and workers have checked what it names", style="dim")


def _reported(run: Run, *, as_json_: bool, what: str = "") -> None:
    if as_json_:
        printing.print_json(as_json(run))
    else:
        line = f"{run.id} is {run.status}{f'; {what}' if what else ''}"
        printing.console().print(line, soft_wrap=True)


# -- starting ---------------------------------------------------------------------------------


@runs.command()
def create(
    config: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The config, .toml or .json.")
    ],
    changes: Changes = None,
    dry_run: DryRun = False,
    follow: Follow = False,
    idempotency_key: Key = None,
    as_json_: Json = False,
) -> None:
    """Start a run from a config, with keys overridden."""
    with asking(as_json_) as client:
        checked = load(config, changes or [])
        if dry_run:
            with progress(CHECKING, as_json_=as_json_):
                answer = client.runs.plan(checked)
            _planned(answer, as_json_=as_json_)
            return
        with progress(CHECKING, as_json_=as_json_):
            run = client.runs.create(checked, idempotency_key=idempotency_key)
        _started(client, run, follow=follow, as_json_=as_json_)


@runs.command()
def fork(
    run_id: RunId,
    changes: Changes = None,
    step: Annotated[
        int | None, typer.Option(help="The checkpoint's step; by default the newest sound one.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the new run; else the same.")] = None,
    metadata: Metadata = None,
    dry_run: DryRun = False,
    follow: Follow = False,
    idempotency_key: Key = None,
    as_json_: Json = False,
) -> None:
    """Start a new run from a checkpoint of this one, with keys changed."""
    with asking(as_json_) as client:
        reported: dict[str, Any] = {
            "step": step,
            "config": usable(nested, changes or []) or None,
            "name": name,
            "metadata": usable(pairs, metadata) if metadata else None,
        }
        if dry_run:
            with progress(CHECKING, as_json_=as_json_):
                answer = client.runs.plan_fork(run_id, **reported)
            _planned(answer, as_json_=as_json_)
            return
        with progress(CHECKING, as_json_=as_json_):
            run = client.runs.fork(run_id, **reported, idempotency_key=idempotency_key)
        _started(client, run, follow=follow, as_json_=as_json_)


# -- reading ----------------------------------------------------------------------------------


for name, command in cli_read.OF_RUNS.items():
    runs.command(name)(command)
for name, command in cli_read.OF_ALL.items():
    app.command(name)(command)


runs.command()(compare)
runs.command("export", cls=BestAlone)(export)
runs.command()(archive)
runs.command()(delete)


# -- steering ---------------------------------------------------------------------------------


def _option(name: str, kind: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _options(verb: Verb) -> list[Parameter]:
    """The fields of its body: a list as arguments, all others as options."""
    options = []
    for name, field in verb.body.model_fields.items():
        about = field.description or verb.labels[name]
        default = field.get_default(call_default_factory=True)
        shown: Any = typer.Option(help=about)
        if isinstance(default, list):
            shown = typer.Argument(metavar=f"[{name.removesuffix('s').upper()}]...", help=about)
        options.append(_option(name, Annotated[field.annotation, shown], default))
    return options


def _command(verb: Verb) -> Callable[..., None]:
    def command(run_id: str, as_json_: bool, follow: bool = False, **body: Any) -> None:
        with asking(as_json_) as client:
            run = client.runs.ask(run_id, verb.name, **body)
            if follow:
                cli_read.watch_to_end(client, run, from_start=False, as_json_=as_json_)
                return
            attempt = f"attempt {run.attempt}" if run.attempt > 1 else ""
            what = attempt if verb.name == "resume" else verb.answer
            _reported(run, as_json_=as_json_, what=what)

    options = [_option("run_id", RunId, Parameter.empty), *_options(verb)]
    if verb.name == "resume":
        options.append(_option("follow", Follow, False))
    options.append(_option("as_json_", Json, False))
    command.__signature__ = Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in options}
    return command


for verb in CONTROLS.values():
    runs.command(verb.name, help=verb.help)(_command(verb))


@runs.command()
def note(
    run_id: RunId,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="At most 2,000 characters; '' removes the note.")
    ],
    as_json_: Json = False,
) -> None:
    """Attach a note to a run, which may have ended; it replaces the note before."""
    with asking(as_json_) as client:
        run = client.runs.note(run_id, text)
        _reported(run, as_json_=as_json_, what="noted" if run.note else "has no note")


@runs.command("set")
def set_config(
    run_id: RunId,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help="Dotted keys, envs by name: train.env.reverse-text.ratio=2; metadata.owner=ana; "
            "null removes a value.",
        ),
    ],
    as_json_: Json = False,
) -> None:
    """Change the config of a running run, or its metadata."""
    with asking(as_json_) as client:
        run = client.runs.update(run_id, usable(nested, changes))
        reported = f"changed so far: {printing.clean(json.dumps(run.config_changes))}"
        if pending := printing.pending_line(run):
            reported += f"; pending until the next step: {pending}"
        _reported(run, as_json_=as_json_, what=reported)
