"""Host as versioned workers carry it out: it follows the current build (`worker.versioning`)."""

from temporalio import workflow
from temporalio.common import VersioningBehavior

with workflow.unsafe.imports_passed_through():
    from workflows.messages import HOST, HostWorkflowInput

from workflows.host import Host


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
