"""Where the processes of a run write their logs, below RATCHET_HOME of their machine.

All attempts of a run write to the same files. When a log reaches its limit (LOG_BYTES for servers),
its content moves to the file of the same name with the suffix PAST, and it starts empty.
"""

from ratchet.activities.contracts import names

LOG_BYTES = 16 * 1024**2
PAST = ".1"


def logs_folder(run_id: str) -> str:
    """The folder of a run's logs."""
    return f"logs/{names.workflow_of(run_id)}"


def env_log(run_id: str, kind: str, name: str) -> str:
    """The log of the server of env `name`, with ':<n>' the n-th of several; `kind` is that of its
    section, 'train' if both share one server.
    """
    return f"{logs_folder(run_id)}/envs/{kind}/{name}.log"


def orchestrator_log(run_id: str) -> str:
    """The orchestrator's log of the run's pipeline and steps."""
    return f"{logs_folder(run_id)}/orchestrator.log"
