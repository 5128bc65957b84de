"""The artifact store: commit markers, fencing, verification."""

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.rollouts import groups
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import Sample, _schema, decode_batch, encode_batch
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact, StoreUnavailable


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    """A store on disk and one on another filesystem."""
    if request.param == "local":
        return ArtifactStore(f"file://{tmp_path}/store")
    return ArtifactStore(f"memory://{tmp_path.name}")


def test_first_commit_wins_and_later_attempts_adopt_it(store: ArtifactStore) -> None:
    first = store.put("runs/r/a", b"one", attempt="1")
    second = store.put("runs/r/a", b"two", attempt="2")
    assert second == first and store.get(second) == b"one"
    assert store.committed("runs/r/a") == first and store.committed("runs/r/b") is None
    assert store.committed_keys("runs/r") == ["runs/r/a"]


def test_uncommitted_content_does_not_exist(store: ArtifactStore) -> None:
    ref = store.put("a", b"data")
    store.fs.rm(store.path("a.commit"))
    assert store.committed("a") is None and store.committed_keys("") == []
    with pytest.raises(FileNotFoundError, match="'a'"):
        store.require("a")
    assert store.put("a", b"data") == ref


@pytest.mark.parametrize("damage", [b"", b"dat", b"dbta"])
def test_damaged_content_is_refused_with_its_key(store: ArtifactStore, damage: bytes) -> None:
    ref = store.put("a", b"data")
    store.fs.pipe_file(store.path(ref.path), damage)
    with pytest.raises(CorruptArtifact, match=r"^a: .*sha256"):
        store.get(ref)
    store.fs.rm(store.path(ref.path))
    with pytest.raises(CorruptArtifact, match="missing"):
        store.get(ref)


@pytest.mark.parametrize("data", [b"", b"data", b'a\n{"key": "b"}\n\n'])
def test_a_file_inside_its_marker_is_one_file(store: ArtifactStore, data: bytes) -> None:
    first = store.put_inside("runs/r/a", data, attempt="1", schema=2)
    assert store.put_inside("runs/r/a", b"other", attempt="2") == first
    assert store.put("runs/r/a", b"other", attempt="3") == first
    assert store.committed("runs/r/a") == first and (first.schema, first.attempt) == (2, "1")
    assert store.committed_keys("runs/r") == ["runs/r/a"]
    assert store.get(store.require("runs/r/a"), schema=2) == data
    store.verify(first)
    files = store.fs.find(store.path("runs/r"))
    assert [file.rpartition("/")[2] for file in files if "@" not in file] == ["a.commit"]
    copied = store.copy(first, "runs/r/b", attempt="4")
    assert store.get(copied, schema=2) == data
    store.delete(first)
    assert store.committed("runs/r/a") is None and store.committed("runs/r/b") == copied


def test_attempts_of_builds_that_write_markers_differently_meet_at_one(
    store: ArtifactStore,
) -> None:
    older = store.put("a", b"one", attempt="1")
    assert store.put_inside("a", b"two", attempt="2") == older and store.get(older) == b"one"


def test_damage_to_a_file_inside_its_marker_is_found(store: ArtifactStore) -> None:
    ref = store.put_inside("a", b"data", attempt="1")
    path = store.path(ref.path)
    whole = store.fs.cat_file(path)
    store.fs.pipe_file(path, whole.replace(b"data", b"dbta"))
    with pytest.raises(CorruptArtifact, match=r"^a: a\.commit does not match its sha256"):
        store.get(store.require("a"))
    for cut in range(len(whole)):
        store.fs.pipe_file(path, whole[:cut])
        with pytest.raises(CorruptArtifact, match=r"^a: its marker"):
            store.committed("a")


def test_folder_is_one_artifact_and_verified_whole(store: ArtifactStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "x.bin").write_bytes(b"x" * 1000)
    (source / "sub" / "y.json").write_text("{}")
    ref = store.put_folder("w/v1", source, attempt="1")
    assert ref.size == 1002
    copy = store.fetch_folder(ref, tmp_path / "cache")
    assert (copy / "x.bin").read_bytes() == b"x" * 1000 and (copy / "sub" / "y.json").exists()
    assert store.put_folder("w/v1", source, attempt="2") == ref
    store.fs.pipe_file(store.path(f"{ref.path}/x.bin"), b"y" * 1000)
    with pytest.raises(CorruptArtifact, match=r"w/v1: .*x\.bin"):
        store.fetch_folder(ref, tmp_path / "other")
    store.delete(ref)
    assert store.committed("w/v1") is None


@pytest.mark.parametrize("kind", ["bytes", "folder", "inside"])
def test_a_deletion_that_is_cut_short_leaves_no_reference_to_what_is_gone(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x").write_text("data")
    if kind == "bytes":
        ref = store.put("a", b"data")
    elif kind == "inside":
        ref = store.put_inside("a", b"data")
    else:
        ref = store.put_folder("a", tmp_path / "source", attempt="1")
    remove = store.fs.rm

    def once(path: str, **options: bool) -> None:
        remove(path, **options)
        raise TimeoutError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(store.fs, "rm", once)
        with pytest.raises(StoreUnavailable, match="cannot delete a"):
            store.delete(ref)
    assert store.committed("a") is None
    if kind != "inside":
        store.verify(ref)


def test_keys_cannot_leave_the_store(store: ArtifactStore) -> None:
    for key in ("../x", "a/../../x", "/etc/passwd"):
        with pytest.raises(ValueError, match="leaves the store"):
            store.put(key, b"")


def test_what_is_below_a_key_is_measured(store: ArtifactStore) -> None:
    assert store.size_of("runs") == 0
    for name, size in (("a", 10_000), ("b/c", 50_000)):
        store.put(f"runs/r/{name}", b"x" * size)
    size = store.size_of("runs")
    # On a disk whole blocks count, and markers everywhere.
    assert 60_000 <= size < 100_000
    assert store.size_of("runs/r/b") < size - 10_000


def test_marks_are_made_where_there_are_none_and_stay(store: ArtifactStore) -> None:
    store.touch(["marks/a", "marks/b", "others/c"])
    store.touch(["marks/a"])
    for key in ("marks/a", "marks/b", "others/c"):
        assert store.fs.isfile(store.path(key)) and store.fs.size(store.path(key)) == 0


def test_live_records_are_replaced(store: ArtifactStore) -> None:
    assert store.read_live("runs/r/live/a.json") is None
    for value in range(3):
        store.write_live("runs/r/live/a.json", {"n": value})
    assert store.read_live("runs/r/live/a.json") == {"n": 2}
    assert store.live_keys("runs/r/live") == ["runs/r/live/a.json"]


def sample(**changes: object) -> Sample:
    """A sample of three tokens."""
    values = {
        "group": "train/0",
        "rollout": 0,
        "env": "e",
        "reward": 0.25,
        "temperature": 1.0,
        "token_ids": [1, 2, 3],
        "loss_mask": [False, True, True],
        "logprobs": [0.0, -0.1234567890123, -2.0],
        "advantages": [0.0, 0.5, 0.5],
        "versions": [-1, 0, 1],
    }
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


def test_batch_survives_its_file_bit_for_bit() -> None:
    samples = [sample(), sample(rollout=1)]
    data = encode_batch(samples)
    assert decode_batch(data) == samples and encode_batch(samples) == data


def test_batch_of_another_schema_and_misaligned_samples_are_refused() -> None:
    table = pq.read_table(io.BytesIO(encode_batch([sample()])))
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"ratchet.batch.schema": "99"}), sink)
    with pytest.raises(ValueError, match="schema 99"):
        decode_batch(sink.getvalue())
    with pytest.raises(AssertionError, match="advantages"):
        sample(advantages=[0.0])
    with pytest.raises(ValueError, match="train/0/0 has tokens for the rl loss, but no advant"):
        sample(advantages=None)
    assert sample(advantages=None, rl_weights=[0.0] * 3).advantages is None


def test_marker_is_readable_json(tmp_path: Path) -> None:
    store = ArtifactStore(f"file://{tmp_path}")
    store.put("a/b.json", b"{}", attempt="7")
    marker = json.loads((tmp_path / "a" / "b.json.commit").read_text())
    assert marker["attempt"] == "7" and marker["size"] == 2


def test_batch_that_was_cut_off_is_refused() -> None:
    data = encode_batch([sample()])
    for length in (0, 10, len(data) - 1):
        with pytest.raises(ValueError, match="Parquet"):
            decode_batch(data[:length])


@pytest.mark.parametrize("key", [keys.group("r", "train/0"), keys.rollout("r", "train/0", 0)])
def test_documents_of_a_later_schema_are_refused(store: ArtifactStore, key: str) -> None:
    assert store.get_json(store.put_json("now", {"schema": groups.SCHEMA}))
    ref = store.put_json(key, {"schema": groups.SCHEMA + 1, "group": "train/0"})
    with pytest.raises(CorruptArtifact, match=rf"{key}.*schema 2 is later than 1"):
        store.get_json(ref)


def _streams(length: int) -> Any:
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    return st.lists(numbers, min_size=length, max_size=length)


@st.composite
def _samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 5))
    streams = _streams(length)
    return Sample(
        group=draw(st.text(max_size=4)),
        rollout=draw(st.integers(0, 9)),
        env="a",
        reward=draw(st.floats(allow_nan=False)),
        temperature=1.0,
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)),
        loss_mask=draw(st.lists(st.booleans(), min_size=length, max_size=length)),
        logprobs=draw(streams),
        advantages=draw(streams),
        versions=draw(st.lists(st.integers(-1, 9), min_size=length, max_size=length)),
        rl_weights=draw(st.none() | streams),
        ref_kl_weights=None,
        ref_logprobs=draw(st.none() | streams),
    )


@given(st.lists(_samples(), max_size=4))
def test_a_batch_comes_back_and_has_the_bytes_of_ever(samples: list[Sample]) -> None:
    """A batch that an older build wrote is adopted only if its bytes are the same."""
    data = encode_batch(samples)
    table = pa.Table.from_pylist([asdict(sample) for sample in samples], schema=_schema())
    pq.write_table(table, sink := io.BytesIO(), compression="zstd")
    assert data == sink.getvalue()
    assert repr(decode_batch(data)) == repr(samples), "to the type of each item"
