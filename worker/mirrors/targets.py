"""Where curves are mirrored to. Packages are imported where they are used: none is required.

A series is a run as the target shows it. Its records are numbered from 0, which is how a target
that stores them elsewhere recognizes one that it has. A `mark` is any JSON value of the target's
own, stored for it together with the number of records it stands for.
"""

import csv
import importlib
import io
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from ratchet.worker.mirrors.state import COLUMNS, Record

MADE_BY_US = ".ratchet"
KINDS = (
    "tensorboard=DIR, wandb[=PROJECT], mlflow=ADDRESS[=EXPERIMENT], trackio[=PROJECT] or "
    "MODULE:FACTORY[=ARGUMENT]"
)
PROJECT = "ratchet"
MLFLOW_METRICS = 1000
"""MLflow's limits per request."""


class Target(Protocol):
    """A receiver of series. Methods raise any error; calls are retried later."""

    every_s: float
    """Seconds between two queries of the API."""

    def begin(self, run_id: str, series: str, count: int, mark: Any) -> int:
        """How many records of a series it holds, at least `count`. Called before the first one is
        sent and after any failure; records after `mark` may be undone here, if they cannot be
        counted.
        """
        ...

    def send(self, series: str, first: int, records: Sequence[Record]) -> Any:
        """Takes records `first`, `first + 1`, …; returns the mark once they are stored."""
        ...

    def end(self, series: str) -> None:
        """Closes a series; it may begin again."""
        ...


def package(module: str, pip: str) -> ModuleType:
    """An optional package; raises ImportError that says what to install."""
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}); install it for this Python: pip install {pip}"
        ) from error


def markdown_table(rows: Sequence[Sequence[Any]]) -> str:
    """Rows by `COLUMNS` as a Markdown table that shows every text literally."""
    cells = ["" if cell is None else str(cell) for row in rows for cell in row]
    shown = [re.sub(r"[!-/:-@\[-`{-~]", lambda mark: f"&#{ord(mark[0])};", cell) for cell in cells]
    cells = [re.sub(r"\r\n|\r|\n", "<br>", cell) for cell in shown]
    width = len(COLUMNS)
    lines = [list(COLUMNS), ["---"] * width]
    lines += [cells[at : at + width] for at in range(0, len(cells), width)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def csv_table(rows: Sequence[Sequence[Any]]) -> str:
    """Rows by `COLUMNS` as CSV."""
    out = io.StringIO()
    csv.writer(out).writerows([COLUMNS, *rows])
    return out.getvalue()


class TensorBoard:
    """Event files, in a folder per series below `folder`, one each time a process begins.

    Event files can be truncated: the mark is the size of each, and the rest was not committed.
    """

    every_s = 5.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def begin(self, run_id: str, series: str, count: int, mark: Any) -> int:
        # A flush of this writer waits until everything is written; that of tensorboardX does not.
        writer = package("torch.utils.tensorboard", "torch tensorboard")
        sizes: dict[str, int] = mark or {}
        for file in self._files(series):
            if file.name not in sizes:
                file.unlink()
            elif file.stat().st_size > sizes[file.name]:
                os.truncate(file, sizes[file.name])
        # Viewers read files in the order of their names, whose times have whole seconds only.
        suffix = f".{len(sizes):06d}{MADE_BY_US}"
        self._writers[series] = writer.SummaryWriter(
            str(self._folder / series), filename_suffix=suffix
        )
        return count

    def send(self, series: str, first: int, records: Sequence[Record]) -> Any:
        writer = self._writers[series]
        for record in records:
            for name, value in record.values.items():
                writer.add_scalar(name, value, record.step, walltime=record.time)
            if record.samples:
                table = markdown_table(record.rows)
                writer.add_text(record.table, table, record.step, walltime=record.time)
        writer.flush()
        sizes = {}
        for file in self._files(series):
            with file.open("rb") as written:
                os.fsync(written.fileno())
            sizes[file.name] = file.stat().st_size
        return sizes

    def end(self, series: str) -> None:
        if writer := self._writers.pop(series, None):
            writer.close()

    def _files(self, series: str) -> list[Path]:
        return sorted((self._folder / series).glob(f"*{MADE_BY_US}"))


class _OfProject:
    """Runs of a project: each series is one of them, grouped by run."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._groups: dict[str, str] = {}

    def end(self, series: str) -> None:
        self._groups.pop(series, None)


class Wandb(_OfProject):
    """Runs of a W&B project, grouped by run. The record's number is W&B's own step, which shows how
    many the server has; curves are drawn over the metric `step`, gauges over `time`.

    Nothing is certain before a W&B run is finished, so each batch is a session of its own, and
    batches are rare. Offline (WANDB_MODE), each is a folder for `wandb sync`.
    """

    every_s = 60.0

    def begin(self, run_id: str, series: str, count: int, mark: Any) -> int:
        self._groups[series] = run_id
        run = self._open(series)
        held: int = run.step
        run.finish()
        return max(held, count)

    def send(self, series: str, first: int, records: Sequence[Record]) -> Any:
        wandb = package("wandb", "wandb")
        run = self._open(series)
        axis = "time" if records[0].source else "step"
        run.define_metric(axis)
        run.define_metric("*", step_metric=axis)
        for number, record in enumerate(records, first):
            values: dict[str, Any] = {**record.values, axis: getattr(record, axis)}
            if record.samples:
                values[record.table] = wandb.Table(columns=[*COLUMNS], data=record.rows)
            run.log(values, step=number)
        run.finish()
        return None

    def _open(self, series: str) -> Any:
        wandb = package("wandb", "wandb")
        return wandb.init(
            project=self._project,
            id=re.sub(r"[^A-Za-z0-9_.-]", "-", series),
            name=series,
            group=self._groups[series],
            resume="allow",
            reinit="finish_previous",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )


class Trackio(_OfProject):
    """Runs of a trackio project. A local project reports how many records it has; records for a
    Space or a self-hosted server count as sent once trackio has finished the run.
    """

    every_s = 10.0

    def begin(self, run_id: str, series: str, count: int, mark: Any) -> int:
        self._groups[series] = run_id
        held = self._held(series)
        return count if held is None else max(held, count)

    def send(self, series: str, first: int, records: Sequence[Record]) -> Any:
        trackio = package("trackio", "trackio")
        run = trackio.init(
            project=self._project,
            name=series,
            group=self._groups[series],
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        for record in records:
            values: dict[str, Any] = {**record.values}
            if record.samples:
                values[record.table] = trackio.Table(columns=[*COLUMNS], data=record.rows)
            run.log(values, step=record.step)
        trackio.finish()
        held = self._held(series)
        if held is not None and held < first + len(records):
            raise OSError(f"trackio has {held} of {first + len(records)} records of {series}")
        return None

    def _held(self, series: str) -> int | None:
        package("trackio", "trackio")
        if os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"):
            return None
        storage = package("trackio.sqlite_storage", "trackio").SQLiteStorage
        return len(storage.get_logs(self._project, series))


class Mlflow:
    """Runs of an MLflow experiment, tagged with their run and series; the mark is the id of one.
    Tables are CSV artifacts.

    MLflow does not report how much of a batch it took, but it does report the points of a metric:
    after an interruption those are left out, and a table replaces itself. Records without a time
    are at 0.
    """

    every_s = 10.0

    def __init__(self, address: str, experiment: str) -> None:
        self._address = address
        self._experiment = experiment
        self._ids: dict[str, str] = {}
        self._interrupted: set[str] = set()

    @cached_property
    def _client(self) -> Any:
        return package("mlflow", "mlflow-skinny").MlflowClient(tracking_uri=self._address)

    def begin(self, run_id: str, series: str, count: int, mark: Any) -> int:
        self._ids[series] = mark or self._find(run_id, series)
        self._client.update_run(self._ids[series], status="RUNNING")
        self._interrupted.add(series)
        return count

    def _find(self, run_id: str, series: str) -> Any:
        known = self._client.get_experiment_by_name(self._experiment)
        place = known.experiment_id if known else self._client.create_experiment(self._experiment)
        runs = self._client.search_runs([place], f"tags.`ratchet.series` = '{series}'")
        if not runs:
            tags = {"ratchet.run": run_id, "ratchet.series": series}
            runs = [self._client.create_run(place, tags=tags, run_name=series)]
        return runs[0].info.run_id

    def _named(self, name: str) -> str:
        """A metric's name within MLflow's restrictions. In a folder a metric is a file, so that no
        name may lie below another.
        """
        allowed = re.sub(r"[^\w./: -]", "_", name)
        return allowed.replace("/", ".") if self._address.startswith("file:") else allowed

    def send(self, series: str, first: int, records: Sequence[Record]) -> Any:
        id = self._ids[series]
        for record in records:
            if record.samples:
                file = f"{record.table}/{record.eval.partition('/')[0]}.csv"
                self._client.log_text(id, csv_table(record.rows), file)
        points = [
            (self._named(name), value, int((record.time or 0) * 1000), record.step)
            for record in records
            for name, value in record.values.items()
        ]
        if series in self._interrupted:
            held = {
                (name, str(point.value), point.timestamp, point.step)
                for name in {name for name, *_ in points}
                for point in self._client.get_metric_history(id, name)
            }
            points = [
                point for point in points if (point[0], str(point[1]), *point[2:]) not in held
            ]
        metric = package("mlflow.entities", "mlflow-skinny").Metric
        for at in range(0, len(points), MLFLOW_METRICS):
            some = [metric(*point) for point in points[at : at + MLFLOW_METRICS]]
            self._client.log_batch(id, metrics=some)
        self._interrupted.discard(series)
        return id

    def end(self, series: str) -> None:
        self._client.set_terminated(self._ids.pop(series))


def target_of(spec: str) -> Target:
    """The target for a text of one of `KINDS`; a FACTORY is a function of your own from a text to a
    Target. MLflow's ADDRESS is a folder or a URI, which needs an EXPERIMENT after it if it contains
    a '='.

    Raises ValueError for anything else.
    """
    kind, _, argument = spec.partition("=")
    if kind == "tensorboard" and argument:
        return TensorBoard(Path(argument).expanduser().absolute())
    if kind == "wandb":
        return Wandb(argument or PROJECT)
    if kind == "trackio":
        return Trackio(argument or PROJECT)
    if kind == "mlflow" and argument:
        address, _, experiment = argument.rpartition("=") if "=" in argument else (argument, "", "")
        if "://" not in address and address != "databricks":
            address = Path(address).expanduser().absolute().as_uri()
        return Mlflow(address, experiment or PROJECT)
    module, colon, factory = kind.partition(":")
    if not (module and colon and factory):
        raise ValueError(f"--to {spec!r} is not a target; use {KINDS}")
    try:
        target: Target = getattr(importlib.import_module(module), factory)(argument)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--to {spec!r}: {error}; MODULE must be importable") from error
    return target
