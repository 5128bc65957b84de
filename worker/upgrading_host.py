"""Host as versioned workers run it: it follows the current build (`ratchet.worker.versioning`)."""

from temporalio import workflow
from temporalio.common import VersioningBehavior

from ratchet.workflows.host import Host
from ratchet.workflows.protocol.messages import HOST, HostWorkflowInput


@workflow.defn(name=HOST, versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class UpgradingHost(Host):
    """A Host that moves to the current build at its next workflow task."""

    @workflow.init
    def __init__(self, arg: HostWorkflowInput) -> None:
        super().__init__(arg)

    @workflow.run
    async def run(self, arg: HostWorkflowInput) -> None:
        """As a Host's."""
        await super().run(arg)
