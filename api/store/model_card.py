"""The model card of a version: its origin, its training, and the results of its evals.

`read` collects what the store has (and blocks); `card` is pure.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ratchet.activities.contracts.names import workflow_of
from ratchet.activities.contracts.redact import redacted
from ratchet.activities.storage import configs, policies
from ratchet.activities.storage.keys import MODEL_CONFIG
from ratchet.activities.storage.lineage import segments
from ratchet.api.schemas.run import Lineage
from ratchet.api.store.models import Stored
from ratchet.api.store.records import Records
from ratchet.configs.load import dump_toml
from ratchet.configs.model import DEFAULT_POLICY, SMOLLM2, version_named
from ratchet.configs.run import RunConfig

FIGURES = {
    "reward/all/mean": "reward",
    "loss": "loss",
    "entropy": "entropy",
    "mismatch_kl": "mismatch KL",
    "grad_norm": "gradient norm",
}
REVISION = "config_revision"
ROWS = 12
"""Of a table, at most."""
LONGEST = 100_000
"""Characters of a config."""
HUB_NAMES = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
_ON_HUB = re.compile(r"(?!ratchet/)[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Facts:
    """The contents of a card. `origins` are newest first, `curves` rows of step and `FIGURES`. If
    an adapter was trained (`adapted`), the card describes it `alone`, or the model merged with it.
    """

    run_id: str
    step: int
    base: str
    license: str | None
    parameters: int | None
    dtype: str | None
    adapted: bool
    alone: bool
    origins: Sequence[Lineage]
    curves: Sequence[Sequence[float]]
    evals: Sequence[dict[str, Any]]
    config: RunConfig


def _origins(records: Records, run_id: str, step: int) -> list[Lineage]:
    """What version `step` of a run started from, newest first, over forks, attempts and models."""
    result: list[Lineage] = []
    while True:
        path = segments(records.store, records.attempts(run_id)[-1])
        for (attempt, _), (source, left) in pairwise(path):
            assert left is not None
            # Versions up to there are the source's own.
            if left < step:
                same = workflow_of(attempt) == workflow_of(source)
                kind = "resume" if same else "fork"
                result.append(Lineage(source=workflow_of(source), step=left, kind=kind))
        version = version_named(records.config_of(path[-1][0]).model.name)
        if version is None:
            return result
        run_id, step = version
        result.append(Lineage(source=run_id, step=step, kind="model"))
        if not records.knows(run_id):
            return result


def _thinned(rows: Sequence[Any]) -> list[Any]:
    """At most `ROWS` of them: the first, the last, and evenly spaced ones in between."""
    if len(rows) <= ROWS:
        return [*rows]
    return [rows[round(number * (len(rows) - 1) / (ROWS - 1))] for number in range(ROWS)]


def read(records: Records, run_id: str, step: int, kept: Stored) -> Facts:
    """The facts of a version. Raises StoreUnavailable."""
    store, spans = records.store, records.spans(run_id)
    names = [*FIGURES, REVISION]
    table = records.curves.table(spans, until=step, names=names)
    nothing = [math.nan] * len(table.steps)
    columns = [table.columns.get(name, nothing) for name in FIGURES]
    rows = [
        [number, *(column[row] for column in columns)] for row, number in enumerate(table.steps)
    ]
    revision = 0.0
    if table.steps and table.steps[-1] == step and REVISION in table.columns:
        revision = table.columns[REVISION][-1]
    owner = next(s.attempt for s in spans if s.first < step and (s.last is None or step <= s.last))
    about = policies.about(store, run_id)
    whole = policies.model_of(store, kept.held, kept.ref)
    described = json.loads(store.read_file(whole, MODEL_CONFIG))
    evals = [record for record in records.evals(run_id) if (record.get("step") or 0) <= step]
    return Facts(
        run_id=run_id,
        step=step,
        base=about["base"],
        license=about["license"],
        parameters=about["parameters"],
        dtype=described.get("dtype") or described.get("torch_dtype"),
        adapted=kept.adapted,
        alone=bool(kept.folder),
        origins=_origins(records, run_id, step),
        curves=_thinned(rows),
        evals=evals,
        config=configs.load(store, owner, 0 if math.isnan(revision) else int(revision)),
    )


# -- text -------------------------------------------------------------------------------------


def _number(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:.4g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _front(facts: Facts) -> str:
    """The metadata that the hub reads. JSON strings are YAML."""
    hub_name = HUB_NAMES.get(facts.base, facts.base)
    library = "peft" if facts.alone else "transformers"
    lines = [f"library_name: {library}", "pipeline_tag: text-generation"]
    if facts.license:
        lines.append(f"license: {json.dumps(facts.license)}")
    # An adapter belongs to the exact weights that its run began with.
    direct = not facts.alone or facts.config.model.name == facts.base
    if _ON_HUB.fullmatch(hub_name) and direct:
        relation = "adapter" if facts.alone else "finetune"
        lines += [f"base_model: {json.dumps(hub_name)}", f"base_model_relation: {relation}"]
    return "\n".join(["---", *lines, "tags: [ratchet, reinforcement-learning]", "---"])


def _base(facts: Facts) -> str:
    known = HUB_NAMES.get(facts.base)
    if facts.base == DEFAULT_POLICY:
        return f"`{facts.base}`, created by Ratchet from random weights; it contains no other model"
    name = f"`{facts.base}`" + (f" ({known})" if known else "")
    if facts.license:
        return f"{name}, licence {facts.license}"
    return f"{name}; its licence is not known here, see its source"


def _weights(facts: Facts) -> list[str]:
    lora = facts.config.trainer.lora if facts.adapted else None
    if lora is None:
        return [f"- Weights: {facts.dtype}"] if facts.dtype else []
    shape = f"rank {lora.rank}, alpha {lora.alpha:g}"
    if facts.alone:
        return [
            f"- Weights: a LoRA adapter alone ({shape}, float32), which belongs to version 0 of "
            f"the run: `ratchet runs export {facts.run_id} --step 0`"
        ]
    return [f"- Weights: {facts.dtype}, with a LoRA adapter ({shape}) merged into them"]


def _origin(origin: Lineage) -> str:
    said = {
        "resume": f"resumed at step {origin.step}",
        "fork": f"forked from run `{origin.source}` at step {origin.step}",
        "model": f"begun with version {origin.step} of run `{origin.source}`",
    }
    return said[origin.kind]


def _evals(facts: Facts) -> str:
    envs = sorted({str(record.get("env")) for record in facts.evals})
    shown = [
        record
        for env in envs
        for record in _thinned([one for one in facts.evals if one.get("env") == env])
    ]
    rows = [
        [
            str(record.get("env")),
            str(record.get("step")),
            _number(record.get("reward_mean")),
            str(record.get("rollouts", "–")),
        ]
        for record in shown
    ]
    return _table(["eval", "step", "mean reward", "rollouts"], rows)


def card(facts: Facts) -> str:
    """The card, as Markdown with the metadata of a hub."""
    config = facts.config
    envs = ", ".join(f"`{env.name}`" for env in config.train.env)
    lines = [
        f"- Base model: {_base(facts)}",
        f"- Trained: {facts.step} steps of run `{facts.run_id}` on {envs}, algorithm "
        f"`{config.algo.type}`",
        *([f"- Parameters: {facts.parameters:,}"] if facts.parameters else []),
        *_weights(facts),
    ]
    parts = [
        _front(facts),
        f"# {facts.run_id}, step {facts.step}",
        "A policy trained by reinforcement learning with Ratchet.",
        "\n".join(lines),
        "## Lineage",
        "\n".join(f"- {_origin(origin)}" for origin in facts.origins)
        or "The run began with the base model.",
    ]
    if facts.curves:
        rows = [[str(row[0]), *map(_number, row[1:])] for row in facts.curves]
        parts += ["## Training", _table(["step", *FIGURES.values()], rows)]
    if facts.evals:
        parts += ["## Evals", _evals(facts)]
    text = redacted(dump_toml(config), LONGEST).strip()
    parts += ["## Config", f"```toml\n{text}\n```"]
    return "\n\n".join(parts) + "\n"
