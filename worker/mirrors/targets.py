"""Where curves are mirrored to. Packages are imported where they are used: none is required.

A series is a run as the target shows it. Its records are numbered from 0, which is how a target
that keeps them elsewhere recognizes one that it has. A `mark` is any JSON value of the target's
own, kept for it together with the number of records it stands for.
"""

import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from ratchet.worker.mirrors.state import Record

MADE_BY_US = ".ratchet"


class Target(Protocol):
    """A receiver of series. Methods raise whatever goes wrong; they are tried again later."""

    every_s: float
    """Seconds between two looks at the API."""

    def begin(self, run_id: str, series: str, count: int, mark: Any) -> int:
        """How many records of a series it holds, at least `count`. Asked before the first is sent
        and after any failure; what came after `mark` may be undone here, if it cannot be counted.
        """
        ...

    def send(self, series: str, first: int, records: Sequence[Record]) -> Any:
        """Takes records `first`, `first + 1`, …; returns the mark once they are kept."""
        ...

    def end(self, series: str) -> None:
        """Lets go of a series; it may begin again."""
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


class TensorBoard:
    """Event files, in a folder a series below `folder`, one for each time that a process begins.

    Event files can be cut: the mark is the size of each, and what is beyond it was not committed.
    """

    every_s = 5.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def begin(self, run_id: str, series: str, count: int, mark: Any) -> int:
        # A flush of this writer waits until all is written; that of tensorboardX does not.
        writer = package("torch.utils.tensorboard", "torch tensorboard")
        sizes: dict[str, int] = mark or {}
        for file in self._files(series):
            if file.name not in sizes:
                file.unlink()
            elif file.stat().st_size > sizes[file.name]:
                os.truncate(file, sizes[file.name])
        # Viewers read files in the order of their names, and a name has the second only.
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
    """Runs of a W&B project, grouped by run. The record's number is W&B's own step, which is what
    tells how many the server has; curves are drawn over the metric `step`.

    Nothing is sure before a W&B run is finished, so that each batch is a session of its own, and
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
        run = self._open(series)
        for number, record in enumerate(records, first):
            run.log({**record.values, "step": record.step}, step=number)
        run.finish()
        return None

    def _open(self, series: str) -> Any:
        wandb = package("wandb", "wandb")
        run = wandb.init(
            project=self._project,
            id=re.sub(r"[^A-Za-z0-9_.-]", "-", series),
            name=series,
            group=self._groups[series],
            resume="allow",
            reinit="finish_previous",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run


class Trackio(_OfProject):
    """Runs of a trackio project. A local project tells how many records it has; what goes to a
    Space or a server of one's own is taken as sent once trackio has finished the run.
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
            run.log(dict(record.values), step=record.step)
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


def target_of(spec: str) -> Target:
    """The target of `tensorboard=DIR`, `wandb[=PROJECT]`, `trackio[=PROJECT]`, or of
    `MODULE:FACTORY[=ARGUMENT]`, a function of one's own from a text to a Target.

    Raises ValueError for anything else.
    """
    kind, _, argument = spec.partition("=")
    if kind == "tensorboard" and argument:
        return TensorBoard(Path(argument).expanduser().absolute())
    if kind == "wandb":
        return Wandb(argument or "ratchet")
    if kind == "trackio":
        return Trackio(argument or "ratchet")
    module, colon, factory = kind.partition(":")
    if not (module and colon and factory):
        raise ValueError(
            f"--to {spec!r} is no target; it is tensorboard=DIR, wandb[=PROJECT], "
            "trackio[=PROJECT] or MODULE:FACTORY[=ARGUMENT]"
        )
    try:
        target: Target = getattr(importlib.import_module(module), factory)(argument)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--to {spec!r}: {error}; MODULE must be importable") from error
    return target
