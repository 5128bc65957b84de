"""Changes of a running run's config: taken at once, and made a revision of it between two steps.

Invariants: whatever was changed is durable; a revision is in the store before a step is trained by
it, and the run goes on as a new execution whose every part knows it.
"""

from typing import Any

from ratchet.activities.contracts.training import SaveConfigInput
from ratchet.configs.live import changed, needs_revision
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import config_document
from ratchet.workflows.protocol.activities import SAVE_CONFIG
from ratchet.workflows.protocol.messages import RunInput
from ratchet.workflows.protocol.state import RunState
from ratchet.workflows.rules.live_config import limits_of, shares_after
from ratchet.workflows.run.outages import Outages


def _plain(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


class ConfigChanges:
    """The config of one run. `config` is its newest revision; once one was `made`, the run is to go
    on with it as a new execution.
    """

    def __init__(self, arg: RunInput, config: RunConfig, state: RunState, mending: Outages) -> None:
        self._arg = arg
        self._state = state
        self._outages = mending
        self.config = config
        self.made = False

    def _changed(self, patch: dict[str, Any]) -> tuple[dict[str, Any], RunConfig]:
        return changed(_plain(self.config), self._state.overrides, patch)

    def current(self) -> dict[str, Any]:
        """The newest revision with what was changed since."""
        overrides = self._state.overrides
        return _plain(self._changed(overrides)[1] if overrides else self.config)

    def check(self, patch: dict[str, Any]) -> None:
        """Raises ValueError for what cannot be changed."""
        state = self._state
        _, config = self._changed(patch)
        reached = state.step + len(state.shipped) + bool(state.train.cut) + 1
        if config.max_steps < reached and config.max_steps != self.config.max_steps:
            raise ValueError(
                f"max_steps cannot become {config.max_steps}: the batch of step {reached} is under "
                "way; use `stop` to end the run sooner"
            )

    def take(self, patch: dict[str, Any]) -> None:
        """Takes what `check` let pass."""
        state = self._state
        state.overrides, config = self._changed(patch)
        state.limits = limits_of(config, state.limits)
        state.config_pending = state.config_pending or needs_revision(patch)

    async def make(self) -> None:
        """Makes the next revision, if one is due."""
        state = self._state
        if not state.config_pending:
            return
        state.config_pending = False
        _, after = self._changed(state.overrides)
        revision = state.config_revision + 1
        arg = SaveConfigInput(self._arg.run_id, revision, config_document(after))
        what = f"config revision {revision}"
        await self._outages.perform(what, lambda: SAVE_CONFIG(arg, self._arg.queues, what))
        state.shares = shares_after(state.shares, self.config, after, state.drawn_below)
        state.config_revision, self.config, self.made = revision, after, True
