"""The rollout reader: what is found by step, env and kind, and what one rollout holds."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import Sample, encode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.store.records import Records
from ratchet.api.store.rollouts import GROUP, RID, Rollouts, Wanted, prompt_of, rollout_id
from ratchet.api.store.step_groups import StepGroups
from ratchet.api.store.tokens import Tokenizers, pieces_by_id
from ratchet.configs.load import validate
from tests.unit.api.conftest import Served
from tests.unit.api.routes.test_create import problem
from tests.unit.api.routes.test_trainer_logprobs import scores

TOKENIZER = {
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}},
    "added_tokens": [{"id": 3, "content": "<|end|>"}],
    "decoder": {"type": "Fuse"},
}


def group(served: Served, run: str, name: str, env: str, rewards: list[float | None]) -> None:
    """A finalized group and its rollouts; a reward of None is a rollout that failed."""
    kind = name.partition("/")[0]
    members: list[dict[str, Any]] = []
    for index, reward in enumerate(rewards):
        if reward is None:
            error = {"type": "Timeout", "message": "too slow"}
            members.append({"rollout": index, "error": error, "reward": 0.0})
            continue
        sample = {
            "token_ids": [0, 1, 3],
            "loss_mask": [False, True, True],
            "logprobs": [0.0, -0.5, -0.25],
            "versions": [-1, 4, 5],
            "prompt": 0,
            "prompt_tokens": 1,
        }
        if kind == "train":
            sample["advantages"] = [0.0, reward, reward]
        members.append(
            {
                "rollout": index,
                "error": None,
                "reward": reward,
                "advantage": reward if kind == "train" else None,
                "turns": 1,
                "truncated": False,
                "sampled_tokens": 2,
                "stop": "agent_completed",
                "samples": [sample],
            }
        )
        result = {
            "messages": [{"role": "assistant", "content": "b", "sampled": True}],
            "rewards": {"exact": reward},
            "temperature": 1.0,
            "labels": ["4.0a"],
        }
        served.store.put_json(keys.rollout(run, name, index), result)
    value = {"group": name, "kind": kind, "env": env, "example": 7, "rollouts": members}
    served.store.put_json(keys.group(run, name), value)


def batch(served: Served, run: str, step: int, *groups: str) -> None:
    samples = [
        Sample(name, 0, "e", 1.0, 1.0, [1, 2], [False, True], [0.0, -1.0], [0.0, 1.0], [-1, 0])
        for name in groups
        for _ in range(2)
    ]
    served.store.put(keys.batch(run, step), encode_batch(samples))


async def ids(served: Served, run: str, query: str = "") -> list[str]:
    """All pages."""
    found: list[str] = []
    cursor = ""
    while True:
        answer = await served.http.get(f"/v1/runs/{run}/rollouts?limit=3{query}{cursor}")
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            assert page["next_after"] is None
            return found
        cursor = f"&after={page['next_after']}"


@pytest.mark.asyncio(loop_scope="session")
async def test_rollouts_are_found_by_step_env_kind_and_reward(served: Served) -> None:
    run = (await served.start("read"))["id"]
    group(served, run, "train/2", "easy", [0.0, 1.0])
    group(served, run, "train/10", "hard", [0.5, None])
    group(served, run, "train/10.1", "easy", [0.25, 0.75])
    group(served, run, "eval/3-1/easy/0", "easy", [1.0])
    group(served, run, "eval/3-1/easy/11", "easy", [0.0])
    batch(served, run, 3, "train/10", "train/2")
    train = [f"train:{g}:{i}" for g in ("10.1", "10", "2") for i in (0, 1)]
    evals = ["eval:3-1:easy:0:0", "eval:3-1:easy:11:0"]
    assert await ids(served, run) == train + evals
    assert await ids(served, run, "&kind=eval") == evals
    # A step's own: its batch in the order of the file, then its evals.
    in_step = [f"train:{g}:{i}" for g in ("10", "2") for i in (0, 1)]
    assert await ids(served, run, "&step=3") == in_step + evals
    assert await ids(served, run, "&step=3&kind=train&env=hard") == ["train:10:0", "train:10:1"]
    assert await ids(served, run, "&step=4") == []
    assert await ids(served, run, "&group=train/2") == ["train:2:0", "train:2:1"]
    assert await ids(served, run, "&reward_min=0.75") == ["train:10.1:1", "train:2:1", evals[0]]
    assert await ids(served, run, "&errored=true") == ["train:10:1"]
    item = (await served.http.get(f"/v1/runs/{run}/rollouts?step=3&limit=1")).json()["data"][0]
    assert item["step"] == 3 and item["env"] == "hard" and item["versions"] == [4, 5]
    assert item["prompt"] is None, "none is kept of it"


PARTS = [{"type": "text", "text": "of an"}, {"type": "image"}, {"type": "text", "text": "image"}]


@pytest.mark.parametrize(
    ("rollout", "begins"),
    [
        ({}, None),
        ({"messages": [{"role": "system", "content": "be brief"}]}, None),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "a"),
        ({"prompts": [{"messages": [{"role": "user", "content": " two\n lines "}]}]}, "two lines"),
        ({"prompts": [{"messages": [{"role": "user", "content": PARTS}]}]}, "of an image"),
        ({"prompts": [{"messages": [{"role": "user", "content": "x" * 999}]}]}, "x" * 160),
        ({"prompts": [{"messages": [{"role": "user", "content": None}]}]}, None),
    ],
)
def test_a_prompt_is_named_by_its_beginning(rollout: dict[str, Any], begins: str | None) -> None:
    assert prompt_of(rollout) == begins


@pytest.mark.asyncio(loop_scope="session")
async def test_a_list_shows_how_prompts_begin(served: Served) -> None:
    """That of the group's first rollout that has one."""
    run = (await served.start("prompted"))["id"]
    group(served, run, "train/1", "easy", [None, 1.0])
    result = {"messages": [{"role": "user", "content": "reverse it"}]}
    group(served, run, "train/2", "easy", [None])
    served.store.put_json(keys.rollout(run, "train/2", 0), result)
    page = (await served.http.get(f"/v1/runs/{run}/rollouts")).json()["data"]
    assert [item["prompt"] for item in page] == ["reverse it", None, None]


def cut(served: Served, run: str, step: int, *groups: str, digest: str = "0" * 16) -> None:
    """What is recorded when a batch is written."""
    value = {"step": step, "groups": [*groups]}
    served.store.put_json(keys.step_groups(run, step, digest), value)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_step_has_the_groups_that_were_cut_for_it(served: Served) -> None:
    run = (await served.start("cut"))["id"]
    for name in ("train/2", "train/10", "train/10.1", "train/11"):
        group(served, run, name, "easy", [0.0, 1.0])
    # Nothing of the second trained, and of the first batch of step 6 nothing did.
    batch(served, run, 6, "train/10")
    cut(served, run, 6, "train/10", "train/2", digest="b" * 16)
    cut(served, run, 6, "train/10.1", digest="a" * 16)
    in_step = [f"train:{g}:{i}" for g in ("10.1", "10", "2") for i in (0, 1)]
    assert await ids(served, run, "&step=6") == in_step
    served.store.delete(served.store.require(keys.batch(run, 6)))
    assert await ids(served, run, "&step=6") == in_step
    page = (await served.http.get(f"/v1/runs/{run}/rollouts?step=6")).json()
    assert page["note"] is None
    listed = (await served.http.get(f"/v1/runs/{run}/rollouts")).json()["data"]
    assert {item["group"]: item["step"] for item in listed} == {
        "train/11": None,
        "train/10.1": 6,
        "train/10": 6,
        "train/2": 6,
    }
    whole = (await served.http.get(f"/v1/runs/{run}/rollouts/train:2:1")).json()
    assert whole["step"] == 6 and {member["step"] for member in whole["members"]} == {6}


@pytest.mark.asyncio(loop_scope="session")
async def test_a_step_without_rollouts_says_why(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.api.store.step_groups.LISTING_SHARE", 0)
    run = (await served.start("pruned"))["id"]
    served.store.put_json(keys.step_record(run, 5), {"step": 5, "time": 1.0, "metrics": {}})
    url = f"/v1/runs/{run}/rollouts"
    pruned = (await served.http.get(f"{url}?step=5")).json()
    assert pruned["data"] == [] and "retention.batches has removed" in pruned["note"]
    beyond = (await served.http.get(f"{url}?step=900&kind=train")).json()
    assert beyond["note"] == "no batch of step 900 has been written"
    cut(served, run, 6, "train/2", "train/3")
    group(served, run, "train/3", "easy", [1.0])
    assert (await served.http.get(f"{url}?step=6")).json()["note"] is None
    cut(served, run, 4, "train/0", "train/1")
    gone = (await served.http.get(f"{url}?step=4")).json()
    assert gone["data"] == []
    assert gone["note"] == "retention.rollouts has removed those of step 4"
    for query in ("step=0", "step=5&kind=eval", "kind=train"):
        assert (await served.http.get(f"{url}?{query}")).json()["note"] is None, query


@pytest.mark.asyncio(loop_scope="session")
async def test_a_rollout_is_read_token_by_token(served: Served, tmp_path: Any) -> None:
    run = (await served.start("whole"))["id"]
    group(served, run, "train/1", "easy", [0.5, 1.0])
    url = f"/v1/runs/{run}/rollouts/train:1:1"
    bare = (await served.http.get(url)).json()
    assert bare["samples"][0]["pieces"] is None
    assert bare["samples"][0]["trainer_logprobs"] is None
    scores(served.store, run, 6, ("train/1", 1, [-9.0, -0.75]))
    scored = (await served.http.get(url)).json()["samples"][0]
    assert scored["trainer_logprobs"] == [None, -0.75, None] and len(scored["token_ids"]) == 3
    other = (await served.start("whole"))["id"]
    group(served, other, "train/1", "easy", [0.5, 1.0])
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    served.store.put_folder(keys.weights(other, 0), tmp_path, attempt="t")
    found = (await served.http.get(f"/v1/runs/{other}/rollouts/train%3A1%3A1")).json()
    sample = found["samples"][0]
    assert sample["pieces"] == ["a", "b", "<|end|>"]
    assert sample["advantages"] == [0.0, 1.0, 1.0] and sample["logprobs"] == [0.0, -0.5, -0.25]
    assert found["messages"][0]["content"] == "b" and found["rewards"] == {"exact": 1.0}
    assert [member["id"] for member in found["members"]] == ["train:1:0", "train:1:1"]
    for rid in ("train:1:2", "train:9:0", "train:1", "..%2f..%2fconfig", "eval:..:x:1:0"):
        answer = await served.http.get(f"/v1/runs/{other}/rollouts/{rid}")
        assert answer.status_code == 404, rid
    answer = await served.http.get(f"/v1/runs/{other}/rollouts?group=../../x/config")
    assert answer.json()["data"] == []
    problem(await served.http.get(f"/v1/runs/{other}/rollouts?after=x"), 404, "unknown-rollout")


@pytest.mark.parametrize(
    "rid",
    [
        "eval:1-1:..:3:0",
        "eval:1-1:.:3:0",
        "eval:1-1:a%0A:3:0",
        "train:١:0",
        f"train:{'1' * 150}:0",
        f"train:1.{'1' * 150}:0",
        f"eval:1-1:{'e' * 65}:3:0",
        f"eval:1-{'1' * 100}:e:3:0",
        f"train:{'1' * 400}:0",
    ],
)
@pytest.mark.asyncio(loop_scope="session")
async def test_ids_that_name_no_file_are_unknown(served: Served, rid: str) -> None:
    run = (await served.start("named"))["id"]
    url = f"/v1/runs/{run}/rollouts"
    kind = (422, "invalid-request") if len(rid) > 200 else (404, "unknown-rollout")
    problem(await served.http.get(f"{url}/{rid}"), *kind)
    cursor = (404, "unknown-cursor") if len(rid) > 200 else kind
    problem(await served.http.get(f"{url}?after={rid}"), *cursor)
    answer = await served.http.get(f"{url}?group={rid.rpartition(':')[0].replace(':', '/')}")
    assert answer.status_code == 422 if len(rid) > 200 else answer.json()["data"] == []


class Listed(ArtifactStore):
    """Counts listings of a folder of groups, which take a while."""

    listings = 0

    def committed_keys(self, prefix: str) -> list[str]:
        if "/groups/" in prefix:
            self.listings += 1
            time.sleep(0.05)
        return super().committed_keys(prefix)


def test_pages_share_the_listing_of_a_long_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.api.store.rollouts.LISTING_SHARE", 1000)
    store = Listed(str(tmp_path))
    store.put_json(keys.config("x"), {})
    store.put_json(keys.config("x+2"), {})
    store.put_json(keys.lineage("x+2"), {"source": "x", "step": 1, "kind": "resume"})
    value: dict[str, Any] = {"kind": "train", "env": "e", "example": 1}
    rollouts = [{"rollout": index, "error": None} for index in (0, 1)]
    held = {"x": ["0", "1", "2", "2.1", "10"], "x+2": ["2", "11"]}
    for attempt, names in held.items():
        for name in names:
            group = {**value, "group": f"train/{name}", "rollouts": rollouts}
            store.put_json(keys.group(attempt, f"train/{name}"), group)
    store.put_json(keys.group("x", "train/of something else"), {})
    reader, found, after = Rollouts(Records(store)), [], None
    while True:
        page = reader.page("x", Wanted(kind="train"), after, 3)
        found += [(item.group, item.index, item.attempt) for item in page.data]
        after = page.next_after
        if not page.has_more:
            break
    order = [("11", "x+2"), ("2", "x+2"), ("10", "x"), ("2.1", "x"), ("1", "x"), ("0", "x")]
    assert found == [(f"train/{name}", i, attempt) for name, attempt in order for i in (0, 1)]
    assert store.listings == 2


def test_a_group_gets_its_step_from_as_few_records_as_may_hold_it(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    config = validate(
        {"max_steps": 9, "train": {"env": [{"id": "reverse-text"}], "max_off_policy_steps": 2}}
    )
    for attempt in ("x", "x+2"):
        store.put_json(keys.config(attempt), config.model_dump(mode="json"))
    store.put_json(keys.lineage("x+2"), {"source": "x", "step": 3, "kind": "resume"})
    for attempt, step, group in (("x", 3, 1), ("x", 4, 2), ("x+2", 4, 3), ("x+2", 6, 4)):
        value = {"step": step, "groups": [f"train/{group}"]}
        store.put_json(keys.step_groups(attempt, step, "0" * 16), value)
    steps = StepGroups(Records(store))

    def step_of(group: int, version: int, *, ageless: bool = False) -> int | None:
        return steps.step_of("x", f"train/{group}", version, ageless=ageless)

    assert step_of(1, 2) == 3 and step_of(3, 1) == 4
    assert step_of(2, 1) is None, "the attempt was left before that step"
    assert step_of(1, 3) is None, "a batch trains on no later version than the one before it"
    assert step_of(4, 2) is None and step_of(4, 2, ageless=True) == 6 and step_of(4, 3) == 6
    assert steps.step_of("x", "train/4", 2, ageless=True, deadline=0.0) is None, "in time only"


def configured(store: ArtifactStore, *attempts: str) -> None:
    """The config of attempts of a run."""
    config = validate({"max_steps": 99, "train": {"env": [{"id": "reverse-text"}]}})
    for attempt in attempts:
        store.put_json(keys.config(attempt), config.model_dump(mode="json"))


def attempted(store: ArtifactStore) -> None:
    """A run 'x' and its second attempt, which began after step 20."""
    configured(store, "x", "x+2")
    store.put_json(keys.lineage("x+2"), {"source": "x", "step": 20, "kind": "resume"})


def finalized(store: ArtifactStore, attempt: str, *names: str) -> None:
    """Groups of one rollout."""
    for name in names:
        group: dict[str, Any] = {"kind": name.partition("/")[0], "env": "e", "example": 1}
        group |= {"group": name, "rollouts": [{"rollout": 0, "error": None}]}
        store.put_json(keys.group(attempt, name), group)


def paged(
    reader: Rollouts, wanted: Wanted, limit: int, between: Callable[[str], None]
) -> list[str]:
    """Groups of all pages; `between` gets the cursor before it is used."""
    found: list[str] = []
    after = None
    while True:
        page = reader.page("x", wanted, after, limit)
        found += [item.group for item in page.data]
        if page.next_after is None:
            return found
        after = page.next_after
        between(after)


ORDER = [*("train/12", "train/11", "train/10", "train/9", "train/8"), *("train/3", "train/2")]
EVALS = [*("eval/25-1/e/0", "eval/25-1/e/3", "eval/22-1/e/0"), *("eval/10-1/e/0", "eval/10-1/e/1")]


@pytest.mark.parametrize(
    ("at", "gone", "left"),
    [
        ("train/10", ORDER[2:5], [*ORDER[5:], *EVALS]),
        ("train/8", ORDER[4:5], [*ORDER[5:], *EVALS]),
        ("train/8", ORDER[4:], EVALS),
        ("eval/25-1/e/0", EVALS[:1], EVALS[1:]),
        ("eval/25-1/e/0", EVALS[:3], EVALS[3:]),
        ("eval/22-1/e/0", EVALS[2:3], EVALS[3:]),
    ],
)
def test_a_list_goes_on_where_retention_deletes_the_group_of_its_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, gone: list[str], left: list[str]
) -> None:
    monkeypatch.setattr("ratchet.api.store.rollouts.LISTING_SHARE", 0)
    store = ArtifactStore(str(tmp_path))
    attempted(store)
    finalized(store, "x", *ORDER[5:], *EVALS[3:])
    finalized(store, "x+2", *ORDER[:5], *EVALS[:3])

    def prune(cursor: str) -> None:
        if cursor == rollout_id(at, 0):
            for name in gone:
                own = keys.group("x+2" if store.committed(keys.group("x+2", name)) else "x", name)
                store.delete(store.require(own))

    order = [*ORDER, *EVALS]
    before = order[: order.index(at) + 1]
    assert paged(Rollouts(Records(store)), Wanted(), 1, prune) == [*before, *left]


def test_evals_of_a_step_follow_its_batch_once_that_is_gone(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    configured(store, "x")
    finalized(store, "x", "train/1", "train/2", "eval/3-1/e/0", "eval/2-1/e/0")
    batch_of = [
        Sample(name, 0, "e", 1.0, 1.0, [1, 2], [False, True], [0.0, -1.0], [0.0, 1.0], [-1, 0])
        for name in ("train/1", "train/2")
    ]
    store.put(keys.batch("x", 3), encode_batch(batch_of))

    def prune(cursor: str) -> None:
        if cursor == "train:1:0":
            store.delete(store.require(keys.batch("x", 3)))

    found = paged(Rollouts(Records(store)), Wanted(step=3), 1, prune)
    assert found == ["train/1", "eval/3-1/e/0"]


@pytest.mark.timeout(20)
def test_a_page_of_deleted_groups_leads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group is read in time, and is gone since it was listed."""
    monkeypatch.setattr("ratchet.api.store.rollouts.LISTING_SHARE", 10**6)
    store = Listed(str(tmp_path))
    store.put_json(keys.config("x"), {})
    finalized(store, "x", "train/1", "train/2", "train/3")
    reader = Rollouts(Records(store))
    assert reader.page("x", Wanted(), "train:1:0", 5).data == []
    for name in ("train/2", "train/3"):
        store.delete(store.require(keys.group("x", name)))
    monkeypatch.setattr("ratchet.api.store.rollouts.SCAN_S", -1.0)
    assert paged(reader, Wanted(), 5, lambda _: None) == ["train/1"]


class Pruned(ArtifactStore):
    """Deletes a group right before, or right after, its marker is read again."""

    when = ""

    def require(self, key: str) -> ArtifactRef:
        ref = super().require(key)
        if self.when:
            self.delete(ref)
        return super().require(key) if self.when == "before" else ref


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rollout_that_retention_deletes_meanwhile_is_unknown(tmp_path: Path, when: str) -> None:
    store = Pruned(str(tmp_path))
    store.put_json(keys.config("x"), {})
    for name in ("train/1", "train/2"):
        finalized(store, "x", name)
    reader = Rollouts(Records(store))
    assert reader.full("x", "train:1:0") is not None
    store.when = when
    assert reader.full("x", "train:1:0") is None
    page = reader.page("x", Wanted(group="train/2"), None, 5)
    assert page.data == [] and page.damaged == [] and not page.has_more


def test_evals_are_paged_through_attempts(tmp_path: Path) -> None:
    store = Listed(str(tmp_path))
    configured(store, "x", "x+2")
    store.put_json(keys.lineage("x+2"), {"source": "x", "step": 20, "kind": "resume"})
    held = {"x": ["2-1/e/0", "2-1/e/5", "10-1/e/0", "30-1/e/0"], "x+2": ["2-1/e/5", "25-1/e/0"]}
    for attempt, names in held.items():
        for name in names:
            group = {"kind": "eval", "env": "e", "example": 1, "group": f"eval/{name}"}
            group["rollouts"] = [{"rollout": 0, "error": None}]
            store.put_json(keys.group(attempt, f"eval/{name}"), group)
    (tmp_path / "runs/x/groups/eval/notes/e").mkdir(parents=True)
    store.put_json("runs/x/groups/eval/2-1/e/notes.json", {})
    reader, found, after = Rollouts(Records(store)), [], None
    while True:
        page = reader.page("x", Wanted(), after, 1)
        found += [(item.group.removeprefix("eval/"), item.attempt) for item in page.data]
        after = page.next_after
        if not page.has_more:
            break
    assert found == [
        ("25-1/e/0", "x+2"),
        ("2-1/e/5", "x+2"),
        ("10-1/e/0", "x"),
        ("2-1/e/0", "x"),
    ]


@pytest.mark.asyncio(loop_scope="session")
async def test_batches_are_listed_by_step(served: Served) -> None:
    run = (await served.start("batched"))["id"]
    for step in (1, 2, 3):
        batch(served, run, step, "train/1")
    url = f"/v1/runs/{run}/batches"
    page = (await served.http.get(f"{url}?limit=2")).json()
    assert [item["step"] for item in page["data"]] == [1, 2] and page["has_more"] is True
    page = (await served.http.get(f"{url}?after_step=2")).json()
    assert [item["step"] for item in page["data"]] == [3] and page["has_more"] is False
    ref = served.store.require(keys.batch(run, 3))
    assert page["data"][0]["sha256"] == ref.sha256 and page["data"][0]["path"] == ref.path
    assert page["data"][0]["created_at"]


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
GROUPS = st.one_of(
    st.builds("train/{}".format, st.integers(0, 10**6)),
    st.builds("train/{}.{}".format, st.integers(0, 10**6), st.integers(1, 9)),
    st.builds(
        "eval/{}-{}/{}/{}".format, st.integers(0, 99), st.integers(0, 9), NAMES, st.integers(0, 99)
    ),
)


@given(GROUPS, st.integers(0, 5000))
def test_ids_of_rollouts_name_their_group_and_place(name: str, index: int) -> None:
    matched = RID.fullmatch(rollout_id(name, index))
    assert matched and matched[1].replace(":", "/") == name and int(matched[2]) == index
    assert GROUP.fullmatch(name)


def test_tokens_of_byte_level_and_unigram_vocabularies_become_text() -> None:
    vocab = {"\u0120the": 5, "\u00c3": 6, "Caf\u00c3\u00a9": 7}
    pieces = pieces_by_id({"model": {"vocab": vocab}, "decoder": {"type": "ByteLevel"}})
    assert pieces == {5: " the", 6: "\ufffd", 7: "Caf\u00e9"}
    unigram = {"model": {"vocab": [["<unk>", 0.0], ["\u2581the", -1.0]]}, "added_tokens": []}
    assert pieces_by_id(unigram) == {0: "<unk>", 1: " the"}


@pytest.mark.parametrize(
    "file", ["[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}', '{"model": {"vocab": [[]]}}']
)
def test_a_tokenizer_that_is_none_leaves_no_texts(tmp_path: Path, file: str) -> None:
    store = ArtifactStore(f"file://{tmp_path / 'store'}")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tokenizer.json").write_text(file)
    store.put_folder(keys.weights("r", 0), tmp_path / "weights", attempt="t")
    assert Tokenizers(store).texts("r", [1]) is None
