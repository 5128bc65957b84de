"""A run's durable state as a checkpoint holds it, and as another attempt or a fork starts with it.

Pure. Invariant: what was collected, cut or shipped at the checkpoint trains after it; groups that
were in flight are requeued under their ids; evals that had not ended start over.
"""

from collections.abc import Sequence
from dataclasses import replace

from pydantic_core import to_json

from ratchet.activities.contracts.names import workflow_of
from ratchet.activities.contracts.training import RestoreInput, RestoreResult
from ratchet.activities.contracts.upgrades import CHECKPOINT_STATE
from ratchet.configs.run import RunConfig, data_of
from ratchet.configs.upgrades import config_document, read_config
from ratchet.configs.versions import SCHEMA
from ratchet.workflows.protocol.state import (
    ArrivalsState,
    CurriculumState,
    DispatchState,
    GenerationState,
    HostState,
    Lease,
    Origin,
    OutagesState,
    Requests,
    RunState,
    TrainerState,
    TrainProgress,
)
from ratchet.workflows.rules.fleet import hosts_of
from ratchet.workflows.rules.live_config import limits_of, shares_after
from ratchet.workflows.rules.sinks import TrainSink


def kept(state: RunState, config: RunConfig, given_up: Sequence[str] = ()) -> str:
    """The run's state that a checkpoint holds besides its trainer's, as JSON text. Groups that were
    `given_up` for the run's end are rolled out by who goes on from here.
    """
    # Otherwise every later checkpoint would keep what this one refers to.
    lean = replace(state, trainer=replace(state.trainer, checkpoint=None, older=None, batches=[]))
    requeued = [*state.dispatch.requeued, *given_up]
    lean = replace(lean, dispatch=replace(state.dispatch, requeued=requeued))
    number = CHECKPOINT_STATE.current
    return to_json({SCHEMA: number, "state": lean, "config": config_document(config)}).decode()


def restored(
    arg: RestoreInput, result: RestoreResult, state: RunState, config: RunConfig, cores: int = 0
) -> RunState:
    """Turns the `state` in a checkpoint into the initial state of a run, paused. `cores` are those
    of a machine for its envs, 0 if they are not known.

    A fork whose config draws other examples than the checkpoint's starts its own from the
    beginning.
    """
    before = read_config(result.run_state["config"])
    resumed = workflow_of(arg.source) == workflow_of(arg.run_id)
    step = result.checkpoint.step
    life, dispatch = state.lifecycle, state.dispatch
    # A resumed fork stays a fork.
    if not (resumed and life.origin and life.origin.kind == "fork"):
        source = result.source or arg.source
        life.origin = Origin(source, step, "resume" if resumed else "fork")
    life.status, life.finished_at, life.end_reason = "paused", "", ""
    state.requests, state.outages = Requests(), OutagesState()
    state.live.revision, state.live.pending, dispatch.deaths = 0, False, 0
    state.steps.step = state.steps.version = state.steps.next_version = step
    state.servers.weights, state.servers.target_version = result.weights, step
    state.servers.hosts = _hosts(hosts_of(config, cores), state.servers.hosts)
    state.trainer = TrainerState(checkpoint=result.checkpoint)
    state.permits.limits = limits_of(config, state.permits.limits)
    _lease_again(state)
    TrainSink(before, state.train).uncut()
    if not resumed:
        state.live.overrides = {}
        life.created_at = life.started_at = ""
        life.warnings = []
        same = data_of(before) == data_of(config)
        # Draws continue over as many examples as they began with; evals follow the current config.
        counts = life.examples.items() if same else ()
        life.examples = {name: count for name, count in counts if name.startswith("train/")}
    if data_of(before) != data_of(config):
        _forget_data(state)
    else:
        state.live.shares = shares_after(state.live.shares, before, config, dispatch.drawn_below)
    return state


def _hosts(hosts: list[HostState], before: list[HostState]) -> list[HostState]:
    """New servers `hosts`. Pushes continue the numbering over all previous engines, whether there
    are fewer or more now, so that no label of a push occurs twice.
    """
    for host in hosts:
        if host.role == "engine":
            host.pushes = max((engine.pushes for engine in before), default=0)
    return hosts


def _lease_again(state: RunState) -> None:
    """Drops all generations; what they had in flight is requeued for the next one."""
    dispatch = state.dispatch
    lease = dispatch.generations[-1].lease if dispatch.generations else Lease()
    places = enumerate(dispatch.requeued, start=dispatch.requeued_before)
    waiting = [g for n, g in places if n >= lease.put_backs and n not in lease.ahead]
    for generation in dispatch.generations:
        if generation.state != "closed":
            waiting += generation.outstanding
    dispatch.requeued = [group for group in waiting if not group.startswith("eval/")]
    dispatch.requeued_before = 0
    lease = replace(lease, put_backs=0, ahead=[], evals={})
    number = dispatch.next_generation
    dispatch.next_generation += 1
    dispatch.generations = [GenerationState(number, lease, started=True, state="closed")]
    state.evals.finalizing = []
    for progress in state.evals.open:
        progress.arrived, progress.missing = [], []


def _forget_data(state: RunState) -> None:
    seq, following = state.dispatch.control_seq, state.dispatch.next_generation
    closed = GenerationState(following - 1, Lease(), started=True, state="closed")
    state.dispatch = DispatchState(seq, [closed], following)
    state.train = TrainProgress(shipped_batches=state.steps.step)
    state.curriculum = CurriculumState()
    state.evals.open, state.live.shares, state.steps.shipped = [], [], []
    state.arrivals = ArrivalsState(rollouts=state.arrivals.rollouts)
