"""A process goes on with its own bits, whoever committed first."""

from pathlib import Path

import pytest

from ratchet.activities.storage import keys
from ratchet.activities.storage.fencing import (
    Nondeterministic,
    commit,
    holds,
    variant,
    variants,
)
from ratchet.activities.storage.retention import number_of
from ratchet.activities.storage.store import ArtifactStore


def folder(path: Path, **files: str) -> Path:
    (path / "sub").mkdir(parents=True)
    for name, text in files.items():
        (path / "sub" / name).write_text(text)
    return path


def test_equal_bits_are_adopted_and_others_go_beside_them(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    one = folder(tmp_path / "one", a="1", note="x")
    first = commit(store, "k", one, epoch=1, attempt="t1")
    assert commit(store, "k", one, epoch=2, attempt="t2") == first

    noted = folder(tmp_path / "noted", a="1", note="y")
    assert commit(store, "k", noted, epoch=2, attempt="t3", ignored=["sub/note"]) == first
    own = commit(store, "k", noted, epoch=2, attempt="t4")
    assert own.key == variant("k", 2) == "k.e2"
    assert (store.fetch_folder(own) / "sub" / "note").read_text() == "y"
    assert commit(store, "k", noted, epoch=2, attempt="t5") == own

    more = folder(tmp_path / "more", a="1", note="x", b="")
    assert commit(store, "k", more, epoch=3, attempt="t6").key == "k.e3"
    with pytest.raises(Nondeterministic):
        commit(store, "k", more, epoch=2, attempt="t7")


def test_what_lost_its_manifest_is_not_adopted(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    one = folder(tmp_path / "one", a="1")
    first = commit(store, "k", one, epoch=1, attempt="t1")
    Path(store.path(f"{first.path}/manifest.json")).unlink()
    assert commit(store, "k", one, epoch=1, attempt="t2").key == "k.e1"


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_what_lost_a_part_of_its_content_is_not_adopted(tmp_path: Path, damage: str) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    one = folder(tmp_path / "one", a="1", note="x")
    first = commit(store, "k", one, epoch=1, attempt="t1")
    part = Path(store.path(f"{first.path}/sub/a"))
    part.unlink() if damage == "gone" else part.write_bytes(b"")
    assert not holds(store, first, one)
    own = commit(store, "k", one, epoch=2, attempt="t2")
    assert own.key == "k.e2"
    assert (store.fetch_folder(own) / "sub" / "a").read_text() == "1"


def test_variants_of_a_key_by_epoch() -> None:
    key = keys.weights("r", 7)
    there = [f"{key}.e10", f"{key}.e2", key, f"{key}0", f"{key}.e", f"{key}.e2x"]
    assert variants(key, there) == [key, f"{key}.e2", f"{key}.e10"]
    assert number_of(variant(key, 12)) == 7, "retention knows them by their number"
    assert number_of(variant(keys.checkpoint("r", 7), 12)) == 7
