"""What a workflow gets when storage fails under an activity."""

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput

from ratchet.activities.contracts import names
from ratchet.activities.runtime.failing import StorageFailures
from ratchet.activities.storage.store import ArtifactStore


class Last(ActivityInboundInterceptor):
    """The end of the chain: carries out the activity."""

    def __init__(self) -> None:
        """Nothing comes after it."""

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        return await input.fn(*input.args)


async def intercepted(work: Callable[[], Awaitable[Any]]) -> Any:
    chain = StorageFailures().intercept_activity(Last())
    given = ExecuteActivityInput(fn=work, args=(), executor=None, headers={})
    return await ActivityEnvironment().run(chain.execute_activity, given)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
async def test_a_disk_that_fails_is_reported_at_once(number: int) -> None:
    async def work() -> None:
        raise OSError(number, os.strerror(number), "/scratch/weights")

    with pytest.raises(ApplicationError, match=r"/scratch/weights.*; (free|check)") as caught:
        await intercepted(work)
    assert caught.value.type == names.STORE_FAILED and caught.value.non_retryable


async def test_a_store_that_fails_is_reported_at_once(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*given: object) -> None:
        raise TimeoutError("no answer within 30 s")

    async def work() -> None:
        monkeypatch.setattr(store.fs, "cat_file", hang)
        store.committed("runs/r/a")

    with pytest.raises(ApplicationError, match=r"cannot read runs/r/a.*no answer") as caught:
        await intercepted(work)
    assert caught.value.type == names.STORE_FAILED and caught.value.non_retryable


async def test_damage_is_reported_with_a_remedy(store: ArtifactStore) -> None:
    ref = store.put("runs/r/a", b"data")

    async def work() -> bytes:
        return store.get(ref)

    assert await intercepted(work) == b"data"
    Path(store.path(ref.path)).write_bytes(b"dat")
    with pytest.raises(ApplicationError, match=r" runs/r/a: .*3 of 4 bytes; restore it") as caught:
        await intercepted(work)
    assert caught.value.type == names.CORRUPT and caught.value.non_retryable
    later = store.put("runs/r/b", b"", schema=2)

    async def ahead() -> bytes:
        return store.get(later)

    with pytest.raises(ApplicationError, match="read it with that version") as caught:
        await intercepted(ahead)
    assert caught.value.type == names.CORRUPT


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        FileNotFoundError("none"),
        ValueError("a bug"),
        ApplicationError("told", type=names.ENGINE_LOST),
    ],
)
async def test_other_failures_stay_as_they_are(error: Exception) -> None:
    async def work() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await intercepted(work)
    assert caught.value is error
