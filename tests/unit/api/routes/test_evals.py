"""Evals of a run: their records, and one eval against another on the same examples."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ratchet.activities.scoring.evals import EvalRollout, summarize
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from tests.unit.api.leaving import app_of, leave, put_eval

BASE, NEW = "reverse-000000", "reverse-1a2b3c"
ENV = "reverse-text"
ALONE: dict[str, Any] = {"max_steps": 0, "train": {"env": []}, "eval": {"env": [{"id": ENV}]}}
OFTEN = [[0.0, 1.0]] * 6 + [[1.0, 1.0]] * 4
SELDOM = [[0.0, 0.0]] * 5 + [[1.0, 0.0]] * 3 + [[1.0, 1.0]] * 2


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(f"file://{tmp_path}/store")


@pytest.fixture
def api(store: ArtifactStore) -> TestClient:
    return TestClient(app_of(store))


def put(
    store: ArtifactStore, run: str, rewards: list[list[float]], epoch: str = f"0-0/{ENV}"
) -> None:
    """Commits the record of an eval, as workers make it."""
    rollouts = [
        EvalRollout(str(n), reward, 4, 1, truncated=False, responded=True)
        for n, each in enumerate(rewards)
        for reward in each
    ]
    size = max(len(each) for each in rewards)
    record = {
        "epoch": epoch,
        "env": epoch.rpartition("/")[2],
        "step": int(epoch.partition("-")[0]),
        "group_size": size,
        "rollouts": len(rollouts),
        "rewards": rewards,
        "metrics": summarize(rollouts, 0, 0, size),
    }
    store.put_json(keys.eval_record(run, epoch), record)


def two(store: ArtifactStore) -> None:
    """Two evaluations of one config."""
    leave(store, BASE, model={"name": "ratchet/tiny"}, **ALONE)
    leave(store, NEW, model={"name": "run:reverse-9f8e7d@40"}, **ALONE)
    put(store, BASE, SELDOM)
    put(store, NEW, OFTEN)


def got(api: TestClient, run: str = NEW, **params: Any) -> Any:
    answer = api.get(f"/v1/runs/{run}/evals/comparison", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def test_two_models_are_compared_by_example(store: ArtifactStore, api: TestClient) -> None:
    two(store)
    (found,) = got(api, to=BASE)
    assert (found["env"], found["metric"], found["problem"]) == (ENV, "avg@2", None)
    assert (found["this"]["run_id"], found["other"]["run_id"]) == (NEW, BASE)
    assert found["this"]["model"] == "run:reverse-9f8e7d@40"
    assert found["this"]["score"]["mean"] == 0.7
    assert found["other"]["score"]["mean"] == 0.35
    # 0.5 better on examples 0 to 4, 6 and 7, and alike on the others.
    assert (found["wins"], found["losses"], found["ties"]) == (7, 0, 3)
    difference = found["difference"]
    assert difference["mean"] == pytest.approx(0.35) and found["examples"] == 10
    assert 0 < difference["low"] < 0.35 < difference["high"]
    first = found["differ"][0]
    assert (first["example"], first["score"], first["other_score"]) == (0, 0.5, 0.0)
    assert first["rollouts"] == [f"eval:0-0:{ENV}:0:0", f"eval:0-0:{ENV}:0:1"]
    assert len(found["differ"]) == 7
    (back,) = got(api, BASE, to=NEW)
    assert (back["wins"], back["losses"]) == (0, 7)
    assert back["difference"]["mean"] == pytest.approx(-0.35)


def test_by_pass_at_k(store: ArtifactStore, api: TestClient) -> None:
    two(store)
    (found,) = got(api, to=BASE, k=2)
    assert (found["metric"], found["this"]["score"]["mean"]) == ("pass@2", 1.0)
    assert found["this"]["score"]["low"] is None, "all are alike"
    assert (found["wins"], found["ties"]) == (5, 5)
    (found,) = got(api, to=BASE, k=3)
    text = f"pass@3 needs 3 rollouts of each example, but the eval of {NEW} has 2"
    assert found["problem"].startswith(text) and "eval.group_size=3" in found["problem"]
    assert found["difference"] is None
    leave(store, "graded-1a2b3c", **ALONE)
    put(store, "graded-1a2b3c", [[0.5, 1.0]] * 10)
    (found,) = got(api, "graded-1a2b3c", to=BASE, k=2)
    assert "needs rewards of 0 or 1" in found["problem"]


def test_a_run_is_compared_with_its_own_beginning(store: ArtifactStore, api: TestClient) -> None:
    leave(store, NEW, steps=10, eval={"env": [{"id": ENV}]})
    put(store, NEW, SELDOM)
    put(store, NEW, SELDOM, f"5-1/{ENV}")
    put(store, NEW, OFTEN, f"10-2/{ENV}")
    (found,) = got(api)
    assert (found["this"]["step"], found["other"]["step"], found["wins"]) == (10, 0, 7)
    (found,) = got(api, step=5)
    assert (found["this"]["step"], found["wins"], found["difference"]["low"]) == (5, 0, None)
    (found,) = got(api, step=10, to_step=5)
    assert (found["other"]["step"], found["wins"]) == (5, 7)
    (found,) = got(api, step=0)
    assert "one result of this eval" in found["problem"]
    (found,) = got(api, step=7)
    said = f"{NEW} has no result of this eval at step 7; `ratchet runs evals {NEW}` lists its evals"
    assert found["problem"] == said


def test_what_cannot_be_compared_says_why(store: ArtifactStore, api: TestClient) -> None:
    two(store)
    other = [{"id": ENV, "args": {"n": 3}}, {"id": "guess"}]
    leave(store, "other-1a2b3c", **{**ALONE, "eval": {"env": other}})
    put(store, "other-1a2b3c", OFTEN)
    found = {each["env"]: each["problem"] for each in got(api, "other-1a2b3c", to=BASE)}
    assert found[ENV].startswith(f"args of eval env '{ENV}' differ between other-1a2b3c and {BASE}")
    assert found["guess"] == f"{BASE} has no eval env 'guess'"
    leave(store, "begun-1a2b3c", **ALONE)
    (begun,) = got(api, "begun-1a2b3c", to=BASE)
    assert begun["problem"] == "begun-1a2b3c has no result of this eval yet"
    leave(store, "old-1a2b3c", **ALONE)
    put_eval(store, "old-1a2b3c", ENV, 0, 0.5)
    (found_old,) = got(api, "old-1a2b3c", to=BASE)
    assert "by an older build" in found_old["problem"]
    assert "`ratchet eval`" in found_old["problem"]


def test_a_fork_with_other_examples_is_not_compared_with_its_source(
    store: ArtifactStore, api: TestClient
) -> None:
    """The evals from before the fork are of the source's config."""
    fork = "hotter-4d5e6f"
    leave(store, NEW, steps=10, eval={"env": [{"id": ENV}]})
    put(store, NEW, SELDOM)
    leave(store, fork, eval={"env": [{"id": ENV, "args": {"n": 3}}]})
    lineage = {"source": NEW, "step": 5, "kind": "fork"}
    store.put_json(keys.lineage(fork), lineage)
    put(store, fork, OFTEN, f"10-2/{ENV}")
    (found,) = got(api, fork)
    assert str(found["problem"]).startswith(
        f"args of eval env '{ENV}' differ between {fork} and {NEW}"
    )
    (found,) = got(api, fork, to=NEW)
    assert "differ" in str(found["problem"])
    put(store, fork, OFTEN, f"6-1/{ENV}")
    (found,) = got(api, fork, to_step=6)
    assert (found["problem"], found["ties"]) == (None, 10)
    (found,) = got(api, fork, step=0, to=NEW)
    assert found["ties"] == 10, "both sides are the source's record"


def test_what_is_not_there_is_refused(store: ArtifactStore, api: TestClient) -> None:
    two(store)
    url = f"/v1/runs/{NEW}/evals/comparison"
    missing = api.get(url, params={"to": "nobody-knows"})
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:ratchet:problem:unknown-run")
    unknown = api.get(url, params={"to": BASE, "env": "guess"})
    assert unknown.status_code == 422
    assert f"their eval envs: {ENV}" in unknown.json()["detail"]
    assert api.get(url, params={"k": 0}).status_code == 422


def test_the_list_has_intervals_and_no_reward_of_each_example(
    store: ArtifactStore, api: TestClient
) -> None:
    two(store)
    (record,) = api.get(f"/v1/runs/{NEW}/evals").json()["data"]
    assert "rewards" not in record
    metrics = record["metrics"]
    assert metrics["avg@2/low"] < metrics["avg@2"] == 0.7 < metrics["avg@2/high"]
