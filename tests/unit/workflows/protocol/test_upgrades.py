"""What outlives a process is read strictly, upgraded if older, refused if newer."""

import copy
import json
from collections.abc import Iterator
from dataclasses import is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import ValidationError
from pydantic_core import to_json

from ratchet.activities.contracts import names as wire_names
from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import CheckpointResult, RestoreInput, RestoreResult
from ratchet.activities.contracts.upgrades import CHECKPOINT_STATE, TRAINER_STATE
from ratchet.activities.contracts.versioned import VERSIONED, hints_of
from ratchet.activities.contracts.wire import decoded
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.failing import failure_of
from ratchet.activities.storage import keys
from ratchet.api.services.run_view import run_object
from ratchet.api.temporal.client import Execution
from ratchet.configs.algorithm import teacher_of
from ratchet.configs.load import ConfigError, validate
from ratchet.configs.reference import FrozenModelConfig
from ratchet.configs.upgrades import CONFIG, config_document, read_config
from ratchet.configs.versions import NewerSchema
from ratchet.workflows.protocol.messages import (
    Control,
    DispatchInput,
    DispatchReport,
    HostWorkflowInput,
    RunInput,
)
from ratchet.workflows.protocol.state import BestEval, RunState
from ratchet.workflows.protocol.upgrades import RUN_STATE
from ratchet.workflows.rules.restore import kept, restored
from tests.recorded import BUILDS, item, names, shapes
from tests.unit.workflows.support import config

KINDS = {"run_input": RunInput, "dispatch_input": DispatchInput, "host_input": HostWorkflowInput}
INPUTS = [
    (build, name, cls)
    for build in BUILDS
    for kind, cls in KINDS.items()
    for name in names(f"{kind}.*", build)
]
CONFIGS = [(build, name) for build in BUILDS for name in names("config*", build)]
CHECKPOINTS = [
    (build, name) for build in BUILDS for name in names("checkpoints/*/run_state", build)
]
REF = ArtifactRef("k", "0" * 64, 1, "k")


def written(value: Any) -> Any:
    """A value as it crosses to Temporal."""
    return json.loads(to_json(value))


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a run as schema 1 had it."""
    requests, live, dispatch = dict(state["requests"]), state["live"], dict(state["dispatch"])
    arrivals, evals, trainer = dict(state["arrivals"]), state["evals"], dict(state["trainer"])
    assert evals["finalizing"] == []
    assert evals["best"] == {
        env: {"step": last["step"], "reward": last["reward"]} for env, last in evals["last"].items()
    }
    train = dict(state["train"])
    assert (arrivals.pop("counts"), dispatch.pop("cancelled")) == ({}, {})
    for key in ("ready", "cut"):
        train[key] = [{**group} for group in train[key]]
        assert all(group.pop("errors") == {} for group in train[key])
    train["barren"], train["barren_filters"] = train.pop("empty_groups"), train.pop("empty_filters")
    train["ok_rollouts"] = arrivals.pop("ok_rollouts")
    for key in ("stale_in_flight", "stale_in_queue", "overload"):
        train[key] = dispatch.pop(key)
    lifecycle = dict(state["lifecycle"])
    assert lifecycle.pop("warnings") == []
    return {
        **lifecycle,
        "checkpoint_wanted": requests.pop("checkpoint"),
        **requests,
        "overrides": live["overrides"],
        "config_revision": live["revision"],
        "config_pending": live["pending"],
        "shares": live["shares"],
        "limits": state["permits"]["limits"],
        "concurrency": state["permits"]["controller"],
        **state["servers"],
        "put_backs": dispatch.pop("requeued"),
        "put_backs_before": dispatch.pop("requeued_before"),
        "generation_deaths": dispatch.pop("deaths"),
        **dispatch,
        "train": train,
        **arrivals,
        "curriculum": state["curriculum"],
        "evals": evals["open"],
        "eval_count": evals["count"],
        "wished_evals": evals["requested"],
        "fired": evals["fired"],
        "last_eval": evals["last"],
        "eval_rollouts": evals["rollouts"],
        **state["steps"],
        **{f"trainer_{key}": trainer.pop(key) for key in ("epoch", "step", "losses")},
        **trainer,
        **state["outages"],
    }


SCHEMAS: dict[type, int] = {DispatchInput: 3, RunInput: 2}
"""Those that are not 1."""
ENV_KEYS_OF_5: dict[str, Any] = {"start_timeout_s": None, "log_level": "warning", "workers": 1}


def config_of_schema_1(config: dict[str, Any]) -> dict[str, Any]:
    """A stored config, with what later schemas have split or added as schema 1 had it."""
    model, trainer = _without_revision(config["model"]), dict(config["trainer"])
    inference = dict(config["inference"])
    model["dtype"] = trainer.pop("compute_dtype")
    assert inference.pop("dtype") == model["dtype"]
    assert trainer.pop("matmul_precision") == "highest" and model.pop("renderer_options") == {}
    assert (trainer.pop("backend"), inference.pop("transfer")) == ("torch", "store")
    assert trainer.pop("activation_checkpointing") is False
    assert trainer.pop("lora") is None, "all weights were trained"
    assert trainer.pop("ranks") == 1, "one process trained"
    assert trainer.pop("offload_optimizer") is False, "moments lay where the weights do"
    sampled = {kind: _sampled_whole(config[kind]) for kind in ("train", "eval")}
    assert config["when_all_fail"] == "continue", "a run of which everything failed went on"
    assert sampled["eval"].pop("client") == "tokens", "evals asked as train rollouts do"
    assert sampled["train"].pop("max_empty_batches") == 10 and sampled["eval"].pop("at_end") is True
    retention = dict(config["retention"])
    assert retention.pop("rollouts") == "all"
    added = {
        "when_all_fail": "continue",
        "monitor": {"heartbeat_url": None},
        "log": {"interval": 10.0},
        "after": None,
    }
    assert {key: config[key] for key in added} == added
    config = {key: value for key, value in config.items() if key not in added}
    parts = {"model": model, "trainer": trainer, "inference": inference, "retention": retention}
    return {**config, **sampled, **parts}


def _without_revision(model: dict[str, Any]) -> dict[str, Any]:
    """The model section without the key that schema 4 has added."""
    assert model["revision"] is None
    return {key: value for key, value in model.items() if key != "revision"}


def _sampled_whole(section: dict[str, Any]) -> dict[str, Any]:
    """The train or eval section without the keys of its envs that schema 5 has added, and those of
    sampling that schema 2 has.
    """
    added = {"stop": [], "top_p": 1.0, "top_k": None, "min_p": 0.0}

    def whole(sampling: dict[str, Any] | None) -> dict[str, Any] | None:
        if sampling is None:
            return None
        assert {key: sampling[key] for key in added} == added
        return {key: value for key, value in sampling.items() if key not in added}

    envs = [
        {
            key: value if key != "sampling" else whole(value)
            for key, value in env.items()
            if key not in ENV_KEYS_OF_5
        }
        for env in section["env"]
    ]
    for env in section["env"]:
        assert {key: env[key] for key in ENV_KEYS_OF_5} == ENV_KEYS_OF_5
    return {**section, "env": envs, "sampling": whole(section["sampling"])}


def as_written(config: dict[str, Any]) -> dict[str, Any]:
    """A stored config as a person would write it now, without a number."""
    return {key: value for key, value in CONFIG.upgraded(config).items() if key != "schema"}


def as_before(document: dict[str, Any]) -> dict[str, Any]:
    """A document with a flat state and without numbers: its own, and those of its parts."""
    state, config = document.get("state"), document.get("config")
    if state:
        document = {**document, "state": flat(state) if "lifecycle" in state else state}
    if config and config.get("schema") == CONFIG.current:
        document = {**document, "config": config_of_schema_1(config)}
    if "cores" in document:
        assert document["cores"] == 0, "nobody had counted them"
        document = {key: value for key, value in document.items() if key != "cores"}
    if "train_over" in (control := document.get("control") or {}):
        assert control["train_over"] is False, "train groups in flight were never given up"
        assert (control["missing"], control["heard"]) == (0, -1), "each group was reported at once"
        added = ("train_over", "missing", "heard")
        control = {key: value for key, value in control.items() if key not in added}
        document = {**document, "control": control}
    parts = ("state", "host", "config")
    return {
        key: as_before(value) if key in parts and isinstance(value, dict) else value
        for key, value in document.items()
        if key != "schema"
    }


def test_there_is_something_recorded_of_each_kind() -> None:
    assert len(INPUTS) == 10 + 10 and len(CONFIGS) == 2 + 2 and len(CHECKPOINTS) == 2 + 2
    assert {cls for _, _, cls in INPUTS} | {RunState, HostInput} == set(VERSIONED)


@pytest.mark.parametrize(("build", "name", "cls"), INPUTS)
def test_a_recorded_input_keeps_every_value(build: str, name: str, cls: type) -> None:
    recorded = item(name, build)
    value = decoded(cls, recorded)
    again = written(value)
    assert again["schema"] == VERSIONED[cls].current == SCHEMAS.get(cls, 1)
    assert as_before(again) == as_before(recorded)
    assert decoded(cls, again) == value
    if again.get("state"):
        assert again["state"]["schema"] == RUN_STATE.current == 4
    if cls is not HostWorkflowInput:
        assert read_config(recorded["config"]) == validate(as_written(recorded["config"]))


@pytest.mark.parametrize(("build", "name"), CONFIGS)
def test_a_recorded_config_keeps_every_value(build: str, name: str) -> None:
    recorded = item(name, build)
    value = read_config(recorded)
    document = config_document(value)
    assert config_of_schema_1(document) == {**recorded, "schema": CONFIG.current}
    assert read_config(json.loads(json.dumps(document))) == value == validate(as_written(recorded))


@pytest.mark.parametrize(("build", "name"), CHECKPOINTS)
def test_a_recorded_checkpoint_keeps_every_value(build: str, name: str) -> None:
    recorded = item(name, build)
    document = CHECKPOINT_STATE.upgraded(recorded)
    state, before = decoded(RunState, document["state"]), read_config(document["config"])
    again = json.loads(kept(state, before))
    assert (again["schema"], again["state"]["schema"], again["config"]["schema"]) == (1, 4, 7)
    assert as_before(again) == as_before(recorded)
    assert decoded(RunState, again["state"]) == state and read_config(again["config"]) == before
    trainer = item(name.replace("run_state", "trainer"), build)
    since = {"schema": 3, "lora": None, "base": None, "ranks": 1}
    assert TRAINER_STATE.upgraded(trainer) == {**trainer, **since}


@pytest.mark.parametrize("to", ["recorded-c8060e+2", "another"])
def test_a_run_begins_with_a_recorded_checkpoint(to: str) -> None:
    document = item("checkpoints/step-00000006/run_state")
    was, resumed = document["state"], to != "another"
    result = RestoreResult(CheckpointResult(6, REF), REF, document)
    arg = RestoreInput(to, "recorded-c8060e", 6)
    state = decoded(RunState, document["state"])
    after = flat(written(restored(arg, result, state, read_config(item("config.1")))))
    assert (after["step"], after["version"], after["target_version"]) == (6, 6, 6)
    assert after["origin"] == {
        "source": "recorded-c8060e",
        "step": 6,
        "kind": "resume" if resumed else "fork",
    }
    same = ["train", "rollouts", "eval_rollouts", "reward", "totals", "last_eval", "eval_count"]
    same += ["drawn_below", "control_seq", "curriculum", "baselines", "shipped", "fired"]
    assert {key: after[key] for key in same} == {key: was[key] for key in same}
    assert len(after["train"]["ready"]) == 5 and after["train"]["delivered"] == 53
    assert after["overrides"] == (was["overrides"] if resumed else {})
    # All that was in flight is leased anew, and the data go on where they stood.
    assert after["put_backs"] == ["train/49", "train/51", "train/55"]
    assert after["generations"][-1]["lease"]["next_train"] == 56
    assert [(e["epoch"]["epoch"], e["arrived"]) for e in after["evals"]] == [
        ("5-1/reverse-text", [])
    ]


def test_the_api_reads_a_recorded_memo() -> None:
    memo = item("memo")
    began = datetime(2026, 11, 22, tzinfo=UTC)
    execution = Execution("recorded-c8060e", "TrainingRun", "running", began, None, memo)
    run = run_object(execution, ui="", namespace="default").model_dump(mode="json")
    same = ("name", "status", "step", "max_steps", "policy_version", "reward", "rollouts")
    same += ("checkpoint", "metadata", "attempt", "config_revision", "config_changes")
    assert {key: run[key] for key in same} == {key: memo[key] for key in same}
    assert run["eval"]["reverse-text"]["step"] == 5


# -- what is refused ------------------------------------------------------------------------


def objects(hint: Any, value: Any) -> Iterator[dict[str, Any]]:
    """Every object in `value` that is one of a dataclass."""
    if is_dataclass(hint) and isinstance(value, dict):
        yield value
        for key, inner in hints_of(hint).items():
            yield from objects(inner, value.get(key))
    for part in get_args(hint):
        inner = value
        if get_origin(hint) is list and isinstance(value, list) and value:
            inner = value[0]
        elif get_origin(hint) is dict and isinstance(value, dict) and value:
            inner = next(iter(value.values()))
        yield from objects(part, inner)


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("run_input.step-5", RunInput),
        ("dispatch_input.3", DispatchInput),
        ("host_input.engine", HostWorkflowInput),
    ],
)
def test_any_key_that_is_lost_or_unknown_is_refused(name: str, cls: type) -> None:
    data = written(decoded(cls, item(name)))
    places = list(objects(cls, data))
    assert len(places) >= {RunInput: 30, DispatchInput: 6, HostWorkflowInput: 2}[cls]
    for place in places:
        for key in list(place):
            if key == "schema" and place.get("key") is None:
                continue  # Without a number it is of schema 0.
            lost = place.pop(key)
            with pytest.raises(ValidationError, match=f"lacks {key}"):
                decoded(cls, data)
            place[key] = lost
        place["moved_here"] = 1
        with pytest.raises(ValidationError, match="unknown moved_here"):
            decoded(cls, data)
        del place["moved_here"]
    decoded(cls, data)


@pytest.mark.parametrize("cls", VERSIONED, ids=lambda cls: str(cls.__name__))
def test_a_newer_schema_is_refused_by_name_and_number(cls: type) -> None:
    number = VERSIONED[cls].current
    with pytest.raises(NewerSchema) as caught:
        decoded(cls, {"schema": number + 1, "anything": "else"})
    text = str(caught.value)
    assert text.startswith(f"{VERSIONED[cls].what} has schema {number + 1}, which a newer build")
    assert f"reads 0 to {number}" in text and "worker of the newer build (RATCHET_BUILD_ID" in text


@pytest.mark.parametrize("part", ["state", "host"])
def test_a_newer_part_of_an_input_is_refused(part: str) -> None:
    name, cls = {"state": ("run_input.step-5", RunInput), "host": ("host_input.env", None)}[part]
    data = item(name)
    data[part]["schema"] = 7
    with pytest.raises(NewerSchema, match="has schema 7"):
        decoded(cls or HostWorkflowInput, data)


@pytest.mark.parametrize("number", ["1", None, -1, 1.5])
def test_a_number_that_never_was_is_refused(number: Any) -> None:
    with pytest.raises(ValidationError, match="the schemas read here are 0 to 4"):
        decoded(RunState, {**item("run_input.step-5")["state"], "schema": number})


def test_a_newer_stored_config_is_waited_out(tmp_path: Path) -> None:
    newer = CONFIG.current + 1
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    ctx.store.put_json(keys.config("r"), {**config_document(config()), "schema": newer})
    with pytest.raises(NewerSchema, match=f"the stored config has schema {newer}") as caught:
        ctx.config("r")
    failure = failure_of(caught.value, "train_step")
    assert failure is not None and failure.type == wire_names.STORE_FAILED
    assert "newer build" in failure.message


def test_what_an_older_config_does_not_say_is_as_it_was() -> None:
    train = {"env": [{"id": "a", "sampling": {"temperature": 0.5}}, {"id": "b"}]}
    old = {"schema": 2, "max_steps": 3, "train": train}
    then, now = read_config(old), validate({"max_steps": 3, "train": train})
    for it, tokens, length, optim in (
        (then, 16, 256, (5e-4, (0.9, 0.95), 0.0)),
        (now, 1024, 2048, (1e-6, (0.9, 0.999), 0.01)),
    ):
        adamw = it.trainer.optim
        assert adamw.type == "adamw" and it.trainer.seq_len == length
        assert (adamw.lr, adamw.betas, adamw.weight_decay) == optim
        sampled = [it.sampling(name, "train").max_tokens for name in "ab"]
        assert {*sampled, it.eval.sampling.max_tokens} == {tokens}
        assert it.sampling("a", "train").temperature == 0.5
    sgd = read_config({**old, "trainer": {"optim": {"type": "sgd"}}}).trainer.optim
    assert sgd.type == "sgd" and sgd.lr == 1e-2
    assert old == {"schema": 2, "max_steps": 3, "train": train}, "an upgrader changes no input"


def test_envs_of_older_runs_keep_one_server_each() -> None:
    old = {"max_steps": 1, "train": {"env": [{"id": "a"}, {"id": "b", "workers": 3}]}}
    evals = {"eval": {"env": [{"id": "a"}]}}
    made = read_config({"schema": 6, **old, **evals})
    assert [env.workers for env in (*made.train.env, *made.eval.env)] == [1, 3, 1]
    assert validate(old).train.env[0].workers == "auto"
    assert read_config({"schema": 6, "max_steps": 1, "train": old["train"]}).eval.env == []


def test_frozen_models_of_older_runs_are_waited_for_as_before() -> None:
    where = {"name": "m", "base_url": "http://h"}
    sft = {"type": "sft", "source": {**where, "max_concurrent": 2}}
    train = {"env": [{"id": "a"}, {"id": "b", "algo": sft}, {"id": "c", "algo": {"type": "opsd"}}]}
    old = {"max_steps": 1, "algo": {"type": "opd", "teacher": where}, "train": train}
    waits = {}
    for made in (read_config({"schema": 4, **old}), validate(old)):
        played = made.sampler("b", "train")
        teacher = teacher_of(made.algo)
        assert isinstance(teacher, FrozenModelConfig) and played and played.max_concurrent == 2
        assert teacher_of(made.algorithm("c")) == "policy"
        waits[made.train.env[0].log_level] = [
            (model.timeout_s, model.connect_timeout_s) for model in (teacher, played)
        ]
    assert waits == {
        "warning": [(60.0, 10.0), (86_400.0, 30.0)],
        "info": [(1200.0, 30.0), (1200.0, 30.0)],
    }


def test_a_users_config_has_no_schema() -> None:
    with pytest.raises(ConfigError, match="schema: unknown key"):
        validate({**config().model_dump(mode="json"), "schema": 1})
    with pytest.raises(ValidationError, match="threds"):
        read_config({**config_document(config()), "threds": 1})


def test_signals_are_read_leniently() -> None:
    lease = {"next_train": 3, "of_a_newer_build": 1}
    report = decoded(DispatchReport, {"generation": 1, "seq": 0, "state": "open", "lease": lease})
    assert report.lease.next_train == 3
    assert decoded(Control, {"seq": 4, "of_a_newer_build": {}}).seq == 4


# -- upgraders ------------------------------------------------------------------------------


def test_upgraders_take_one_step_each_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_4_to_5(state: dict[str, Any]) -> dict[str, Any]:
        assert state["schema"] == 4, "it is given data of its own schema"
        return {**state, "renamed": state["steps"]}

    def from_5_to_6(state: dict[str, Any]) -> dict[str, Any]:
        steps = state["renamed"]
        return {key: value for key, value in state.items() if key != "renamed"} | {
            "steps": {**steps, "step": steps["step"] + 1}
        }

    upgrades: Any = VERSIONED[RunState].upgrades
    monkeypatch.setitem(upgrades, 4, from_4_to_5)
    monkeypatch.setitem(upgrades, 5, from_5_to_6)
    for data in (item("run_input.step-5"), written(decoded(RunInput, item("run_input.step-5")))):
        before = copy.deepcopy(data)
        state = decoded(RunInput, data).state
        assert (state.schema, state.steps.step, state.steps.version) == (6, 6, 5)
        assert data == before
    with pytest.raises(NewerSchema, match=r"has schema 7.*reads 0 to 6"):
        decoded(RunState, {"schema": 7})


OLDER_EVALS = ("open", "count", "requested", "fired", "last", "rollouts")


def test_the_last_results_of_older_runs_are_their_best() -> None:
    state = written(decoded(RunInput, item("run_input.step-5")))["state"]
    evals = {key: value for key, value in state["evals"].items() if key in OLDER_EVALS}
    evals["last"] = {
        "a": {"step": 4.0, "reward": 0.25, "version": 5.0},
        "b": {"step": 2.0, "reward": None, "version": 2.0, "failed": 8, "of": 8, "error": "boom"},
    }
    upgraded = decoded(RunState, {**state, "schema": 3, "evals": {**evals, "open": []}})
    assert upgraded.evals.best == {"a": BestEval(4, 0.25)} and upgraded.evals.needed == [4]


def test_the_first_upgrader_adds_what_early_builds_lacked() -> None:
    state = item("run_input.step-5")["state"]
    early = {key: value for key, value in state.items() if key != "wished_evals"}
    early["hosts"] = [{k: v for k, v in host.items() if k != "waits"} for host in state["hosts"]]
    assert decoded(RunState, early) == decoded(RunState, state)
    with pytest.raises(ValidationError) as caught:
        decoded(RunState, {**early, "schema": 1})
    assert "RunState.evals lacks requested" in str(caught.value)
    assert "RunState.servers.hosts[0] lacks waits" in str(caught.value)


@pytest.mark.parametrize("place", ["", "train", "curriculum", "hosts"])
def test_a_flat_state_is_read_as_strictly(place: str) -> None:
    for wrong in ("lost", "unknown"):
        state = item("run_input.step-5", "c49e718")["state"]
        part = state[place] if place else state
        part = part[0] if place == "hosts" else part
        for key in list(part) if wrong == "lost" else ["moved_here"]:
            if key in ("schema", "train", "curriculum", "hosts"):
                continue
            before = part.pop(key, None)
            if wrong == "unknown":
                part[key] = 1
            with pytest.raises(ValidationError, match=r"lacks|unknown"):
                decoded(RunState, state)
            part[key] = before


# -- shapes ---------------------------------------------------------------------------------

RECORD = "tests/recorded/README.md says what to do"


@pytest.mark.parametrize(("path", "shape"), shapes.current().items(), ids=lambda p: str(p)[-25:])
def test_a_schema_number_has_one_shape(path: Path, shape: dict[str, Any]) -> None:
    assert path.exists(), f"{path.name} is not recorded; {RECORD}"
    before = json.loads(path.read_text())
    found = {k: (before.get(k), shape.get(k)) for k in before.keys() | shape.keys()}
    changed = {key: pair for key, pair in found.items() if pair[0] != pair[1]}
    assert not changed, (
        f"{path.stem} is another than was recorded (before, now): {changed}. Runs under way hold "
        "data of that schema: give the changed one a new number and an upgrader "
        f"(workflows/protocol/upgrades.py, configs/upgrades.py); {RECORD}"
    )


def test_signals_keep_their_keys() -> None:
    before, now = json.loads(shapes.SIGNALS_FILE.read_text()), shapes.signals_shape()
    assert shapes.grown(before, now), f"a signal's key is gone or has another type; {RECORD}"
    assert before == now, f"a signal has another key; {RECORD}"


def test_every_number_has_its_shape() -> None:
    for cls, versions in VERSIONED.items():
        for number in range(1, versions.current + 1):
            assert (shapes.SHAPES / f"{cls.__name__}.{number}.json").exists()
    assert all(
        (shapes.SHAPES / f"RunConfig.{n}.json").exists() for n in range(1, CONFIG.current + 1)
    )


def test_a_dtype_of_both_sides_becomes_two_keys() -> None:
    before = {**item("config", "c20687b"), "schema": 1}
    before["model"] = {**before["model"], "dtype": "bfloat16"}
    config = read_config(before)
    assert (config.trainer.compute_dtype, config.inference.dtype) == ("bfloat16", "bfloat16")
    assert config.model.renderer == "ratchet-chatml", "what was the default then stays"
    with pytest.raises(ConfigError, match=r"set trainer\.compute_dtype"):
        validate({**as_written(before), "model": {"dtype": "bfloat16"}})
