"""What the tests of the pure classes share: a small config, delivered groups, a scheduler."""

from typing import Any

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import EngineTarget, GroupResult
from ratchet.configs.load import validate
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.messages import Control, EnvTarget
from ratchet.workflows.protocol.state import EvalEpoch, Lease
from ratchet.workflows.rules.scheduler import Blocked, Part, Scheduler

EXAMPLES = {"train/a": 50, "train/b": 50}
ENGINES = [EngineTarget(k, 1, f"http://{k}", "m", 0) for k in range(2)]
ENVS = {name: EnvTarget(k, 1, f"tcp://{name}") for k, name in enumerate("ab")}
EPOCH = EvalEpoch("0-0/a", "a", 0, 3, 2)


def config(**overrides: Any) -> RunConfig:
    """Batches of 8 rollouts in groups of 2, over two envs."""
    data: dict[str, Any] = {
        "max_steps": 10,
        "train": {
            "env": [{"id": "a"}, {"id": "b"}],
            "batch_size": 8,
            "group_size": 2,
        },
        "eval": {"env": [{"id": "a"}], "interval": 4, "num_examples": 3, "group_size": 2},
    }
    return validate({**data, **overrides})


def delivered(
    group: str,
    survivors: int = 2,
    labels: list[str] | None = None,
    *,
    trainable: int | None = None,
    tokens: int = 8,
    version: int = 0,
    error: str = "",
) -> GroupResult:
    """A finalized train group of two rollouts, all survivors trainable if not said otherwise."""
    return GroupResult(
        group=group,
        kind="train",
        env="a",
        ref=ArtifactRef(group, group.rjust(64, "0"), 1, group),
        size=2,
        survivors=survivors,
        errored=2 - survivors,
        reward_mean=0.5,
        samples=survivors,
        tokens=tokens,
        version_start=version,
        labels=labels or ["0.1a"],
        error=error,
        trainable=survivors if trainable is None else trainable,
    )


def control(seq: int, **changes: Any) -> Control:
    """Two engines, both envs up."""
    known: dict[str, Any] = {"permits": 8, "train_limit": 20, "engines": ENGINES, "envs": ENVS}
    return Control(seq=seq, **{**known, **changes})


def scheduler(
    lease: Lease | None = None, dispatch: dict[str, Any] | None = None, **changes: Any
) -> Scheduler:
    """A scheduler that has heard one control."""
    made = Scheduler(config(dispatch=dispatch or {}), EXAMPLES, lease or Lease())
    made.on_control(control(0, **changes))
    return made


def admitted(s: Scheduler, now: float = 0.0) -> list[Part]:
    """Everything that may start at `now` (seconds)."""
    parts = []
    while isinstance(part := s.admit(now), Part):
        parts.append(part)
    return parts


def names(parts: list[Part]) -> list[str]:
    """Groups of the parts."""
    return [part.work.group for part in parts]


def finish(s: Scheduler, part: Part) -> None:
    """All of a group's rollouts end with this part."""
    assert s.on_ended(part.work.group, part.first)
    s.flights.remove(s.flights[part.work.group])


def why(s: Scheduler, now: float = 0.0) -> str:
    """Why nothing more may start."""
    blocked = s.admit(now)
    assert isinstance(blocked, Blocked)
    return blocked.reason
