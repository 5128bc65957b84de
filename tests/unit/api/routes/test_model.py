"""What there is of a run's model to take away: the version, its files, its card."""

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from ratchet.activities.storage import configs, keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.schemas.keys import ApiKey, digest
from ratchet.configs.load import validate
from tests.unit.api.conftest import config
from tests.unit.api.leaving import (
    ADAPTER,
    MODEL,
    app_of,
    leave,
    put_adapter,
    put_eval,
    put_weights,
    put_whole_checkpoint,
    weights_of,
)

RUN = "reverse-1a2b3c"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(f"file://{tmp_path}/store")


@pytest.fixture
def api(store: ArtifactStore) -> TestClient:
    return TestClient(app_of(store))


def got(api: TestClient, run: str = RUN, **params: Any) -> Any:
    answer = api.get(f"/v1/runs/{run}/model", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(api: TestClient, status: int, kind: str, run: str = RUN, **params: Any) -> str:
    answer = api.get(f"/v1/runs/{run}/model", params=params)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:ratchet:problem:{kind}")
    return str(answer.json()["detail"])


def test_the_last_checkpoint_else_the_newest_version(store: ArtifactStore, api: TestClient) -> None:
    leave(store, RUN)
    assert "no weights yet" in refused(api, 404, "unknown-version")
    put_weights(store, RUN, 0)
    put_weights(store, RUN, 3)
    found = got(api)
    assert (found["step"], found["chosen"], found["kept_as"]) == (3, "newest", "weights")
    put_whole_checkpoint(store, RUN, 2)
    put_whole_checkpoint(store, RUN, 1)
    found = got(api)
    assert (found["step"], found["chosen"], found["kept_as"]) == (2, "checkpoint", "checkpoint")
    assert found["steps"] == [0, 1, 2, 3]
    put_weights(store, RUN, 2)
    assert got(api)["kept_as"] == "weights", "what the engines served goes first"


def test_of_an_adapter_the_files_are_its_own_or_merged(
    store: ArtifactStore, api: TestClient
) -> None:
    leave(store, RUN, weights=[0], steps=3, trainer={"lora": {"rank": 8}})
    put_adapter(store, RUN, 3)
    found, whole, base = got(api), got(api, merge=True), got(api, step=0)
    assert [file["name"] for file in found["files"]] == ADAPTER
    assert (found["kind"], whole["kind"], base["kind"]) == ("adapter", "model", "model")
    assert [file["name"] for file in whole["files"]] == MODEL
    assert [file["name"] for file in base["files"]] == MODEL
    assert found["path"].endswith("/adapter")
    for view, more in ((found, {}), (whole, {"merge": True})):
        for file in view["files"]:
            params = {"step": 3, **more}
            answer = api.get(f"/v1/runs/{RUN}/model/files/{file['name']}", params=params)
            assert answer.status_code == 200
            assert hashlib.sha256(answer.content).hexdigest() == file["sha256"]
    front, text = found["card"].split("---")[1], found["card"]
    assert yaml.safe_load(front)["library_name"] == "peft"
    assert "a LoRA adapter alone (rank 8, alpha 32, float32)" in text
    assert f"`ratchet runs export {RUN} --step 0`" in text
    assert yaml.safe_load(whole["card"].split("---")[1])["library_name"] == "transformers"
    assert "float32, with a LoRA adapter (rank 8, alpha 32) merged" in whole["card"]
    # A checkpoint alone has an adapter, and no whole model.
    store.delete(store.require(keys.weights(RUN, 3)))
    alone = got(api)
    assert (alone["kind"], alone["kept_as"]) == ("adapter", "checkpoint")
    said = refused(api, 404, "unknown-version", merge=True)
    assert "kept versions: 0" in said and "Of version 3 the adapter alone is kept" in said


def test_files_are_those_of_a_model_with_size_and_hash(
    store: ArtifactStore, api: TestClient
) -> None:
    leave(store, RUN, weights=[0], checkpoints=[2])
    for step in (0, 2):
        found = got(api, step=step)
        assert [file["name"] for file in found["files"]] == MODEL
        assert found["size"] == sum(file["size"] for file in found["files"])
        for file in found["files"]:
            where = f"/v1/runs/{RUN}/model/files/{file['name']}"
            answer = api.get(where, params={"step": step})
            assert answer.status_code == 200
            assert answer.headers["content-length"] == str(file["size"])
            assert answer.headers["content-type"] == "application/octet-stream"
            assert hashlib.sha256(answer.content).hexdigest() == file["sha256"]
        assert api.get(f"/v1/runs/{RUN}/model/files/model.safetensors?step={step}").content == (
            weights_of(RUN, step)
        )
    newest = api.get(f"/v1/runs/{RUN}/model/files/model.safetensors")
    assert newest.content == weights_of(RUN, 2)


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.safetensors",
        "run_state.json",
        "manifest.json",
        "policy.json",
        "nope",
        "..%2F..%2F..%2Fconfig.json",
        "%2Fetc%2Fpasswd",
        ".%2Fconfig.json",
    ],
)
def test_only_the_files_of_the_model_are_served(
    store: ArtifactStore, api: TestClient, name: str
) -> None:
    leave(store, RUN, checkpoints=[2])
    answer = api.get(f"/v1/runs/{RUN}/model/files/{name}?step=2")
    assert answer.status_code == 404, answer.content[:80]
    assert answer.json()["type"].endswith(":unknown-file")
    assert "model.safetensors" in answer.json()["detail"]


def test_the_best_has_the_highest_mean_and_is_late_at_a_tie(
    store: ArtifactStore, api: TestClient
) -> None:
    leave(store, RUN, weights=range(10))
    means = {1: math.nan, 2: 0.5, 4: 0.75, 6: 0.75, 8: 0.625, 9: None}
    for step, mean in means.items():
        put_eval(store, RUN, "reverse-text", step, mean)
    put_eval(store, RUN, "reverse-text", 6, 0.25, count=2)
    put_eval(store, RUN, "guess-hard", 4, 0.25)
    put_eval(store, RUN, "guess-hard", 2, 1.0)
    for name in ("", "reverse-text"):
        found = got(api, best=name)
        assert (found["step"], found["chosen"], found["best_of"]) == (6, "best", "reverse-text")
    assert got(api, best="guess-hard")["step"] == 2
    assert got(api, step=1)["evals"] == {}
    assert got(api, step=4)["evals"] == {"reverse-text": 0.75, "guess-hard": 0.25}


def test_an_eval_that_is_none_or_has_no_result_is_said(
    store: ArtifactStore, api: TestClient
) -> None:
    leave(store, RUN, weights=[0, 1])
    put_eval(store, RUN, "reverse-text", 1, 0.5)
    said = refused(api, 404, "unknown-eval", best="reverse")
    assert "no eval 'reverse'; its evals are reverse-text, guess-hard" in said
    assert "no result of its eval 'guess-hard' yet" in refused(
        api, 404, "no-eval-result", best="guess-hard"
    )
    leave(store, "none", weights=[0], eval={"env": []})
    assert "it has none" in refused(api, 404, "unknown-eval", "none", best="x")
    assert "no result of an eval yet" in refused(api, 404, "no-eval-result", "none", best="")


def test_a_version_that_was_removed_says_what_keeps_it(
    store: ArtifactStore, api: TestClient
) -> None:
    leave(store, RUN, weights=[0, 8, 9], checkpoints=[4, 8])
    said = refused(api, 410, "version-removed", step=3)
    assert "kept versions: 0, 4, 8, 9" in said
    assert (
        "retention.weights = 4, checkpoint.keep_last = 2, checkpoint.keep_every is not set" in said
    )
    assert "no version 10" in refused(api, 404, "unknown-version", step=10)
    for step, mean in ((3, 0.9), (4, 0.2), (8, 0.6), (10, 0.1)):
        put_eval(store, RUN, "reverse-text", step, mean)
    said = refused(api, 410, "version-removed", best="")
    assert "version 3" in said and said.endswith("The best of reverse-text that is kept is 8")
    answer = api.get(f"/v1/runs/{RUN}/model/files/config.json?step=3")
    assert (answer.status_code, answer.json()["type"][-15:]) == (410, "version-removed")


def test_what_cannot_be_asked(store: ArtifactStore, api: TestClient) -> None:
    leave(store, RUN, weights=[0])
    refused(api, 404, "unknown-run", "other")
    refused(api, 404, "unknown-run", "x..y")
    refused(api, 422, "invalid-request", step=0, best="")
    refused(api, 422, "invalid-request", step=-1)


def test_damage_is_said_unless_something_else_holds_the_version(
    store: ArtifactStore, api: TestClient
) -> None:
    leave(store, RUN, weights=[0, 2])
    ref = store.require(keys.weights(RUN, 2))
    store.fs.rm(store.path(f"{ref.path}/model.safetensors"))
    answer = api.get(f"/v1/runs/{RUN}/model?step=2")
    assert answer.status_code == 500 and "model.safetensors is missing" in answer.json()["detail"]
    put_whole_checkpoint(store, RUN, 2)
    assert got(api, step=2)["kept_as"] == "checkpoint"


def test_a_key_that_may_read_is_enough(store: ArtifactStore) -> None:
    leave(store, RUN, weights=[0])
    key = ApiKey(name="r", sha256=digest("rk_read"), scopes=("read",))
    api = TestClient(app_of(store, keys=(key,)))
    where = f"/v1/runs/{RUN}/model"
    for path in (where, f"{where}/files/config.json?step=0"):
        assert api.get(path).status_code == 401
        assert api.get(path, headers={"Authorization": "Bearer rk_read"}).status_code == 200


# -- the card ---------------------------------------------------------------------------------


def test_the_card_tells_base_licence_curves_evals_and_config(
    store: ArtifactStore, api: TestClient
) -> None:
    leave(store, RUN, weights=[0, 30, 40], steps=40)
    changed = validate(config(trainer={"optim": {"lr": 0.125}}))
    configs.save(store, RUN, changed, revision=1, attempt="t")
    for step, mean in ((0, 0.25), (20, 0.5), (40, 0.75)):
        put_eval(store, RUN, "reverse-text", step, mean)
    card = got(api, step=30)["card"]
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "base_model_relation": "finetune",
        "tags": ["ratchet", "reinforcement-learning"],
    }
    assert f"# {RUN}, step 30" in text
    assert (
        "`ratchet/smollm2-135m` (HuggingFaceTB/SmolLM2-135M-Instruct), licence apache-2.0" in text
    )
    assert "1,234" in text and "Weights: float32" in text
    assert "30 steps" in text and "algorithm `grpo`" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert "| 1 | 0.01 | -0.5 | – | – | – |" in rows
    assert "| 30 | 0.3 | -0.5 | – | – | – |" in rows, "the last row is that of the step"
    assert "| reverse-text | 20 | 0.5 | 8 |" in rows
    assert not [row for row in rows if row.startswith(("| 31 ", "| 40 ", "| reverse-text | 40"))]
    assert len(rows) == 1 + 1 + 12 + 1 + 1 + 2
    assert "batch_size = 16" in text and "lr = 0.125" not in text, "revision 0 trained step 30"


def test_the_card_tells_the_revision_that_trained_the_step(
    store: ArtifactStore, api: TestClient
) -> None:
    leave(store, RUN, weights=[0, 1], steps=0)
    metrics = {"reward/all/mean": 0.5, "config_revision": 1.0}
    store.put_json(keys.step_record(RUN, 1), {"step": 1, "time": 1.0, "metrics": metrics})
    changed = validate(config(trainer={"optim": {"lr": 0.125}}))
    configs.save(store, RUN, changed, revision=1, attempt="t")
    assert "lr = 0.125" in got(api, step=1)["card"]
    assert "lr = 0.125" not in got(api, step=0)["card"]


def test_the_card_tells_forks_resumes_and_models_up_to_the_version(
    store: ArtifactStore, api: TestClient
) -> None:
    leave(store, "first", weights=[0, 3], steps=3)
    begun = {"model": {"name": "run:first@3"}}
    leave(store, "second", weights=[0, 5], checkpoints=[4], steps=5, **begun)
    leave(store, "third", weights=[0, 4, 8], steps=0, **begun)
    store.put_json(keys.lineage("third"), {"source": "second", "step": 4, "kind": "fork"})
    leave(store, "third+2", weights=[0, 8, 9], steps=0, **begun)
    store.put_json(keys.lineage("third+2"), {"source": "third", "step": 8, "kind": "resume"})

    def lineage(step: int) -> list[str]:
        text = got(api, "third", step=step)["card"]
        return [line for line in text.split("## Lineage")[1].splitlines() if line.startswith("- ")]

    model = "- begun with version 3 of run `first`"
    fork = "- forked from run `second` at step 4"
    assert lineage(9) == ["- resumed at step 8", fork, model]
    assert lineage(8) == [fork, model]
    assert lineage(4) == [model]
    assert "The run began with the base model." in got(api, "first")["card"]


def test_a_base_of_unknown_licence_says_so(store: ArtifactStore, api: TestClient) -> None:
    leave(store, RUN, model={"name": "owner/model"})
    put_whole_checkpoint(store, RUN, 1)
    card = got(api)["card"]
    assert "`owner/model`; its licence is not known here" in card
    assert 'base_model: "owner/model"' in card and "\nlicense:" not in card
    leave(store, "tiny")
    put_whole_checkpoint(store, "tiny", 1)
    card = got(api, "tiny")["card"]
    assert "created by Ratchet from random weights" in card and "base_model:" not in card


def test_secrets_are_cut_out_of_the_card(store: ArtifactStore, api: TestClient) -> None:
    leave(store, RUN, weights=[0], metadata={"api_key": "sk-proj-abcdefghij0123456789"})
    assert "abcdefghij0123456789" not in got(api)["card"]
