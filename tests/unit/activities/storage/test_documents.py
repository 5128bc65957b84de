"""Rollouts and groups as files: what comes back, what older builds wrote, what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.columns import PER_TOKEN, STREAMS
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact

FLOATS = st.floats(allow_nan=False)


@st.composite
def _samples(draw: st.DrawFn, *, scored: bool) -> list[dict[str, Any]]:
    def one() -> dict[str, Any]:
        length = draw(st.integers(0, 9))

        def lists(items: st.SearchStrategy[Any]) -> Any:
            return draw(st.lists(items, min_size=length, max_size=length))

        made: dict[str, Any] = {
            "token_ids": lists(st.integers(0, 2**31 - 1)),
            "loss_mask": lists(st.booleans()),
            "logprobs": lists(FLOATS),
            "versions": lists(st.integers(-1, 9)),
            "prompt": 0,
            "observations": draw(st.none() | st.just([["user", 0, 1]])),
        }
        streams = {name: lists(FLOATS) if draw(st.booleans()) else None for name in STREAMS}
        return made | (streams if scored else {})

    return [one() for _ in range(draw(st.integers(0, 3)))]


@st.composite
def _documents(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        said = draw(st.text(max_size=5))
        return {"reward": 0.5, "messages": [said], "samples": draw(_samples(scored=False))}
    members = [
        {"rollout": index, "error": None, "samples": draw(_samples(scored=True))}
        for index in range(draw(st.integers(0, 3)))
    ]
    lost = {"rollout": len(members), "error": {"type": "Lost", "message": ""}}
    return {"schema": 1, "group": "train/0", "rollouts": [*members, lost]}


def _told(document: dict[str, Any]) -> str:
    """The document in a form that shows type and bits of each number; None and absent are one."""
    told = copy.deepcopy(document)
    for holder in (told, *told.get("rollouts", ())):
        for sample in holder.get("samples", ()):
            for name in STREAMS:
                sample.setdefault(name, None)
    return json.dumps(told, sort_keys=True)


@given(_documents())
def test_a_document_comes_back(document: dict[str, Any]) -> None:
    before = _told(document)
    data = documents.encode(document)
    assert _told(document) == before, "and is left as it was"
    assert _told(documents.decode(data)) == before
    assert documents.encode(document) == data, "the same document gives the same bytes"


@given(_documents())
def test_views_hold_what_lists_do_and_are_written_alike(document: dict[str, Any]) -> None:
    data = documents.encode(document)
    lists, views = documents.decode(data), documents.decode(data, views=True)
    assert documents.encode(views) == documents.encode(lists)
    for holder in (views, *views.get("rollouts", ())):
        for sample in holder.get("samples", ()):
            for name in PER_TOKEN:
                if sample.get(name) is not None:
                    assert isinstance(sample[name], memoryview)
                    sample[name] = sample[name].tolist()
    assert _told(views) == _told(lists)


def test_tokens_are_in_columns_and_the_rest_is_for_people(tmp_path: Path) -> None:
    lists = {"token_ids": [5, 6], "loss_mask": [False, True], "logprobs": [0.0, -1.0]}
    sample = {**lists, "versions": [-1, 7], "prompt": 0}
    data = documents.encode({"reward": 1.0, "samples": [sample, sample]})
    table = pa.ipc.open_stream(data).read_all()
    assert table.select(list(lists)).to_pylist() == [lists, lists]
    head = json.loads(table.schema.metadata[b"ratchet.document"])
    assert head == {"reward": 1.0, "samples": [{"prompt": 0}] * 2}


def test_what_older_builds_wrote_is_read(tmp_path: Path) -> None:
    store, key = ArtifactStore(str(tmp_path)), keys.rollout("r", "train/0", 0)
    old = {"error": None, "samples": [{"token_ids": [1], "loss_mask": [True]}]}
    first = store.put_json(key, old, attempt="older build")
    assert documents.read(store, first) == old
    # Both builds meet at one marker: whoever commits first counts.
    assert documents.put(store, key, {"error": "other"}, attempt="this build") == first
    new = documents.put(store, keys.rollout("r", "train/0", 1), old, attempt="this build")
    assert new.schema == 2 and documents.read(store, new) == old
    with pytest.raises(CorruptArtifact, match="schema 2 is later than 1"):
        store.get_json(new)


def test_what_later_builds_wrote_is_refused(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    later = store.put("a", documents.encode({}), schema=3)
    with pytest.raises(CorruptArtifact, match="a: schema 3 is later than 2"):
        documents.read(store, later)
    fields = documents.put(store, "b", {"schema": 2}, attempt="")
    with pytest.raises(CorruptArtifact, match=r"b \(b\.commit.*schema 2 is later than 1"):
        documents.read(store, fields)


def _stream(**metadata: str) -> bytes:
    """An Arrow stream of no columns."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([], metadata=metadata)):
        pass
    data: bytes = sink.getvalue().to_pybytes()
    return data


@pytest.mark.parametrize(
    "data", [b"", b"{}", documents.encode({"a": 1})[:40], _stream(), _stream(other="{}")]
)
def test_other_bytes_are_no_document(data: bytes) -> None:
    with pytest.raises(ValueError):
        documents.decode(data)


def test_every_list_has_a_column() -> None:
    lists = {name: [1.5] for name in PER_TOKEN} | {"token_ids": [7], "versions": [3]}
    sample = lists | {"loss_mask": [True]}
    assert documents.decode(documents.encode({"samples": [sample]}))["samples"] == [sample]
