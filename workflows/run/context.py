"""What the classes of one run share. Each writes its own part of the state and may read it all."""

from dataclasses import dataclass

from temporalio import workflow

from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.messages import RunInput
from ratchet.workflows.protocol.state import RunState
from ratchet.workflows.rules.fleet import Fleet
from ratchet.workflows.run.news import News
from ratchet.workflows.run.outages import Outages
from ratchet.workflows.run.status import RunLog

NEVER = -1
"""As a number of empty batches: there is no limit."""
PAUSE_WHEN_EMPTY = "pause-when-batches-stay-empty"
"""Before it, batches that stayed empty failed a run, and nothing was published about them."""


@dataclass(frozen=True)
class Context:
    """A run as its classes see it."""

    arg: RunInput
    config: RunConfig
    state: RunState
    fleet: Fleet
    log: RunLog
    news: News
    outages: Outages

    @staticmethod
    def of(arg: RunInput, config: RunConfig, state: RunState) -> "Context":
        """The context of a run that begins or continues with `state`."""
        log, news = RunLog(arg.run_id, config, state), News()
        outages = Outages(state, log, news)
        return Context(arg, config, state, Fleet(state.servers.hosts), log, news, outages)

    def is_long(self) -> bool:
        """Whether the history of this execution has grown long."""
        info, limit = workflow.info(), self.config.dispatch.generation_events
        return info.is_continue_as_new_suggested() or info.get_current_history_length() >= limit
