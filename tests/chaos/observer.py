"""Watches a run from outside, past the proxy: how far it is, and whether the API answers.

Observations are data for the report; nothing here changes the run. Times are Unix times.
"""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.service import RPCError

from ratchet.workflows.protocol.messages import MEMO_KEY

EVERY_S = 0.25
ANSWERS_WITHIN_S = 2.0


@dataclass(frozen=True)
class Look:
    """What the run said of itself at one moment."""

    at: float
    status: str
    step: int
    version: int
    rollouts: int
    paused_because: str = ""
    waiting_for: str = ""


@dataclass
class Observer:
    """Looks in order of time; only those that differ from the one before are kept."""

    client: Client
    api: str
    run_id: str
    looks: list[Look] = field(default_factory=list)
    api_up: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def last(self) -> Look:
        """The latest look."""
        return self.looks[-1] if self.looks else Look(0.0, "queued", 0, -1, 0)

    async def run(self) -> None:
        """Looks for ever."""
        await asyncio.gather(self._watch_run(), self._watch_api())

    async def _watch_run(self) -> None:
        while True:
            # Temporal may be down: then there is nothing to see.
            with contextlib.suppress(RPCError):
                self._keep(await self._memo())
            await asyncio.sleep(EVERY_S)

    async def _watch_api(self) -> None:
        async with httpx.AsyncClient(timeout=ANSWERS_WITHIN_S) as http:
            while True:
                try:
                    up = (await http.get(f"{self.api}/healthz")).status_code == 200
                except httpx.HTTPError:
                    up = False
                if not self.api_up or self.api_up[-1][1] != up:
                    self.api_up.append((time.time(), up))
                await asyncio.sleep(2 * EVERY_S)

    async def _memo(self) -> dict[str, Any]:
        answer = await self.client.workflow_service.describe_workflow_execution(
            DescribeWorkflowExecutionRequest(
                namespace=self.client.namespace,
                execution=WorkflowExecution(workflow_id=self.run_id),
            ),
            timeout=timedelta(seconds=ANSWERS_WITHIN_S),
        )
        fields = answer.workflow_execution_info.memo.fields
        return json.loads(fields[MEMO_KEY].data) if MEMO_KEY in fields else {}

    def _keep(self, memo: dict[str, Any]) -> None:
        if not memo:
            return
        look = Look(
            at=time.time(),
            status=memo.get("status", ""),
            step=memo.get("step") or 0,
            version=memo.get("policy_version", -1),
            rollouts=sum((memo.get("rollouts") or {}).values()),
            paused_because=memo.get("paused_because") or "",
            waiting_for=(memo.get("waiting_for") or {}).get("name", ""),
        )
        before = self.last
        if (look.status, look.step, look.version, look.rollouts, look.paused_because) != (
            before.status,
            before.step,
            before.version,
            before.rollouts,
            before.paused_because,
        ):
            self.looks.append(look)

    async def until(self, ready: Any, within_s: float, what: str) -> None:
        """Waits until `ready(last look)`; raises TimeoutError saying what was waited for."""
        deadline = time.monotonic() + within_s
        while not ready(self.last):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {within_s:.0f} s; {self.last}")
            await asyncio.sleep(EVERY_S)
