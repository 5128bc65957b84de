"""Which runs are open, as Temporal's list says."""

from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from ratchet.api.temporal.client import Temporal


@pytest.mark.parametrize("status", [RPCStatusCode.INVALID_ARGUMENT, RPCStatusCode.INTERNAL])
async def test_a_server_that_knows_no_paused_workflows_has_none(
    monkeypatch: pytest.MonkeyPatch, status: RPCStatusCode
) -> None:
    temporal = Temporal(None, timeout_s=1.0)

    async def listed(query: str, most: int) -> list[Any]:
        if "'Paused'" in query:
            raise RPCError("invalid ExecutionStatus value 'Paused'", status, b"")
        return ["running"] * most

    monkeypatch.setattr(temporal, "listed", listed)
    if status == RPCStatusCode.INVALID_ARGUMENT:
        assert await temporal.open_runs(2) == ["running"] * 2
    else:
        with pytest.raises(RPCError):
            await temporal.open_runs(2)
