"""A run's durable state as a checkpoint keeps it, and as another attempt or a fork begins with it.

Pure. Invariant: what was collected, cut or shipped at the checkpoint trains after it; groups that
were in flight are leased anew under their ids; evals that had not ended start over.
"""

from dataclasses import replace

from pydantic_core import to_json

from ratchet.activities.contracts.names import workflow_of
from ratchet.activities.contracts.training import RestoreInput, RestoreResult
from ratchet.activities.contracts.upgrades import CHECKPOINT_STATE
from ratchet.configs.data import data_of
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import config_document, read_config
from ratchet.configs.versions import SCHEMA
from ratchet.workflows.protocol.state import (
    CurriculumState,
    GenerationState,
    HostState,
    Lease,
    Origin,
    RunState,
    TrainProgress,
)
from ratchet.workflows.rules.fleet import hosts_of
from ratchet.workflows.rules.live_config import limits_of, shares_after
from ratchet.workflows.rules.sinks import TrainSink


def kept(state: RunState, config: RunConfig) -> str:
    """What a checkpoint keeps of a run besides its trainer, as JSON text."""
    # What a checkpoint leans on would be kept by every one after it.
    lean = replace(state, checkpoint=None, older=None, batches=[])
    number = CHECKPOINT_STATE.current
    return to_json({SCHEMA: number, "state": lean, "config": config_document(config)}).decode()


def restored(
    arg: RestoreInput, result: RestoreResult, state: RunState, config: RunConfig
) -> RunState:
    """Turns the `state` that a checkpoint kept into what a run begins with, at rest.

    A fork whose config draws other examples than the checkpoint's goes through its own from the
    start.
    """
    before = read_config(result.run_state["config"])
    resumed = workflow_of(arg.source) == workflow_of(arg.run_id)
    step = result.checkpoint.step
    # A fork that is resumed stays one.
    if not (resumed and state.origin and state.origin.kind == "fork"):
        source = result.source or arg.source
        state.origin = Origin(source, step, "resume" if resumed else "fork")
    state.status, state.stop, state.pause, state.pause_reason = "paused", "", "", ""
    state.finished_at = state.end_reason = state.trouble = ""
    state.checkpoint_wanted = state.config_pending = False
    state.holds = {}
    state.step = state.version = state.target_version = state.next_version = step
    state.weights, state.checkpoint = result.weights, result.checkpoint
    state.trainer_epoch = state.trainer_step = -1
    state.trainer_losses = state.generation_deaths = state.config_revision = 0
    state.hosts = _hosts(config, state.hosts)
    state.limits = limits_of(config, state.limits)
    _lease_again(state)
    TrainSink(before, state.train).uncut()
    if not resumed:
        state.overrides = {}
        state.created_at = state.started_at = ""
        state.examples = {}
    if data_of(before) != data_of(config):
        _forget_data(state)
    else:
        state.shares = shares_after(state.shares, before, config, state.drawn_below)
    return state


def _hosts(config: RunConfig, before: list[HostState]) -> list[HostState]:
    """Servers of its own. Pushes are numbered on, so that no label of a push comes twice."""
    pushes = {(host.role, host.index): host.pushes for host in before}
    hosts = hosts_of(config)
    for host in hosts:
        host.pushes = pushes.get((host.role, host.index), 0)
    return hosts


def _lease_again(state: RunState) -> None:
    """No generation is left; what they had in flight is to be rolled out by the next one."""
    lease = state.generations[-1].lease if state.generations else Lease()
    places = enumerate(state.put_backs, start=state.put_backs_before)
    waiting = [g for n, g in places if n >= lease.put_backs and n not in lease.ahead]
    for generation in state.generations:
        if generation.state != "closed":
            waiting += generation.outstanding
    state.put_backs = [group for group in waiting if not group.startswith("eval/")]
    state.put_backs_before = 0
    lease = replace(lease, put_backs=0, ahead=[], evals={})
    number = state.next_generation
    state.next_generation += 1
    state.generations = [GenerationState(number, lease, started=True, state="closed")]
    for progress in state.evals:
        progress.arrived, progress.missing = [], []


def _forget_data(state: RunState) -> None:
    number = state.next_generation - 1
    state.generations = [GenerationState(number, Lease(), started=True, state="closed")]
    state.train = TrainProgress(shipped_batches=state.step)
    state.curriculum = CurriculumState()
    state.evals, state.put_backs, state.shares, state.shipped = [], [], [], []
    state.baselines, state.drawn_below = {}, 0
