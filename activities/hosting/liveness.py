"""Whether a workflow is still running; an activity, since workflows cannot query it themselves."""

from dataclasses import dataclass

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from ratchet.activities.contracts import names
from ratchet.activities.contracts.hosting import DescribeInput


@dataclass(frozen=True)
class LivenessActivities:
    """Activities of the orchestrator role."""

    client: Client

    @activity.defn(name=names.IS_RUNNING)
    async def is_running(self, input: DescribeInput) -> bool:
        """False if the workflow has ended in any way, or never existed."""
        try:
            result = await self.client.get_workflow_handle(input.workflow_id).describe()
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            return False
        return result.status == WorkflowExecutionStatus.RUNNING
