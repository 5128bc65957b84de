"""The `ratchet` command: runs over the API, for people and, with `--json`, for programs.

What is asked for goes to standard output, everything else to standard error. Exit status: 0 done;
1 the request was refused, or the run that was followed did not succeed; 2 wrong usage; 3 the API
cannot be reached; 130 Ctrl-C, which never touches a run.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from pydantic import BaseModel

from api.client import printing
from api.client.assignments import nested, one_line, pairs
from api.client.client import Page, Ratchet, as_json
from api.client.errors import RatchetError, Refused, Unreachable
from api.client.watching import Watch, ending
from api.models import STATUSES, ResolvedConfig, Run
from api.problems import field_errors, invalid_config
from configs.load import ConfigError, load
from workflows.messages import RunStatus

Made = TypeVar("Made")

REFUSED, UNREACHABLE, INTERRUPTED = 1, 3, 130
EPILOG = (
    "Exit status: 0 done; 1 refused, or the run that was followed failed or was cancelled; 2 wrong "
    "usage; 3 the API cannot be reached; 130 Ctrl-C. RATCHET_API names the API (else the stack of "
    "`make up`), RATCHET_API_KEY is the key to send."
)

app = typer.Typer(
    help="Ratchet's command line.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
runs = typer.Typer(
    help="Starts, watches and steers runs.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(runs, name="runs")


@app.callback()
def _ratchet() -> None:
    """Ratchet's command line."""


class PauseMode(StrEnum):
    """What becomes of rollouts in flight."""

    DRAIN = "drain"
    CANCEL = "cancel"


class Kind(StrEnum):
    """Kinds of rollouts."""

    TRAIN = "train"
    EVAL = "eval"


def _given(run_id: str) -> str:
    if not run_id:
        raise typer.BadParameter("is empty")
    return run_id


RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", callback=_given)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reason = Annotated[str, typer.Option(help="Why; kept in the run's log.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Watch the run until it ends.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Validate and plan; start nothing.")]
Key = Annotated[
    str | None,
    typer.Option("--idempotency-key", help="The same key and config are one run, however often."),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Keys by dots, e.g. train.batch_size=64."),
]
Metadata = Annotated[
    list[str] | None, typer.Option("--metadata", metavar="NAME=VALUE", help="May be repeated.")
]
All = Annotated[bool, typer.Option("--all", help="Go on through all pages.")]


@contextmanager
def _asking(as_json_: bool) -> Iterator[Ratchet]:
    """A client; failures inside become a readable message and the exit status."""
    err = printing.console(stderr=True)

    def fail(error: RatchetError, status: int) -> typer.Exit:
        if as_json_:
            print(one_line(printing.problem_json(error)), file=sys.stderr)
        else:
            err.print("ratchet: " + "\n".join(printing.problem_lines(error)), soft_wrap=True)
        return typer.Exit(status)

    try:
        with _usable(Ratchet) as client:
            yield client
    except Unreachable as error:
        raise fail(error, UNREACHABLE) from None
    except RatchetError as error:
        raise fail(error, REFUSED) from None
    except ConfigError as error:
        # The same words as if the API had been asked.
        problem = invalid_config(field_errors(error.problems)).document
        raise fail(Refused(problem), REFUSED) from None
    except KeyboardInterrupt:
        err.print("ratchet: interrupted; what was asked for may have been done")
        raise typer.Exit(INTERRUPTED) from None


def _usable(make: Callable[..., Made], *arguments: Any) -> Made:
    """What `make` makes; its ValueError is wrong usage."""
    try:
        return make(*arguments)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _show_items(page: Page[Any], table: Any, *, whole: bool, as_json_: bool) -> None:
    """A page, or with `whole` all that follow, as a table or as JSON."""
    items: list[BaseModel] = [*page] if whole else [*page.data]
    more = page.has_more and not whole
    if as_json_:
        data = [as_json(item) for item in items]
        printing.print_json({"object": "list", "data": data, "has_more": more})
        return
    printing.console().print(table(items))
    if more:
        printing.console(stderr=True).print("there are more; --all shows them", style="dim")


def _watch(client: Ratchet, run: Run, *, from_start: bool, as_json_: bool) -> None:
    """Watches a run to its end; the exit status says how that was."""
    out = printing.console()
    watch = Watch(client, run, out, from_start=from_start, lines_of_json=as_json_)
    try:
        run = watch.follow()
    except KeyboardInterrupt:
        printing.console(stderr=True).print(
            f"stopped watching; run {run.id} goes on. `ratchet runs watch {run.id}` looks again, "
            f"`ratchet runs stop {run.id}` ends it",
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    if as_json_:
        print(one_line(as_json(run)), flush=True)
    else:
        out.print(ending(run), style=printing.STYLES.get(run.status, ""), soft_wrap=True)
    if run.status != "succeeded":
        raise typer.Exit(REFUSED)


def _started(client: Ratchet, run: Run, *, follow: bool, as_json_: bool) -> None:
    if as_json_:
        print(one_line(as_json(run)), flush=True) if follow else printing.print_json(as_json(run))
    else:
        where = f"{client.address}{run.links.self}"
        printing.console().print(f"{run.id} is {run.status}  {where}", soft_wrap=True)
    if follow:
        _watch(client, run, from_start=True, as_json_=as_json_)


def _told(run: Run, *, as_json_: bool, what: str = "") -> None:
    if as_json_:
        printing.print_json(as_json(run))
    else:
        line = f"{run.id} is {run.status}{f'; {what}' if what else ''}"
        printing.console().print(line, soft_wrap=True)


def _show_plan(answer: ResolvedConfig, *, as_json_: bool) -> None:
    if as_json_:
        printing.print_json(as_json(answer))
    else:
        printing.console().print(printing.plan_table(answer))


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
    """Start a run of a config, with keys overridden."""
    with _asking(as_json_) as client:
        checked = load(config, changes or [])
        if dry_run:
            _show_plan(client.runs.plan(checked), as_json_=as_json_)
            return
        run = client.runs.create(checked, idempotency_key=idempotency_key)
        _started(client, run, follow=follow, as_json_=as_json_)


@runs.command()
def fork(
    run_id: RunId,
    changes: Changes = None,
    step: Annotated[
        int | None, typer.Option(help="Of which checkpoint; else the newest sound one.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the new run; else the same.")] = None,
    metadata: Metadata = None,
    dry_run: DryRun = False,
    follow: Follow = False,
    idempotency_key: Key = None,
    as_json_: Json = False,
) -> None:
    """Start another run from a checkpoint of this one, with keys changed."""
    with _asking(as_json_) as client:
        told: dict[str, Any] = {
            "step": step,
            "config": _usable(nested, changes or []) or None,
            "name": name,
            "metadata": _usable(pairs, metadata) if metadata else None,
        }
        if dry_run:
            _show_plan(client.runs.plan_fork(run_id, **told), as_json_=as_json_)
            return
        run = client.runs.fork(run_id, **told, idempotency_key=idempotency_key)
        _started(client, run, follow=follow, as_json_=as_json_)


# -- looking ----------------------------------------------------------------------------------


@runs.command("list")
def list_runs(
    status: Annotated[
        str | None, typer.Option(help=f"Only those that are: {', '.join(STATUSES)}.")
    ] = None,
    metadata: Metadata = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Most runs in a page.")] = 20,
    after: Annotated[str | None, typer.Option(help="Go on after the run of this id.")] = None,
    whole: All = False,
    as_json_: Json = False,
) -> None:
    """Show runs, the newest first."""
    if status is not None and status not in STATUSES:
        raise typer.BadParameter(f"{status!r} is none of {', '.join(STATUSES)}")
    with _asking(as_json_) as client:
        page = client.runs.list(
            status=cast(RunStatus | None, status),
            metadata=_usable(pairs, metadata or []),
            limit=limit,
            after=after,
        )
        _show_items(page, printing.runs_table, whole=whole, as_json_=as_json_)


@runs.command()
def show(run_id: RunId, as_json_: Json = False) -> None:
    """Show one run."""
    with _asking(as_json_) as client:
        run = client.runs.retrieve(run_id)
        if as_json_:
            printing.print_json(as_json(run))
        else:
            printing.console().print(printing.run_table(run))


@runs.command()
def watch(
    run_id: RunId,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Tell what happened before, too.")
    ] = False,
    as_json_: Annotated[
        bool, typer.Option("--json", help="Print events, and at last the run, as JSON lines.")
    ] = False,
) -> None:
    """Watch a run until it ends. Ctrl-C stops watching, not the run."""
    with _asking(as_json_) as client:
        run = client.runs.retrieve(run_id)
        _watch(client, run, from_start=from_start, as_json_=as_json_)


@runs.command()
def events(
    run_id: RunId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as they happen, until the run has ended.")
    ] = False,
    after: Annotated[
        str | None,
        typer.Option(help="Go on after the event of this id; with -f 'latest' begins with news."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most events in a page.")] = 1000,
    whole: All = False,
    as_json_: Json = False,
) -> None:
    """Show what happened, oldest first; with --json --follow as JSON lines."""
    with _asking(as_json_) as client:
        if not follow:
            page = client.runs.list_events(run_id, after=after, limit=limit)

            def lines(items: list[Any]) -> str:
                return "\n".join(map(printing.event_line, items))

            _show_items(page, lines, whole=whole, as_json_=as_json_)
            return
        err = printing.console(stderr=True)

        def on_trouble(why: str) -> None:
            if why:
                err.print(f"connection lost ({why}); trying again", soft_wrap=True)

        try:
            for event in client.runs.stream_events(run_id, after=after, on_trouble=on_trouble):
                line = one_line(as_json(event)) if as_json_ else printing.event_line(event)
                print(line, flush=True)
        except KeyboardInterrupt:
            err.print(f"stopped following; run {run_id} goes on")
            raise typer.Exit(INTERRUPTED) from None


@runs.command()
def metrics(
    run_id: RunId,
    names: Annotated[
        str | None, typer.Option("--keys", help="Only these metrics, separated by commas.")
    ] = None,
    after_step: Annotated[int, typer.Option(min=-1, help="Only steps above this one.")] = -1,
    until_step: Annotated[int | None, typer.Option(min=0, help="Only steps up to this.")] = None,
    points: Annotated[
        int | None, typer.Option(min=4, help="Of each at most so many values, extremes kept.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, a line a step.")] = False,
    as_json_: Json = False,
) -> None:
    """Show what each step measured."""
    if as_csv and as_json_:
        raise typer.BadParameter("--csv and --json exclude each other")
    with _asking(as_json_) as client:
        wanted: dict[str, Any] = {
            "names": names.split(",") if names is not None else None,
            "after_step": after_step,
            "until_step": until_step,
            "points": points,
            "limit": 10_000,
        }
        if as_csv:
            sys.stdout.write(client.runs.metrics_csv(run_id, **{**wanted, "limit": None}))
            return
        page = client.runs.metrics(run_id, **wanted)
        _show_items(page, printing.metrics_table, whole=True, as_json_=as_json_)


@runs.command()
def rollouts(
    run_id: RunId,
    rollout_id: Annotated[
        str | None, typer.Argument(metavar="[ROLLOUT]", help="One to read, e.g. train:12:3.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Of this step.")] = None,
    env: Annotated[str | None, typer.Option(help="Of this env.")] = None,
    group: Annotated[str | None, typer.Option(help="Of this group, e.g. train/12.")] = None,
    kind: Annotated[Kind | None, typer.Option(help="Of this kind.")] = None,
    reward_min: Annotated[float | None, typer.Option(help="With this reward or more.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="With this reward or less.")] = None,
    errored: Annotated[
        bool | None, typer.Option("--errored/--no-errored", help="That failed, or did not.")
    ] = None,
    after: Annotated[str | None, typer.Option(help="Go on after the rollout of this id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Most rollouts in a page.")] = 50,
    whole: All = False,
    as_json_: Json = False,
) -> None:
    """Show finished rollouts, or read one."""
    with _asking(as_json_) as client:
        if rollout_id is not None:
            found = client.runs.rollout(run_id, rollout_id)
            if as_json_:
                printing.print_json(as_json(found))
            else:
                printing.print_rollout(found, printing.console())
            return
        page = client.runs.rollouts(
            run_id,
            step=step,
            env=env,
            group=group,
            kind=kind.value if kind else None,
            reward_min=reward_min,
            reward_max=reward_max,
            errored=errored,
            after=after,
            limit=limit,
        )
        _show_items(page, printing.rollouts_table, whole=whole, as_json_=as_json_)


@runs.command()
def checkpoints(run_id: RunId, as_json_: Json = False) -> None:
    """Show committed checkpoints: what a run can be resumed or forked from."""
    with _asking(as_json_) as client:
        page = client.runs.checkpoints(run_id)
        _show_items(page, printing.checkpoints_table, whole=True, as_json_=as_json_)


@runs.command()
def config(run_id: RunId, as_json_: Json = False) -> None:
    """Show the config as it holds, every default written out."""
    with _asking(as_json_) as client:
        view = client.runs.config(run_id)
        if as_json_:
            printing.print_json(as_json(view))
        else:
            print(json.dumps(view.config, indent=2))


# -- asking -----------------------------------------------------------------------------------


@runs.command()
def pause(
    run_id: RunId,
    mode: Annotated[
        PauseMode, typer.Option(help="Let rollouts in flight end first, or give them up.")
    ] = PauseMode.DRAIN,
    reason: Reason = "",
    as_json_: Json = False,
) -> None:
    """Put a run to rest: nothing in flight, a checkpoint, no server kept."""
    with _asking(as_json_) as client:
        _told(client.runs.pause(run_id, mode=mode.value, reason=reason), as_json_=as_json_)


@runs.command()
def resume(
    run_id: RunId, reason: Reason = "", follow: Follow = False, as_json_: Json = False
) -> None:
    """Wake a paused run, or go on with one that ended, from its newest checkpoint."""
    with _asking(as_json_) as client:
        run = client.runs.resume(run_id, reason=reason)
        if not follow:
            _told(run, as_json_=as_json_, what=f"attempt {run.attempt}" if run.attempt > 1 else "")
            return
        _watch(client, run, from_start=False, as_json_=as_json_)


@runs.command()
def stop(run_id: RunId, reason: Reason = "", as_json_: Json = False) -> None:
    """End a run gracefully, with a final checkpoint."""
    with _asking(as_json_) as client:
        _told(client.runs.stop(run_id, reason=reason), as_json_=as_json_)


@runs.command()
def cancel(run_id: RunId, reason: Reason = "", as_json_: Json = False) -> None:
    """End a run at once, without another checkpoint."""
    with _asking(as_json_) as client:
        _told(client.runs.cancel(run_id, reason=reason), as_json_=as_json_)


@runs.command("eval")
def eval_run(
    run_id: RunId,
    envs: Annotated[
        list[str] | None, typer.Argument(metavar="[ENV]...", help="Eval envs; none: all.")
    ] = None,
    as_json_: Json = False,
) -> None:
    """Ask for an eval at the next policy version."""
    with _asking(as_json_) as client:
        run = client.runs.eval(run_id, envs=envs or [])
        _told(run, as_json_=as_json_, what="an eval was asked for")


@runs.command()
def checkpoint(run_id: RunId, reason: Reason = "", as_json_: Json = False) -> None:
    """Ask for a checkpoint at the next step boundary."""
    with _asking(as_json_) as client:
        run = client.runs.checkpoint(run_id, reason=reason)
        _told(run, as_json_=as_json_, what="a checkpoint was asked for")


@runs.command("set")
def set_config(
    run_id: RunId,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help="Keys by dots, envs by name: train.env.reverse-text.ratio=2; metadata.owner=ana; "
            "null takes a value away.",
        ),
    ],
    as_json_: Json = False,
) -> None:
    """Change the config of a running run, or its metadata."""
    with _asking(as_json_) as client:
        run = client.runs.update(run_id, _usable(nested, changes))
        told = f"changed so far: {printing.clean(json.dumps(run.config_changes))}"
        _told(run, as_json_=as_json_, what=told)
