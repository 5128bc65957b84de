"""A run goes on from a backup that was taken while it ran, as docs/production says.

Temporal's database is copied first and the store after it, so that the store knows of more than
Temporal does. Then the run goes on, and everything that it did since is lost. A run whose batches
come out as those of the store goes on by itself; one whose batches do not pauses, and is resumed.
"""

import contextlib
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from ratchet.activities.contracts.names import attempt_id
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker.stack import Stack
from tests.e2e.driving import ENDED, get, launch, wait_until
from tests.e2e.test_machine import make_up, shown

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.stack,
]

STEPS = 12
LATER = 3
"""Steps between the two copies, and again until everything is lost."""


def copy_database(home: Path, to: Path) -> None:
    """`sqlite3 temporal.db ".backup FILE"`."""
    with (
        closing(sqlite3.connect(home / "temporal.db")) as source,
        closing(sqlite3.connect(to)) as target,
    ):
        source.backup(target)


def copy_files(home: Path, to: Path) -> None:
    """The database of a server that is down: what was written last may lie in a file beside it."""
    for file in home.glob("temporal.db*"):
        shutil.copy(file, to)


@pytest.mark.parametrize("running", [False, True], ids=["after-make-down", "while-it-ran"])
def test_a_run_goes_on_from_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    home, backup = tmp_path / "home", tmp_path / "backup"
    backup.mkdir()
    try:
        where = make_up(home)
        small = ["train.batch_size=16", "train.group_size=4", "eval.env=[]"]
        kept = ["retention.batches=all", "checkpoint.interval=2"]
        run_id = launch(where, "reverse_text", f"max_steps={STEPS}", *small, *kept)
        wait_until(where, run_id, lambda run: run["step"] >= 2)
        if running:
            copy_database(home, backup / "temporal.db")
            wait_until(where, run_id, lambda run: run["step"] >= 2 + LATER)
            # What retention removes meanwhile is reported once all else is copied.
            with contextlib.suppress(shutil.Error):
                shutil.copytree(home / "store", backup / "store")
        else:
            Stack(home).down()
            copy_files(home, backup)
            shutil.copytree(home / "store", backup / "store")
            where = make_up(home)
        saved = max(steps_in(backup, run_id))
        wait_until(where, run_id, lambda run: run["step"] >= saved + LATER)
        Stack(home).down()
        lost = steps_in(home, run_id) - steps_in(backup, run_id)
        assert lost, "nothing was lost, so that nothing was restored"

        for file in home.glob("temporal.db*"):
            file.unlink()
        shutil.rmtree(home / "store")
        copy_files(backup, home)
        shutil.copytree(backup / "store", home / "store")
        where = make_up(home)
        assert shown(where, run_id)["step"] < min(lost), "Temporal knows of what was lost"
        run = shown(where, run_id, ("paused", *ENDED), 360)
        if paused := run["status"] == "paused":
            assert running and "is older than the store" in str(run), run
            for verb, then in (("cancel", ("cancelled",)), ("resume", ())):
                url = f"{where.api}/v1/runs/{run_id}/{verb}"
                assert httpx.post(url, trust_env=False).is_success, verb
                shown(where, run_id, then)
            wait_until(where, run_id, lambda run: run["attempt"] == 2)
        run = shown(where, run_id, ENDED, 360)
        assert run["status"] == "succeeded" and run["step"] == STEPS, run
        assert run["attempt"] == 1 + paused
        records = get(where, f"/v1/runs/{run_id}/metrics")["data"]
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        store, groups = ArtifactStore(f"file://{home}/store"), Counter[str]()
        attempts = [attempt_id(run_id, number) for number in range(1, 2 + paused)]
        for step in range(1, STEPS + 1):
            kept_in = [store.committed(keys.batch(attempt, step)) for attempt in attempts]
            (ref,) = list(filter(None, kept_in))[-1:]
            samples = decode_batch(store.get(ref))
            groups.update({sample.group.split(".")[0] for sample in samples})
        assert set(groups.values()) == {1}
    finally:
        Stack(home).down()


def steps_in(home: Path, run_id: str) -> set[int]:
    """The steps that a store has a record of."""
    store = ArtifactStore(f"file://{home}/store")
    names = store.committed_keys(keys.step_records(run_id))
    return {int("".join(filter(str.isdigit, Path(name).name))) for name in names}
