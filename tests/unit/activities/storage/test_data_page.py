"""The page about a run's data names what the code writes, and its lines read it."""

import inspect
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from docs.step_metrics import undescribed
from ratchet.activities.contracts.rollouts import Gauges, GroupWork
from ratchet.activities.envs.samples import Rollout, RolloutSample, failed, to_document
from ratchet.activities.scoring import batches, subsets
from ratchet.activities.scoring.filters import Verdict
from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.batch import SCHEMA_VERSION, Sample, encode_batch
from ratchet.activities.storage.columns import STREAMS
from ratchet.activities.storage.store import ArtifactStore
from tests import ROOT
from tests.groups import score_group

PAGE = (ROOT / "docs" / "data.md").read_text()
GIVEN: dict[str, Any] = {
    "run": "RUN",
    "group": "train/12",
    "index": 3,
    "step": 7,
    "revision": 2,
    "version": 7,
    "day": "2026-01-31",
    "hour": "2026-01-31/05",
    "created_ms": 1769835600250,
    "deleted_ms": 1769835600250,
    "digest": "0123456789abcdef",
    "epoch": "5-1/reverse-text",
    "source": "rollout-host-71",
    "chunk": 1767268800250,
}
BLOCKS = re.findall(r"^```python\n(.*?)\n```$", PAGE, re.M | re.S)
SAMPLE = Sample(
    "train/12", 0, "e", 1.0, 1.0, [5, 6], [False, True], [0.0, -1.0], [0.0, 0.5], [-1, 7]
)


def _section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def _rows(title: str) -> list[list[str]]:
    """Cells of a section's table, without its head."""
    lines = [line for line in _section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def _named(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) < 210


def test_every_key_is_there() -> None:
    made = {
        function(**{name: GIVEN[name] for name in inspect.signature(function).parameters})
        for _, function in inspect.getmembers(keys, inspect.isfunction)
    } | {keys.config("RUN")}
    folders = {key for key in made if any(other.startswith(f"{key}/") for other in made)}
    assert {row[0].strip("`") for row in _rows("Layout")} == made - folders


def test_columns(tmp_path: Path) -> None:
    path = tmp_path / "batch.parquet"
    path.write_bytes(encode_batch([SAMPLE]))
    schema = pyarrow.parquet.read_schema(path)
    said = [(name.strip("`"), kind) for name, kind, _ in _rows("Batches")]
    found = [(f.name, str(f.type).replace("element: ", "")) for f in schema]
    assert said == found
    assert f"Schema {SCHEMA_VERSION} " in _section("Batches")
    assert schema.metadata[b"ratchet.batch.schema"] == str(SCHEMA_VERSION).encode()


def test_the_line_that_reads_a_batch(tmp_path: Path) -> None:
    store, key = ArtifactStore(str(tmp_path)), keys.batch("RUN", 7)
    store.put(key, encode_batch([SAMPLE]))
    line = BLOCKS[1]
    names: dict[str, Any] = {"pyarrow": pyarrow, "json": json, "store": str(tmp_path), "key": key}
    exec(line, names)
    assert names["table"].to_pylist() == [asdict(SAMPLE)]
    (pattern,) = re.findall(r"read_parquet\('(.*)'\)", PAGE)
    found = tmp_path.glob(pattern.removeprefix(".ratchet/store/"))
    assert [str(path.relative_to(tmp_path)) for path in found] == [store.require(key).path]


def test_the_lines_that_count_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ArtifactStore(str(tmp_path / ".ratchet/store"))
    monkeypatch.chdir(tmp_path)

    def cut(step: int, *groups: str) -> None:
        digest = f"{step}{len(groups)}".ljust(16, "0")
        store.put_json(keys.step_groups("RUN", step, digest), {"step": step, "groups": groups})

    cut(1, "train/0", "train/2.1")
    cut(2, "train/3", "train/4.2")
    exec(BLOCKS[0], {})
    assert capsys.readouterr().out == "used: 4; more than once: []; not used: [1]\n"
    cut(3, "train/1", "train/5", "train/2.2", "train/5.1")
    exec(BLOCKS[0], {})
    assert capsys.readouterr().out == "used: 6; more than once: [2, 5]; not used: []\n"


def test_documents() -> None:
    rollouts, said = _section("Rollouts and groups").split("A group: ")
    sample = RolloutSample([5, 6], [False, True], [0.0, -1.0], [-1, 7])
    record = {
        "messages": [],
        "turns": 1,
        "truncated": False,
        "responded": True,
        "stop": "done",
        "metrics": {},
        "rewards": {},
    }
    done = Rollout(1.0, [sample], record, labels=["7.1a"])
    document = {**to_document(done), "temperature": 1.0}
    assert set(document) | set(asdict(sample)) <= _named(rollouts)
    assert set(to_document(failed("Timeout", ""))) <= _named(rollouts)
    work = GroupWork("train/12", "train", "e", 0, 2)
    erred = to_document(replace(done, samples=[], error={"type": "Timeout", "message": ""}))
    group = score_group(
        work, [document, erred], 7, "", post_batch=lambda samples, *, reward: Verdict()
    )
    member = group["rollouts"][0]
    assert set(group) | set(member) <= _named(said)
    assert set(member["samples"][0]) - set(asdict(sample)) == set(STREAMS)


def test_a_marker_that_holds_a_rollout_is_read_as_one(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    ref = documents.put(store, "a", {"samples": [{"token_ids": [5, 6]}]}, attempt="1")
    marker = (tmp_path / "a.commit").read_bytes()
    assert json.loads(marker.splitlines()[-1])["path"] == ref.path == "a.commit"
    table = pyarrow.ipc.open_stream(marker).read_all()
    assert table.to_pylist() == [{"token_ids": [5, 6]}]
    assert json.loads(table.schema.metadata[b"ratchet.document"]) == {"samples": [{}]}


def test_every_metric_of_a_batch_is_in_the_reference() -> None:
    rollout = batches.BatchRollout(
        1.0, 4, 2, 1, False, 1, 0.5, versions=(6, 7), timing={"model": 1.0}, metrics={"exact": 1.0}
    )
    group = batches.BatchGroup("e", 2, 1, 6, [rollout])
    found = batches.summarize([group], 8, pre_batch=["f"], post_batch=["f"])
    found |= subsets.summarize([group])
    assert not undescribed(found)


def test_gauges() -> None:
    assert {field for field in asdict(Gauges())} <= _named(_section("Steps, evals, gauges"))
