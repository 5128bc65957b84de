"""Which version of a run's policy is meant, and which files make it a model in Hugging Face layout.

A version is read from the weights that engines served, or from its checkpoint if those were
removed. Every function blocks; a version that is unavailable is an ApiProblem that names others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import policies
from ratchet.activities.storage.keys import ADAPTER_FILE, ADAPTER_FOLDER
from ratchet.activities.storage.policies import Held, in_model
from ratchet.activities.storage.store import CorruptArtifact
from ratchet.api.schemas.artifacts import ModelFile
from ratchet.api.schemas.problems import ApiProblem, shown
from ratchet.api.store.artifacts import problem_of
from ratchet.api.store.records import Records

ALONE = (
    ". Of version {} the adapter alone is kept: `ratchet runs export --merge` merges it into "
    "version 0; or export both, and merge them with peft"
)


@dataclass(frozen=True)
class Choice:
    """A version by its step, and why it was chosen. `steps` are all that are kept."""

    step: int
    chosen: Literal["step", "best", "checkpoint", "newest"]
    best_of: str | None
    steps: list[int]


@dataclass(frozen=True)
class Stored:
    """The artifact that holds a version, and its files that make up the model, which lie in its
    `folder`. `adapted`: an adapter was trained, which the files are, or which is merged into them.
    """

    held: Held
    kept_as: Literal["weights", "checkpoint"]
    ref: ArtifactRef
    files: list[ModelFile]
    adapted: bool
    folder: str


def _missing(kind: str, title: str, detail: str, status: int = 404) -> ApiProblem:
    return ApiProblem(status, kind, title, detail)


def _gone(error: policies.NoVersion, hint: str = "") -> ApiProblem:
    if error.removed:
        title = "The version was removed"
        return _missing("version-removed", title, f"{error}{hint}", 410)
    return _missing("unknown-version", "No such version", f"{error}{hint}")


def scores(evals: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """The mean reward of each eval by env and step; the highest if a step has several."""
    result: dict[str, dict[int, float]] = {}
    for record in evals:
        mean, env, step = record.get("reward_mean"), record.get("env"), record.get("step")
        if isinstance(mean, int | float) and math.isfinite(mean) and env and step is not None:
            by_step = result.setdefault(env, {})
            by_step[step] = max(float(mean), by_step.get(step, -math.inf))
    return result


def _best(by_step: dict[int, float]) -> int:
    """The step of the highest mean, the later one in a tie."""
    return max(by_step, key=lambda step: (by_step[step], step))


def _eval_named(records: Records, run_id: str, name: str, scored: dict[str, Any]) -> str:
    """The eval called `name`, the config's first for ''; raises 404 if it has no result."""
    config = records.config(run_id)
    known = [env.name for env in config.eval.env] if config else []
    known += [env for env in scored if env not in known]
    if name and name not in known:
        there = f"its evals are {', '.join(known)}" if known else "it has none"
        detail = f"Run {run_id} has no eval {shown(name)!r}; {there}."
        raise _missing("unknown-eval", "No such eval", detail)
    env = name or (known[0] if known else "")
    if env not in scored:
        which = f"of its eval {env!r}" if env else "of an eval"
        detail = f"Run {run_id} has no result {which} yet, so that no version is its best."
        raise _missing("no-eval-result", "No version was evaluated", detail)
    return env


def choose(records: Records, run_id: str, step: int | None, best: str | None) -> Choice:
    """The version of `step`, or the best one in the eval `best` ('': the first), or the last
    checkpoint or, if the run has none, the newest version. Raises 404, 410.
    """
    store = records.store
    checkpoints = policies.checkpoints_of(store, run_id)
    kept = policies.weights_of(store, run_id) | checkpoints
    steps = sorted(kept)
    if best is not None:
        scored = scores(records.evals(run_id))
        env = _eval_named(records, run_id, best, scored)
        step = _best(scored[env])
        if step not in kept:
            left = {step: mean for step, mean in scored[env].items() if step in kept}
            hint = f". The best of {env} that is kept is {_best(left)}" if left else ""
            raise _gone(policies.no_version(store, run_id, step, kept), hint)
        return Choice(step, "best", env, steps)
    if step is not None:
        if step not in kept:
            raise _gone(policies.no_version(store, run_id, step, kept))
        return Choice(step, "step", None, steps)
    if not kept:
        detail = f"Run {run_id} has no weights yet; version 0 comes before its first step."
        raise _missing("unknown-version", "No version yet", detail)
    if checkpoints:
        return Choice(max(checkpoints), "checkpoint", None, steps)
    return Choice(max(kept), "newest", None, steps)


def _files(manifest: Mapping[str, tuple[str, int]], folder: str) -> list[ModelFile]:
    """The files of a model, or of the adapter in `folder`, by their names relative to that."""
    return [
        ModelFile(name=name.removeprefix(folder), size=size, sha256=sha)
        for name, (sha, size) in sorted(manifest.items())
        if (name.startswith(folder) if folder else in_model(name))
    ]


def stored(records: Records, run_id: str, step: int, *, merged: bool = False) -> Stored:
    """The first sound artifact that holds a version. For a run that trains an adapter that is the
    adapter, or if `merged` the whole model. Raises CorruptArtifact; 410 if it was removed in the
    meantime.
    """
    store = records.store
    ways: list[tuple[Literal["weights", "checkpoint"], dict[int, Held]]] = [
        ("weights", policies.weights_of(store, run_id)),
        ("checkpoint", policies.checkpoints_of(store, run_id)),
    ]
    damage: CorruptArtifact | None = None
    alone = ""
    for kept_as, held in ((kept_as, kept.get(step)) for kept_as, kept in ways):
        for key in held.keys if held else ():
            try:
                ref = store.committed(key)
                if ref is None:
                    continue
                if (problem := problem_of(store, ref, verify=False)) is not None:
                    raise CorruptArtifact(f"{key}: {problem}")
                manifest = store.manifest(ref)
                adapted = ADAPTER_FILE in manifest
                folder = f"{ADAPTER_FOLDER}/" if adapted and not merged else ""
                # Neither the checkpoint of an adapter nor a version that was pushed alone has a
                # whole model.
                if not (files := _files(manifest, folder)):
                    alone = ALONE.format(step)
                    continue
            except CorruptArtifact as error:
                damage = damage or error
                continue
            assert held is not None
            return Stored(held, kept_as, ref, files, adapted, folder)
    kept = {step for _, kept in ways for step in kept} - {step}
    raise damage or _gone(policies.no_version(store, run_id, step, dict.fromkeys(kept)), alone)
