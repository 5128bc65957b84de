"""Commands of `ratchet` that only read: runs, their data, and the machines that they execute on."""

import json
import sys
import webbrowser
from collections.abc import Callable
from typing import Annotated, Any, Literal, cast

import typer

from ratchet.activities.contracts.statuses import STATUSES, RunStatus
from ratchet.api.client import metric_names, printing
from ratchet.api.client.assignments import one_line, pairs
from ratchet.api.client.client import Ratchet, as_json
from ratchet.api.client.options import (
    INTERRUPTED,
    REFUSED,
    All,
    Json,
    Metadata,
    RunId,
    asking,
    newest_ids,
    show_items,
    show_one,
    usable,
)
from ratchet.api.client.watch import Connection, Watch, ending, health_of
from ratchet.api.schemas.events import Level
from ratchet.api.schemas.run import Run


def watch_to_end(client: Ratchet, run: Run, *, from_start: bool, as_json_: bool) -> None:
    """Watches a run to its end; the exit status says whether it succeeded."""
    if not watched(client, run, from_start=from_start, as_json_=as_json_):
        raise typer.Exit(REFUSED)


def watched(client: Ratchet, run: Run, *, from_start: bool, as_json_: bool) -> bool:
    """Watches a run to its end, and returns whether it succeeded; Ctrl-C ends the command."""
    out = printing.console()
    watch = Watch(client, run, out, from_start=from_start, lines_of_json=as_json_)
    try:
        run = watch.follow()
    except KeyboardInterrupt:
        printing.console(stderr=True).print(
            f"stopped watching; run {run.id} continues. `ratchet runs watch {run.id}` watches it "
            f"again, `ratchet runs stop {run.id}` ends it",
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    if as_json_:
        print(one_line(as_json(run)), flush=True)
    else:
        out.print(ending(run), style=printing.STYLES.get(run.status, ""), soft_wrap=True)
    return run.status == "succeeded"


def list_runs(
    status: Annotated[
        str | None, typer.Option(help=f"Only runs in this status: {', '.join(STATUSES)}.")
    ] = None,
    metadata: Metadata = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Most runs in a page.")] = 20,
    after: Annotated[str | None, typer.Option(help="Continue after the run with this id.")] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Only archived runs.")] = False,
    whole: All = False,
    as_json_: Json = False,
) -> None:
    """List runs, the newest first."""
    if status is not None and status not in STATUSES:
        raise typer.BadParameter(f"{status!r} is not one of {', '.join(STATUSES)}")
    with asking(as_json_) as client:
        page = client.runs.list(
            status=cast(RunStatus | None, status),
            metadata=usable(pairs, metadata or []),
            limit=limit,
            after=after,
            archived=archived,
        )
        show_items(page, printing.runs_table, whole=whole, as_json_=as_json_)


def show(run_id: RunId, as_json_: Json = False) -> None:
    """Show one run, headed by its health."""
    with asking(as_json_) as client:
        run = client.runs.retrieve(run_id)
        # A run can be shown while its health cannot be judged.
        judged = None if as_json_ else health_of(client, run_id)
        show_one(
            run,
            lambda run: printing.run_table(run, client.address, judged),
            as_json_=as_json_,
        )


def health(run_id: RunId, as_json_: Json = False) -> None:
    """Show a run's health: a verdict with its reasons, and its pace, errors and waits."""
    with asking(as_json_) as client:
        shown = client.runs.health(run_id)
        show_one(
            shown,
            lambda it: printing.pairs_table(printing.health_rows(it, client.address)),
            as_json_=as_json_,
        )


def watch(
    run_id: RunId,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Show earlier events, too.")
    ] = False,
    as_json_: Annotated[
        bool, typer.Option("--json", help="Print events, and finally the run, as JSON lines.")
    ] = False,
) -> None:
    """Watch a run until it ends. Ctrl-C stops watching, not the run."""
    with asking(as_json_) as client:
        run = client.runs.retrieve(run_id)
        watch_to_end(client, run, from_start=from_start, as_json_=as_json_)


def events(
    run_id: RunId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new events until the run has ended.")
    ] = False,
    after: Annotated[
        str | None,
        typer.Option(help="Continue after the event with this id; 'latest' with -f: only new ones"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most events in a page.")] = 1000,
    order: Annotated[
        Literal["asc", "desc"],
        typer.Option(help="desc: newest first, and --after leads to earlier ones."),
    ] = "asc",
    types: Annotated[
        str | None,
        typer.Option(help="Only these types, separated by commas; `server` is all of server.*."),
    ] = None,
    whole: All = False,
    as_json_: Json = False,
) -> None:
    """Show events, oldest first; with --json --follow as JSON lines."""
    if follow and (order == "desc" or types is not None):
        raise typer.BadParameter("--follow shows every event in order: drop --order and --types")
    with asking(as_json_) as client:
        if not follow:
            page = client.runs.list_events(
                run_id,
                after=after,
                limit=limit,
                order=order,
                types=types.split(",") if types is not None else None,
            )
            show_items(page, printing.event_lines, whole=whole, as_json_=as_json_)
            return
        err, hear = printing.console(stderr=True), Connection().hear
        try:
            for event in client.runs.stream_events(run_id, after=after, on_trouble=hear):
                line = one_line(as_json(event)) if as_json_ else printing.event_line(event)
                print(line, flush=True)
        except KeyboardInterrupt:
            err.print(f"stopped following; run {run_id} continues")
            raise typer.Exit(INTERRUPTED) from None


EVENTS = "events"
DASHBOARD = "/dashboard/"


def logs(
    run_id: RunId,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The log of this env's server; train/NAME or eval/NAME if it has two.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="events: the run's events; orchestrator: its pipeline and steps; "
            "or env:NAME. By default events, and with --follow orchestrator."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new lines until the run has ended.")
    ] = False,
    level: Annotated[Level, typer.Option(help="Only lines of this level or worse.")] = "debug",
    after: Annotated[str | None, typer.Option(help="Continue after the line with this id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most lines in a page.")] = 1000,
    whole: All = False,
    as_json_: Json = False,
) -> None:
    """Show the run's log, oldest first, with the source of each line; or the newest lines of one of
    its processes.
    """
    if env is not None and source is not None:
        raise typer.BadParameter("--env and --source both choose a log; use only one")
    usual = "orchestrator" if follow else EVENTS
    source = f"env:{env}" if env is not None else source or usual
    source = None if source == EVENTS else source
    with asking(as_json_) as client:
        if not follow:
            page = client.runs.logs(run_id, after=after, limit=limit, level=level, source=source)
            show_items(page, printing.log_lines, whole=whole, as_json_=as_json_)
            return
        try:
            for line in client.runs.follow_logs(run_id, after=after, level=level, source=source):
                text = one_line(as_json(line)) if as_json_ else printing.log_lines([line])
                print(text, flush=True)
        except KeyboardInterrupt:
            printing.console(stderr=True).print(f"stopped following; run {run_id} continues")
            raise typer.Exit(INTERRUPTED) from None


def metrics(
    run_id: RunId,
    names: Annotated[
        str | None,
        typer.Option(
            "--keys",
            help="These metrics, separated by commas; 'time/*' are all that match, '*' all. By "
            "default the headline ones, and with --json or --csv all.",
        ),
    ] = None,
    after_step: Annotated[int, typer.Option(min=-1, help="Only steps above this one.")] = -1,
    until_step: Annotated[int | None, typer.Option(min=0, help="Only steps up to this.")] = None,
    points: Annotated[
        int | None, typer.Option(min=4, help="At most so many values of each, extremes kept.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, one line per step.")] = False,
    as_json_: Json = False,
) -> None:
    """Show the metrics of each step."""
    if as_csv and as_json_:
        raise typer.BadParameter("--csv and --json exclude each other")
    with asking(as_json_) as client:
        wanted: dict[str, Any] = {
            "names": _meant(client, run_id, names, headline_only=not (as_csv or as_json_)),
            "after_step": after_step,
            "until_step": until_step,
            "points": points,
            "limit": 10_000,
        }
        if as_csv:
            sys.stdout.write(client.runs.metrics_csv(run_id, **{**wanted, "limit": None}))
            return
        page = client.runs.metrics(run_id, **wanted)
        show_items(page, printing.metrics_table, whole=True, as_json_=as_json_)


def _meant(
    client: Ratchet, run_id: str, patterns: str | None, *, headline_only: bool
) -> list[str] | None:
    """Names of metrics that the run measures; None: all. Unknown names are an error."""
    if patterns is None and not headline_only:
        return None
    rows = client.runs.metrics(run_id, points=4).data
    known = {name for row in rows for name in row.metrics}
    if patterns is None:
        return metric_names.headline(known)
    if not known:
        # Nothing has been measured yet.
        return []
    try:
        meant = metric_names.meant(patterns.split(","), known)
        return None if len(meant) == len(known) else metric_names.short_enough(meant)
    except ValueError as error:
        printing.console(stderr=True).print(
            f"ratchet: {printing.clean(str(error))}", soft_wrap=True
        )
        raise typer.Exit(REFUSED) from None


def evals(run_id: RunId, as_json_: Json = False) -> None:
    """Show all evals, by step."""
    with asking(as_json_) as client:
        page = client.runs.evals(run_id)
        show_items(page, printing.evals_table, whole=True, as_json_=as_json_)


def _require_env(run: Run, env: str) -> None:
    """Ends with 1 if `env` is none of the run's."""
    known = list(dict.fromkeys([*run.envs, *run.eval]))
    if known and env not in known:
        text = f"ratchet: {run.id} has no env {env!r}; its envs: {', '.join(known)}"
        printing.console(stderr=True).print(printing.clean(text), soft_wrap=True)
        raise typer.Exit(REFUSED)


def rollouts(
    run_id: RunId,
    rollout_id: Annotated[
        str | None, typer.Argument(metavar="[ROLLOUT]", help="The one to show, e.g. train:12:3.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only of this step.")] = None,
    env: Annotated[str | None, typer.Option(help="Only of this env.")] = None,
    group: Annotated[str | None, typer.Option(help="Only of this group, e.g. train/12.")] = None,
    kind: Annotated[Literal["train", "eval"] | None, typer.Option(help="Of this kind.")] = None,
    reward_min: Annotated[float | None, typer.Option(help="With this reward or more.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="With this reward or less.")] = None,
    errored: Annotated[
        bool | None, typer.Option("--errored/--no-errored", help="Only failed ones, or the others.")
    ] = None,
    after: Annotated[str | None, typer.Option(help="Continue after this rollout's id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Most rollouts in a page.")] = 50,
    whole: All = False,
    as_json_: Json = False,
) -> None:
    """List finished rollouts, or show one."""
    with asking(as_json_) as client:
        if rollout_id is not None:
            result = client.runs.rollout(run_id, rollout_id)
            show_one(result, printing.rollout_text, as_json_=as_json_)
            return
        page = client.runs.rollouts(
            run_id,
            step=step,
            env=env,
            group=group,
            kind=kind,
            reward_min=reward_min,
            reward_max=reward_max,
            errored=errored,
            after=after,
            limit=limit,
        )
        if env is not None and not page.data:
            _require_env(client.runs.retrieve(run_id), env)
        show_items(page, printing.rollouts_table, whole=whole, as_json_=as_json_)


def batches(
    run_id: RunId,
    after_step: Annotated[int, typer.Option(min=-1, help="Only steps above this one.")] = -1,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most batches in a page.")] = 1000,
    whole: All = False,
    as_json_: Json = False,
) -> None:
    """List the batches that are kept, and the paths of their files in the store."""
    with asking(as_json_) as client:
        page = client.runs.batches(run_id, after_step=after_step, limit=limit)
        show_items(page, printing.batches_table, whole=whole, as_json_=as_json_)


def checkpoints(run_id: RunId, as_json_: Json = False) -> None:
    """List committed checkpoints: those a run can be resumed or forked from."""
    with asking(as_json_) as client:
        page = client.runs.checkpoints(run_id)
        show_items(page, printing.checkpoints_table, whole=True, as_json_=as_json_)


def config(run_id: RunId, as_json_: Json = False) -> None:
    """Show the current config, with all defaults filled in."""
    with asking(as_json_) as client:
        view = client.runs.config(run_id)
        show_one(view, lambda view: json.dumps(view.config, indent=2), as_json_=as_json_)


def engines(as_json_: Json = False) -> None:
    """List the inference engines of runs, and their states."""
    with asking(as_json_) as client:
        show_items(client.engines(), printing.engines_table, whole=True, as_json_=as_json_)


def workers(as_json_: Json = False) -> None:
    """List the worker processes that polled Temporal in the last minutes, by role."""
    with asking(as_json_) as client:
        show_items(client.workers(), printing.workers_table, whole=True, as_json_=as_json_)


def open_page(
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="The run's id; default: all runs.", autocompletion=newest_ids
        ),
    ] = None,
    as_json_: Json = False,
) -> None:
    """Open the dashboard in a browser, at a run's page or at the list; also prints the address."""
    with asking(as_json_) as client:
        page = client.runs.retrieve(run_id).links.dashboard if run_id else DASHBOARD
        address = f"{client.address}{page}"
        opened = webbrowser.open(address)
    if as_json_:
        printing.print_json({"url": address, "opened": opened})
        return
    print(address)
    if not opened:
        print("no browser found; open the address in one", file=sys.stderr)


OF_RUNS: dict[str, Callable[..., None]] = {
    "list": list_runs,
    "show": show,
    "health": health,
    "watch": watch,
    "events": events,
    "logs": logs,
    "metrics": metrics,
    "evals": evals,
    "rollouts": rollouts,
    "batches": batches,
    "checkpoints": checkpoints,
    "config": config,
}
OF_ALL: dict[str, Callable[..., None]] = {
    "open": open_page,
    "engines": engines,
    "workers": workers,
}
