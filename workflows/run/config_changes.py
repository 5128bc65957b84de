"""Changes of a running run's config: accepted at once, and made a revision between two steps.

Invariants: every accepted change is durable; a revision is in the store before a step trains with
it, and the run continues as a new execution whose every part knows it.
"""

from typing import Any

from ratchet.activities.contracts.training import SaveConfigInput
from ratchet.configs.live import Diff, changed, differences, needs_revision
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import config_document
from ratchet.workflows.protocol.activities import SAVE_CONFIG
from ratchet.workflows.rules.live_config import shares_after
from ratchet.workflows.rules.permits import Permits
from ratchet.workflows.run.context import Context


def _plain(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


class ConfigChanges:
    """The config of one run. `config` is its newest revision; once one was `made`, the run should
    continue with it as a new execution.
    """

    def __init__(self, context: Context, permits: Permits) -> None:
        self._arg = context.arg
        self._state = context.state
        self._part = context.state.live
        self._outages = context.outages
        self._permits = permits
        self.config = context.config
        self.made = False

    def _changed(self, patch: dict[str, Any]) -> tuple[dict[str, Any], RunConfig]:
        return changed(_plain(self.config), self._part.overrides, patch)

    def current(self) -> dict[str, Any]:
        """The newest revision with all later changes."""
        overrides = self._part.overrides
        return _plain(self._changed(overrides)[1] if overrides else self.config)

    def check(self, patch: dict[str, Any]) -> None:
        """Raises ValueError for what cannot be changed."""
        state = self._state
        _, config = self._changed(patch)
        reached = state.steps.step + len(state.steps.shipped) + bool(state.train.cut) + 1
        if config.last_step < reached and config.max_steps != self.config.max_steps:
            raise ValueError(
                f"max_steps cannot become {config.max_steps}: the batch of step {reached} is in "
                "progress; use `stop` to end the run sooner"
            )

    def take(self, patch: dict[str, Any]) -> Diff:
        """Applies a patch that passed `check`; returns what it changes, old and new."""
        before = self.current()
        self._part.overrides, config = self._changed(patch)
        self._permits.change(config)
        self._part.pending = self._part.pending or needs_revision(patch)
        return differences(before, _plain(config), patch)

    async def make(self) -> None:
        """Makes the next revision, if one is due."""
        part = self._part
        if not part.pending:
            return
        part.pending = False
        _, after = self._changed(part.overrides)
        revision = part.revision + 1
        arg = SaveConfigInput(self._arg.run_id, revision, config_document(after))
        what = f"config revision {revision}"
        await self._outages.perform(what, lambda: SAVE_CONFIG(arg, self._arg.queues, what))
        start = self._state.dispatch.drawn_below
        part.shares = shares_after(part.shares, self.config, after, start)
        part.revision, self.config, self.made = revision, after, True
