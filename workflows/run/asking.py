"""What a workflow has to ask the server by an activity."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from ratchet.activities.contracts import names
    from ratchet.activities.contracts.hosting import DescribeInput
    from ratchet.workflows.protocol import policies


async def is_running(workflow_id: str, queue: str) -> bool:
    """Whether a workflow runs; `queue` is that of the orchestrator role."""
    running: bool = await workflow.execute_activity(
        names.IS_RUNNING,
        DescribeInput(workflow_id),
        result_type=bool,
        task_queue=queue,
        **policies.STORE_WORK,
        summary=f"is {workflow_id} running?",
    )
    return running
