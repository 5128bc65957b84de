"""A frozen model's words in the policy's tokens: what trains, and where samples end."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts import names
from ratchet.activities.contracts.rollouts import EngineTarget, GroupWork, RunRolloutsInput
from ratchet.activities.envs.rendering import renderer_config
from ratchet.activities.envs.samples import (
    Reading,
    RolloutSample,
    from_episode,
    to_document,
)
from ratchet.activities.envs.shipped.ratchet_chatml import ChatMLRenderer
from ratchet.activities.rollouts import frozen, groups
from ratchet.activities.rollouts.frozen import Layout, Turn, lay_out
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.scoring.algorithms.base import CreditError
from ratchet.activities.scoring.references import ReferenceLost
from ratchet.activities.storage import keys
from ratchet.activities.training.tokenizer import IM_END, build_tokenizer, vocabulary
from ratchet.configs.env import SamplingConfig
from ratchet.configs.load import validate
from ratchet.configs.reference import FrozenModelConfig
from tests.groups import rollout_activities, score_group
from tests.unit.activities.envs.test_samples import _episode

TOKENIZER = build_tokenizer(256)
RENDERER = ChatMLRenderer(TOKENIZER)
TEXT = st.text(st.sampled_from("abc xyz\n."), max_size=12)


def _node(parent: int | None, content: str, sampled: bool = False) -> dict[str, Any]:
    role = "assistant" if sampled else "user"
    message = {"role": role, "content": content}
    return {"parent": parent, "message": message, "sampled": sampled}


def _text(sample: RolloutSample, on: bool = True) -> str:
    kept = [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m is on or not on]
    return str(TOKENIZER.decode(kept))


def test_a_reply_trains_through_its_end() -> None:
    rollout = from_episode(
        _episode([_node(None, "abc"), _node(0, "cba", True)]), Reading(), Layout(RENDERER).samples
    )
    (sample,) = rollout.samples
    assert _text(sample) == f"cba{IM_END}"
    assert _text(sample, on=False) == (
        f"<|im_start|>user\nabc{IM_END}\n<|im_start|>assistant\ncba{IM_END}"
    )
    assert set(sample.logprobs) == {0.0} and set(sample.versions) == {-1}
    assert (rollout.error, rollout.labels, rollout.sampled_tokens) == (None, [], 4)


def test_a_reply_that_was_cut_off_has_no_end_to_learn() -> None:
    nodes = [_node(None, "abc"), _node(0, "cb", True)]
    calls = [{"node": 1, "finish_reason": "length"}]
    rollout = from_episode(_episode(nodes, calls=calls), Reading(), Layout(RENDERER).samples)
    (sample,) = rollout.samples
    assert _text(sample) == "cb" and sample.token_ids[-1] != vocabulary()[IM_END]


@given(st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=4))
def test_a_conversation_is_one_sample(said: list[tuple[str, str, bool]]) -> None:
    messages: list[dict[str, str]] = []
    turns = []
    for question, reply, cut in said:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": reply},
        ]
        turns.append(Turn(len(messages) - 1, cut=cut))
    found = lay_out(messages, turns, RENDERER)
    learnt = "".join(reply + ("" if cut else IM_END) for _, reply, cut in said)
    if not learnt:
        assert found == []
        return
    (sample,) = found
    assert _text(sample) == learnt
    whole = RENDERER.render_ids(messages)
    assert whole[: len(sample.token_ids)] == sample.token_ids


def test_a_shared_reply_trains_in_its_first_branch_only() -> None:
    """0 -> 1(reply) forks into 2 -> 3(reply) and 4 -> 5(reply)."""
    nodes = [
        _node(None, "a"),
        _node(0, "b", True),
        _node(1, "c"),
        _node(2, "d", True),
        _node(1, "e"),
        _node(4, "f", True),
    ]
    rollout = from_episode(_episode(nodes), Reading(), Layout(RENDERER).samples)
    assert [_text(sample) for sample in rollout.samples] == [f"b{IM_END}d{IM_END}", f"f{IM_END}"]


class Forgetful:
    """A renderer that drops what was said before the last question, as some drop thoughts."""

    def render_ids(
        self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        last = max(place for place, message in enumerate(messages) if message["role"] == "user")
        return RENDERER.render_ids(messages[last:], add_generation_prompt=add_generation_prompt)

    def get_stop_token_ids(self) -> list[int]:
        return RENDERER.get_stop_token_ids()


def test_a_prompt_that_does_not_extend_begins_another_sample() -> None:
    nodes = [_node(None, "a"), _node(0, "b", True), _node(1, "c"), _node(2, "d", True)]
    rollout = from_episode(_episode(nodes), Reading(), Layout(Forgetful()).samples)
    assert [_text(sample) for sample in rollout.samples] == [f"b{IM_END}", f"d{IM_END}"]


def test_what_cannot_be_laid_out_is_an_error() -> None:
    nodes = [_node(None, "a"), _node(0, "b", True)]
    nodes[0]["message"]["content"] = [{"type": "text", "text": "a"}]
    rollout = from_episode(_episode(nodes), Reading(), Layout(RENDERER).samples)
    assert rollout.error is not None and rollout.error["type"] == "UnusableTrace"
    assert "text messages only" in rollout.error["message"] and rollout.samples == []


def test_a_group_of_a_frozen_model_is_as_young_as_can_be() -> None:
    episode = _episode([_node(None, "abc"), _node(0, "cba", True)])
    rollout = from_episode(episode, Reading(), Layout(RENDERER).samples)
    document = {
        **to_document(rollout),
        "temperature": frozen.TEMPERATURE,
    }
    work = GroupWork("train/0", "train", "reverse-text", 0, 2)
    scored = score_group(work, [document, document], version=7, lost="")
    assert scored["version_start"] == 7 and groups.served_versions(scored) == set()


KEY = "sk-very-secret-1234567890"
BIG = FrozenModelConfig(name="big", base_url="http://h:1", api_key_var="BIG_KEY")


@pytest.mark.parametrize(
    ("held", "message", "status", "error", "words"),
    [
        (f"{KEY}\n", f"Illegal header value b'Bearer {KEY}\\n'", 503, CreditError, "BIG_KEY"),
        ("", f"Illegal header value b'Bearer {KEY}\\n'", 503, CreditError, "BIG_KEY"),
        (KEY, f"on fire with {KEY}", 500, ReferenceLost, "still served"),
        (f" {KEY} ", f"no {KEY}", 502, ReferenceLost, "still served"),
        (KEY, f"bad key {KEY}", 401, CreditError, "BIG_KEY"),
        (KEY, "forbidden", 403, CreditError, "BIG_KEY"),
        (KEY, f"no model for {KEY}", 404, CreditError, "'big' .*/v1/models"),
        (KEY, "timed out", None, ReferenceLost, "timed out"),
    ],
)
def test_what_a_frozen_model_ends_is_reported_without_its_key(
    monkeypatch: pytest.MonkeyPatch,
    held: str,
    message: str,
    status: int | None,
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setenv("BIG_KEY", held)
    said = {"type": "ProviderError", "message": message}
    found = frozen.trouble(BIG, said, status)
    assert type(found) is error and re.search(words, str(found))
    assert KEY not in str(found) + repr(frozen.shown(BIG, said))


async def test_a_frozen_model_plays_few_at_a_time() -> None:
    seats, busy, most = frozen.Seats(), 0, 0

    async def play(model: FrozenModelConfig) -> None:
        nonlocal busy, most
        async with seats.of(model):
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(0)
            busy -= 1

    few = BIG.model_copy(update={"max_concurrent": 3})
    alias = few.model_copy(update={"name": "other"})
    await asyncio.gather(*(play(few) for _ in range(5)), *(play(alias) for _ in range(5)))
    assert most == 3


async def test_a_frozen_model_plays_where_the_fewest_do() -> None:
    model = BIG.model_copy(update={"more_urls": ["http://h:2/v1"]})
    seats = frozen.Seats()
    async with seats.of(model) as first, seats.of(model) as second, seats.of(model) as third:
        assert [first, second, third] == ["http://h:1/v1", "http://h:2/v1", "http://h:1/v1"]
    seats.fail("http://h:1/v1")
    async with seats.of(model) as first, seats.of(model) as second:
        assert first == second == "http://h:2/v1"
    asked = frozen.at(frozen.request(model, SamplingConfig(), {"idx": 0}), second)
    assert asked["client"]["base_url"] == "http://h:2/v1" and asked["model"] == "big"


async def test_each_renderer_has_its_layout(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    layouts = frozen.Layouts()
    ours = renderer_config("ratchet-chatml", {})
    first, again = [await layouts.layout(str(tmp_path), dict(ours)) for _ in range(2)]
    assert first is again
    other = await layouts.layout(str(tmp_path), {"name": "default"})
    assert type(other._renderer) is not type(first._renderer)


def test_the_frozen_endpoint_is_asked_without_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FrozenModelConfig(
        name="big",
        base_url="http://h:1",
        api_key_var="BIG_KEY",
        headers_from_env={"X-Tenant": "TENANT_KEY"},
        timeout_s=60,
    )
    sampling = SamplingConfig(temperature=0.5, max_tokens=9)
    monkeypatch.setenv("BIG_KEY", "sk-secret")
    asked = frozen.request(model, sampling, {"idx": 0})
    assert (asked["client"]["type"], asked["client"]["base_url"]) == ("eval", "http://h:1/v1")
    assert asked["client"]["timeout"] == {"connect": 30, "read": 60}
    assert asked["client"]["headers_from_env"] == {"X-Tenant": "TENANT_KEY"}
    assert asked["model"] == "big"
    assert asked["sampling"] == {"temperature": 0.5, "max_tokens": 9}
    assert "sk-secret" not in repr(asked)


# -- rollouts of a frozen model, by the activity -----------------------------------------------


class Client:
    """An env server's client whose rollouts take `takes_s` and end by an error."""

    def __init__(self, takes_s: float, **error: Any) -> None:
        self._takes_s = takes_s
        self._error = error
        self.busy = self.most = 0

    async def import_episodes(self) -> None:
        pass

    async def episode(self, request: Any) -> Any:
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(self._takes_s)
        self.busy -= 1
        return _episode([], ok=False, errors=[self._error])


async def _play(tmp_path: Path, client: Client, count: int) -> list[Any]:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    source = {**BIG.model_dump(mode="json"), "max_concurrent": 2}
    env = {"id": "reverse-text", "timeout_s": 3.0}
    algo = {"type": "sft", "source": source}
    config = validate({"max_steps": 1, "algo": algo, "train": {"env": [env]}})
    ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"))
    policy = tmp_path / "policy"
    TOKENIZER.save_pretrained(policy)
    ctx.store.put_folder(keys.weights("r", 0), policy, attempt="0")
    rooms = rollout_activities(ctx)
    work = GroupWork("train/0", "train", "reverse-text", 0, count)
    engine = EngineTarget(0, 1, "http://e:1", "policy", 0)
    given = RunRolloutsInput("r", work, engine, "tcp://env:1")

    async def play() -> list[Any]:
        connection: Any = SimpleNamespace(client=client)
        asked = frozen.request(config.algo.source, SamplingConfig(), {"idx": 0})
        playing = [rooms._one(given, connection, asked, index) for index in range(count)]
        return await asyncio.gather(*playing, return_exceptions=True)

    return list(await ActivityEnvironment().run(play))


async def test_rollouts_wait_for_a_seat_before_their_time_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIG_KEY", KEY)
    # The last ones begin after more than the 3 s that each of them may take.
    client = Client(0.2, type="HarnessError", message=f"exited: {KEY}")
    documents = await _play(tmp_path, client, 40)
    assert client.most == 2
    assert [document["error"]["type"] for document in documents] == ["HarnessError"] * 40
    assert KEY not in str(documents)


@pytest.mark.parametrize(("status", "words"), [(401, "BIG_KEY"), (404, "'big'")])
async def test_a_refusal_of_a_frozen_model_is_the_users(
    tmp_path: Path, status: int, words: str
) -> None:
    client = Client(0.0, type="ProviderError", message="no", status_code=status)
    (error,) = await _play(tmp_path, client, 1)
    assert isinstance(error, ApplicationError) and words in str(error)
    assert error.type == names.BAD_INPUT and error.non_retryable
