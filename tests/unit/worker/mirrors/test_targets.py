"""What targets of mirrors do with records, with stand-ins for packages that are not installed."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from ratchet.worker.mirrors.state import Record, Sample
from ratchet.worker.mirrors.targets import (
    TensorBoard,
    csv_table,
    markdown_table,
    package,
    target_of,
)


@pytest.mark.parametrize(
    "spec", ["tensorboard", "mlflow", "neptune=x", "no.such.module:make", "json:nothing"]
)
def test_what_is_no_target_is_said_at_once(spec: str) -> None:
    with pytest.raises(ValueError, match="--to"):
        target_of(spec)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ImportError, match="pip install tensorboard"):
        package("no_such_package", "tensorboard")


class FileWriter:
    """Stands in for TensorBoard's SummaryWriter: a line a scalar, in a file of such a name."""

    made = 0

    def __init__(self, folder: str, filename_suffix: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        FileWriter.made += 1
        self.file = Path(folder, f"events.{FileWriter.made}{filename_suffix}")
        self.out = self.file.open("w")

    def add_scalar(self, name: str, value: float, step: int, walltime: float | None) -> None:
        self.out.write(f"{step} {name} {value} {walltime}\n")

    def add_text(self, name: str, text: str, step: int, walltime: float | None) -> None:
        self.out.write(f"{step} {name} {len(text.splitlines())} {walltime}\n")

    def flush(self) -> None:
        self.out.flush()

    def close(self) -> None:
        self.out.close()


def test_event_files_are_cut_to_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = cast(Any, type(sys)("torch.utils.tensorboard"))
    writers.SummaryWriter = FileWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writers)

    def points(*steps: int) -> list[Record]:
        return [Record(step, 5.0, {"loss": 0.5}) for step in steps]

    def written() -> list[int]:
        files = sorted((tmp_path / "a").glob("events*"))
        return [int(line.split()[0]) for file in files for line in file.read_text().splitlines()]

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "events.of-another-tool").write_text("")
    first = TensorBoard(tmp_path)
    assert first.begin("a", "a", 0, None) == 0
    mark = first.send("a", 0, points(0, 1))
    first.send("a", 2, points(2, 3))
    # The process dies before the commit of steps 2 and 3; another dies before sending anything.
    assert TensorBoard(tmp_path).begin("a", "a", 2, mark) == 2
    second = TensorBoard(tmp_path)
    assert second.begin("a", "a", 2, mark) == 2
    assert written() == [0, 1]
    mark = second.send("a", 2, points(2, 3, 4))
    second.end("a")
    assert written() == [0, 1, 2, 3, 4] and len(mark) == 2
    assert (tmp_path / "a" / "events.of-another-tool").exists()


def standing_in(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    """A module of a package that is not installed."""
    made = cast(Any, type(sys)(module))
    vars(made).update(names)
    monkeypatch.setitem(sys.modules, module, made)


SAMPLED = Record(
    10, 5.0, {"eval/rev/pass@1": 0.5}, "10-1/rev", samples=(Sample(3, "a|b", "x\n<y>", None),)
)


def test_tensorboard_shows_a_table_of_samples_at_the_time_of_the_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=FileWriter)
    target = TensorBoard(tmp_path)
    target.begin("a", "a", 0, None)
    target.send("a", 0, [SAMPLED, Record(7, 7.5, {"gauges/r-1/permits": 1.0}, source="r-1")])
    (file,) = (tmp_path / "a").glob("events*")
    assert file.read_text().splitlines() == [
        "10 eval/rev/pass@1 0.5 5.0",
        "10 eval/rev/samples 3 5.0",
        "7 gauges/r-1/permits 1.0 7.5",
    ]


def test_tables_show_texts_as_they_are() -> None:
    head, rule, row = markdown_table(SAMPLED.rows).splitlines()
    assert head == "| step | example | prompt | reply | reward |"
    assert rule == "| --- | --- | --- | --- | --- |"
    assert row == "| 10 | 3 | a&#124;b | x<br>&#60;y&#62; |  |"
    assert csv_table(SAMPLED.rows).splitlines()[1:] == ['10,3,a|b,"x', '<y>",']


def test_wandb_draws_gauges_over_time_and_takes_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeRun:
        step = 0

        def __init__(self) -> None:
            self.axes: list[str] = []
            self.logged: list[tuple[int, dict[str, Any]]] = []

        def define_metric(self, name: str, step_metric: str = "") -> None:
            self.axes.append(f"{name}:{step_metric}")

        def log(self, values: dict[str, Any], step: int) -> None:
            self.logged.append((step, values))

        def finish(self) -> None:
            pass

    run = FakeRun()
    standing_in(
        monkeypatch, "wandb", init=lambda **_: run, Settings=lambda **_: None, Table=lambda **x: x
    )
    target = target_of("wandb=p")
    target.begin("a", "a", 0, None)
    target.begin("a", "a.gauges", 0, None)
    target.send("a", 4, [SAMPLED])
    assert run.axes == ["step:", "*:step"]
    table = {"columns": ["step", "example", "prompt", "reply", "reward"], "data": SAMPLED.rows}
    assert run.logged == [
        (4, {"eval/rev/pass@1": 0.5, "step": 10, "eval/rev/samples": table}),
    ]
    target.send("a.gauges", 0, [Record(7, 7.5, {"x": 1.0}, source="r-1")])
    assert run.axes[2:] == ["time:", "*:time"]
    assert run.logged[1] == (0, {"x": 1.0, "time": 7.5})


class FakeMlflow:
    """Stands in for MlflowClient: runs outlive it, and a call may be cut after `breaks` points."""

    runs: ClassVar[dict[str, dict[str, Any]]] = {}
    breaks: ClassVar[int | None] = None

    def __init__(self, tracking_uri: str) -> None:
        self.address = tracking_uri

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def search_runs(self, places: list[str], filter: str) -> list[Any]:
        series = filter.split("'")[1]
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=id))
            for id, run in self.runs.items()
            if run["series"] == series
        ]

    def create_run(self, place: str, tags: dict[str, str], run_name: str) -> Any:
        id = f"id-{run_name}"
        self.runs[id] = {"series": tags["ratchet.series"], "points": [], "files": {}, "status": ""}
        return SimpleNamespace(info=SimpleNamespace(run_id=id))

    def update_run(self, id: str, status: str) -> None:
        self.runs[id]["status"] = status

    def set_terminated(self, id: str) -> None:
        self.runs[id]["status"] = "FINISHED"

    def log_text(self, id: str, text: str, file: str) -> None:
        self.runs[id]["files"][file] = text

    def get_metric_history(self, id: str, name: str) -> list[Any]:
        return [point for point in self.runs[id]["points"] if point.key == name]

    def log_batch(self, id: str, metrics: list[Any]) -> None:
        self.runs[id]["points"] += metrics[: FakeMlflow.breaks]
        if FakeMlflow.breaks is not None:
            raise ConnectionError("cut")


def test_mlflow_takes_each_point_once_when_a_batch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def metric(key: str, value: float, timestamp: int, step: int) -> Any:
        return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

    standing_in(monkeypatch, "mlflow", MlflowClient=FakeMlflow)
    standing_in(monkeypatch, "mlflow.entities", Metric=metric)
    monkeypatch.setattr(FakeMlflow, "runs", {})
    batch = [*(Record(n, n + 0.5, {"loss": math.nan, "kl": 1.0}) for n in range(700)), SAMPLED]
    first = target_of("mlflow=http://host:5000=mine")
    assert first.begin("a", "a", 0, None) == 0
    monkeypatch.setattr(FakeMlflow, "breaks", 301)
    with pytest.raises(ConnectionError):
        first.send("a", 0, batch)
    monkeypatch.setattr(FakeMlflow, "breaks", None)
    second = target_of("mlflow=http://host:5000=mine")
    assert second.begin("a", "a", 0, None) == 0
    mark = second.send("a", 0, batch)
    # The process dies before the commit.
    third = target_of("mlflow=http://host:5000=mine")
    assert third.begin("a", "a", 0, mark) == 0
    assert third.send("a", 0, batch) == mark == "id-a"
    run = FakeMlflow.runs[mark]
    assert run["status"] == "RUNNING"
    result = [(point.key, point.timestamp, point.step) for point in run["points"]]
    assert len(result) == len(set(result)) == 1401
    assert ("loss", 2500, 2) in result and ("eval/rev/pass_1", 5000, 10) in result
    assert run["files"] == {"eval/rev/samples/10-1.csv": csv_table(SAMPLED.rows)}
    third.end("a")
    assert run["status"] == "FINISHED" and len(FakeMlflow.runs) == 1


@pytest.mark.parametrize(
    ("spec", "address", "experiment"),
    [
        ("mlflow=curves", f"file://{Path.cwd()}/curves", "ratchet"),
        ("mlflow=curves=mine", f"file://{Path.cwd()}/curves", "mine"),
        ("mlflow=databricks=/Users/me/x", "databricks", "/Users/me/x"),
        ("mlflow=postgresql://h/db?a=b=mine", "postgresql://h/db?a=b", "mine"),
    ],
)
def test_mlflow_has_an_address_and_an_experiment(spec: str, address: str, experiment: str) -> None:
    made = vars(target_of(spec))
    assert (made["_address"], made["_experiment"]) == (address, experiment)


@pytest.mark.parametrize(
    ("address", "names"),
    [
        ("http://host:5000", ["entropy", "entropy/all", "eval/e/avg_1", "eval/e/avg_1/low"]),
        ("curves", ["entropy", "entropy.all", "eval.e.avg_1", "eval.e.avg_1.low"]),
    ],
)
def test_no_file_of_mlflow_is_a_folder_of_another(
    monkeypatch: pytest.MonkeyPatch, address: str, names: list[str]
) -> None:
    standing_in(monkeypatch, "mlflow", MlflowClient=FakeMlflow)
    standing_in(monkeypatch, "mlflow.entities", Metric=lambda *point: SimpleNamespace(key=point[0]))
    monkeypatch.setattr(FakeMlflow, "runs", {})
    target = target_of(f"mlflow={address}=mine")
    target.begin("a", "a", 0, None)
    metrics = ["entropy", "entropy/all", "eval/e/avg@1", "eval/e/avg@1/low"]
    mark = target.send("a", 0, [Record(1, 1.0, dict.fromkeys(metrics, 1.0))])
    assert [point.key for point in FakeMlflow.runs[mark]["points"]] == names
