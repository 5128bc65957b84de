"""What workflows share with their worker; the SDK's sandbox loads everything else for each run.

Invariant: neither `ratchet` nor one of the four workflow modules is shared. These run in the
sandbox, which blocks clocks and randomness; the rooms beneath them are loaded once.
"""

from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

SHARED = (
    "ratchet.activities",
    "ratchet.configs",
    "ratchet.workflows.protocol",
    "ratchet.workflows.rules",
    "ratchet.workflows.run",
)
"""Prefixes of module names."""

SANDBOX = SandboxedWorkflowRunner(
    restrictions=SandboxRestrictions.default.with_passthrough_modules(*SHARED)
)
