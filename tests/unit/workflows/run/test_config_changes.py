"""Which changes of a running run's config come too late."""

import pytest

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.workflows.protocol.messages import RunInput
from ratchet.workflows.protocol.state import PermitsState, RunState, ShippedBatch
from ratchet.workflows.rules.live_config import limits_of
from ratchet.workflows.rules.permits import Permits
from ratchet.workflows.run.config_changes import ConfigChanges
from ratchet.workflows.run.context import Context
from tests.unit.workflows.support import config, delivered

CONFIG = config()


def made(state: RunState) -> ConfigChanges:
    """Of a run of ten steps."""
    state.permits = PermitsState(limits_of(CONFIG))
    context = Context.of(RunInput("run", CONFIG.model_dump(mode="json")), CONFIG, state)
    return ConfigChanges(context, Permits(CONFIG, state, context.fleet))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("shipped", [0, 1, 2])
def test_a_run_ends_no_sooner_than_with_the_batch_that_is_under_way(
    shipped: int, cut: bool
) -> None:
    state = RunState()
    state.steps.step = 3
    batch = ArtifactRef("b", "0", 1, "b")
    state.steps.shipped = [ShippedBatch(4 + n, batch, {}, None, 0.0) for n in range(shipped)]
    state.train.cut = [delivered("train/9")] if cut else []
    changes = made(state)
    under_way = 3 + shipped + cut + 1
    changes.check({"max_steps": under_way})
    with pytest.raises(ValueError, match=f"the batch of step {under_way} is"):
        changes.check({"max_steps": under_way - 1})
    changes.check({"trainer": {"optim": {"lr": 0.5}}})
