"""A step record is put together from its parts."""

from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts.training import StepRecord
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.store_activities import StoreActivities
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import CorruptArtifact


async def test_parts_are_merged_under_the_records_own_metrics(tmp_path: Path) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    batch = ctx.store.put_json(keys.batch_metrics("r", 2, "a" * 64), {"a": 1.0, "b": 1.0, "c": 1.0})
    train = ctx.store.put_json(keys.train_metrics("r", 2, "b" * 64), {"b": 2.0, "c": 2.0})
    assert batch.key != keys.batch_metrics("r", 2, "c" * 64)
    run, store = ActivityEnvironment().run, StoreActivities(ctx)
    await run(store.record_step, StepRecord("r", 2, {"c": 3.0, "d": 3.0}, [batch, train]))
    await run(store.record_step, StepRecord("r", 2, {"late": 1.0}))
    await run(store.record_step, StepRecord("r", 3, {"alone": 1.0}))
    assert ctx.store.committed_keys(keys.step_records("r")) == [
        keys.step_record("r", step) for step in (2, 3)
    ]
    records = [ctx.store.get_json(ctx.store.require(keys.step_record("r", s))) for s in (2, 3)]
    assert records[0]["metrics"] == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.0}
    assert (records[1]["step"], records[1]["metrics"]) == (3, {"alone": 1.0})


async def test_a_record_without_one_of_its_parts_is_not_kept(tmp_path: Path) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    part = ctx.store.put_json(keys.batch_metrics("r", 1, "a" * 64), {"a": 1.0})
    (tmp_path / "store" / part.path).write_text("{}")
    with pytest.raises(CorruptArtifact, match="batch-00000001"):
        await ActivityEnvironment().run(
            StoreActivities(ctx).record_step, StepRecord("r", 1, {}, [part])
        )
    assert ctx.store.committed(keys.step_record("r", 1)) is None
