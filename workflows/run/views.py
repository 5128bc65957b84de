"""What people see of a run: the memo that the API reads, and the details in Temporal's Web UI."""

from typing import Any

from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import RunState, Waiting
from ratchet.workflows.rules.fleet import Fleet


def memo(
    config: RunConfig, state: RunState, waiting: Waiting | None, **ended: Any
) -> dict[str, Any]:
    """The run as a small JSON object; `ended` adds finished_at, end_reason and error."""
    checkpoint, origin = state.checkpoint, state.origin
    held = bool(state.holds) and state.status == "running"
    return {
        "status": "paused" if held else state.status,
        "attempt": state.attempt,
        "lineage": {"source": origin.source, "step": origin.step, "kind": origin.kind}
        if origin
        else None,
        "paused_because": "; ".join(state.holds.values()) or state.trouble or None,
        "name": config.name,
        "created_at": state.created_at,
        "started_at": state.started_at or None,
        "finished_at": state.finished_at or None,
        "step": state.step,
        "max_steps": config.max_steps,
        "policy_version": state.version,
        "policy": state.policy_origin,
        "reward": state.reward,
        "eval": state.last_eval,
        "checkpoint": {"step": checkpoint.step} if checkpoint else None,
        "restarts": Fleet(state.hosts).restarts(),
        "rollouts": {"train": state.rollouts, "eval": state.eval_rollouts},
        "waiting_for": {"name": waiting.name, "since": waiting.since, "until": waiting.until}
        if waiting
        else None,
        "error": None,
        "end_reason": state.end_reason or None,
        "metadata": {
            name: value
            for name, value in {**config.metadata, **state.overrides.get("metadata", {})}.items()
            if value is not None
        },
        "config_revision": state.config_revision,
        "alarm": state.alarm or None,
        "config_changes": state.overrides,
        **ended,
    }


def progress(config: RunConfig, state: RunState, waiting: Waiting | None) -> dict[str, Any]:
    """How far a run is, and what is in flight, as a small JSON object."""
    live = [g for g in state.generations if g.state != "closed"]
    return {
        "status": state.status,
        "step": state.step,
        "max_steps": config.max_steps,
        "policy_version": state.version,
        "rollouts": {"train": state.rollouts, "eval": state.eval_rollouts},
        "in_flight": {
            "train": sum(g.inflight_train for g in live),
            "eval": sum(g.inflight_eval for g in live),
        },
        "ready_rollouts": sum(group.survivors for group in state.train.ready),
        "shipped_batches": len(state.shipped),
        "evals": {
            p.epoch.epoch: {"groups": len(p.arrived), "of": p.epoch.num_examples}
            for p in state.evals
        },
        "servers": {host.name: "up" if host.up else "down" for host in state.hosts},
        "waiting_for": waiting.name if waiting else None,
    }


def details(config: RunConfig, state: RunState, waiting: Waiting | None, notes: list[str]) -> str:
    """Markdown for the run's page in Temporal's Web UI."""
    reward = "–" if state.reward is None else f"{state.reward:.3f}"
    collected = sum(group.survivors for group in state.train.ready)
    wanted = config.train.batch_size or f"{config.train.token_batch_size} tokens"
    lines = [
        f"**{state.status}** · step {state.step} of {config.max_steps} · "
        f"policy v{max(state.version, 0)} · reward {reward}",
        "",
        f"- rollouts waiting for a batch: {collected} of {wanted}",
        f"- last checkpoint: {f'step {state.checkpoint.step}' if state.checkpoint else 'none yet'}",
    ]
    if state.alarm:
        lines.append(f"- **drift**: {state.alarm}")
    for env, result in state.last_eval.items():
        lines.append(f"- last eval of {env}: {result['reward']:.3f} at step {result['step']:.0f}")
    for progress in state.evals:
        epoch = progress.epoch
        lines.append(
            f"- eval {epoch.epoch}: {len(progress.arrived)} of {epoch.num_examples} groups"
        )
    for generation in state.generations:
        if generation.state != "closed":
            held_back = f", waits for {generation.waiting_for}" if generation.waiting_for else ""
            lines.append(
                f"- dispatch generation {generation.number}: {generation.inflight_train} train and "
                f"{generation.inflight_eval} eval rollouts in flight{held_back}"
            )
    for host in state.hosts:
        if not host.up:
            lines.append(f"- {host.name}: down{f' ({host.detail[-200:]})' if host.detail else ''}")
    if waiting is not None:
        lines += ["", f"Waiting for **{waiting.name}** since {waiting.since}"]
    lines += [f"\n> {note}" for note in notes[-5:]]
    return "\n".join(lines)
