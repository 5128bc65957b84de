"""References over HTTP: what is asked, how answers and troubles are read, and who waits for whom.

The server is a stand-in that speaks vLLM's protocol; `tests/e2e` has the real one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ratchet.activities.scoring import references as module
from ratchet.activities.scoring.algorithms.base import CreditError
from ratchet.activities.scoring.check import AlgorithmLibrary
from ratchet.activities.scoring.reference_check import check_references
from ratchet.activities.scoring.references import Endpoint, ReferenceLost, References, VllmReference
from ratchet.configs.algorithm import OpsdConfig
from ratchet.configs.load import validate
from ratchet.configs.reference import FrozenModelConfig

KEY = "sk-very-secret-1234567890"
CONTEXT = 16


class Server:
    """Scores token t at place p as -(t + p / 100); `troubles` are answers to give first."""

    def __init__(self) -> None:
        self.url = ""
        self.troubles: list[tuple[int, str]] = []
        self.vocabulary = 128
        self.context: int | None = CONTEXT
        self.tokenize: Callable[[str], list[int]] | None = None
        self.tokenized: web.Response | None = None
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.tenants: list[str | None] = []
        self.busy = self.busiest = 0
        self.delay_s = 0.0
        self.until_busy = 0
        """Nothing is answered before so many have asked at once."""

    async def models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        card = {"id": "big", "max_model_len": self.context}
        return web.json_response({"data": [card, {"id": "small", "max_model_len": 4096}, None]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.tenants.append(request.headers.get("X-Tenant"))
        self.busy += 1
        self.busiest = max(self.busy, self.busiest)
        await asyncio.sleep(self.delay_s)
        while self.busiest < self.until_busy:
            await asyncio.sleep(0.01)
        self.busy -= 1
        if self.troubles:
            status, text = self.troubles.pop(0)
            return web.Response(status=status, text=text)
        ids = body["prompt"]
        if self.context and len(ids) >= self.context and body["model"] == "big":
            return web.Response(status=400, text="max_tokens must be at least 1, got 0.")
        if max(ids) >= self.vocabulary:
            return web.Response(status=400, text="Token id is out of vocabulary")
        entries = [None, *({str(t): {"logprob": -(t + p / 100)}} for p, t in enumerate(ids))]
        choice: dict[str, Any] = {"prompt_logprobs": [None, *entries[2:]]}
        for token in body.get("logprob_token_ids", []):
            value = -(token + len(ids) / 100)
            choice["logprobs"] = {"top_logprobs": [{f"token_id:{token}": value}]}
        return web.json_response({"choices": [choice]})

    def asked_for(self, ids: list[int]) -> int:
        """How often a sequence was to be scored."""
        return sum(body["prompt"] == ids for body in self.asked)

    async def split(self, request: web.Request) -> web.Response:
        if self.tokenize is None:
            return self.tokenized or web.Response(status=404)
        body = await request.json()
        return web.json_response({"tokens": self.tokenize(body["prompt"])})


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_get("/v1/models", made.models)
    app.router.add_post("/v1/completions", made.complete)
    app.router.add_post("/tokenize", made.split)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as made:
        yield made


@pytest.fixture
async def second() -> AsyncIterator[Server]:
    async with serving() as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)
    monkeypatch.setattr(module, "BUSY_S", 0.01)


def _reference(server: Server, **changes: Any) -> VllmReference:
    references = References()
    references.bind()
    table = {"name": "big", "base_url": server.url, "max_retries": 2, **changes}
    return references.frozen(FrozenModelConfig.model_validate(table))


def _scores(ids: list[int]) -> list[float]:
    return [0.0, *(-(t + p / 100) for p, t in enumerate(ids) if p)]


@pytest.mark.parametrize("length", [2, 3, CONTEXT - 1, CONTEXT])
async def test_every_token_is_scored_up_to_a_full_context(server: Server, length: int) -> None:
    ids = [7 * n % 128 for n in range(length)]
    assert await _reference(server).logprobs(ids) == pytest.approx(_scores(ids))


@pytest.mark.parametrize("ids", [[], [5]])
async def test_nothing_to_score_asks_nobody(server: Server, ids: list[int]) -> None:
    assert await _reference(server).logprobs(ids) == [0.0] * len(ids)
    assert server.asked == []


async def test_too_long_says_what_to_do(server: Server) -> None:
    with pytest.raises(CreditError, match=r"16 tokens and cannot score 17; .*--max-model-len"):
        await _reference(server).logprobs([1] * (CONTEXT + 1))


@pytest.mark.parametrize("before", [None, CONTEXT])
async def test_a_context_is_requested_again_when_it_is_too_short(
    server: Server, before: int | None
) -> None:
    reference = _reference(server)
    server.context = before
    assert await reference.logprobs([1, 2]) == pytest.approx(_scores([1, 2]))
    server.context = 2 * CONTEXT
    ids = [3] * (2 * CONTEXT)
    assert await reference.logprobs(ids) == pytest.approx(_scores(ids))
    asked = len(server.keys)
    await reference.logprobs(ids)
    assert len(server.keys) == asked, "a context that is known is not asked for"


async def test_a_slow_engine_is_waited_for_and_a_slow_reference_is_not(
    server: Server,
) -> None:
    references = References()
    references.bind()
    server.delay_s, tries = 1.0, 4
    with pytest.raises(ReferenceLost, match="ReadTimeout"):
        await _reference(server, timeout_s=0.05, max_retries=3).logprobs([1, 2])
    assert len(server.asked) == tries
    engine = Endpoint(server.url, "small", live=True, timeout_s=0.05)
    asking = asyncio.create_task(VllmReference(references, engine).logprobs([1, 2]))
    while len(server.asked) < 3 * tries:
        await asyncio.sleep(0.01)
    assert not asking.done(), "an engine that is paused is not lost"
    server.delay_s, server.troubles = 0.0, [(503, "too much to do")] * 2 * tries
    assert await asking == pytest.approx(_scores([1, 2]))
    assert server.troubles == []


async def test_a_cancelled_caller_sends_no_more_requests(server: Server) -> None:
    references = References()
    references.bind()
    server.troubles = [(503, "paused")] * 10_000
    asking = asyncio.create_task(references.live(server.url, "small").logprobs([1, 2]))
    while len(server.asked) < 5:
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    asked = server.asked_for([1, 2])
    # Whoever asks at the same pace has asked often meanwhile.
    other = asyncio.create_task(references.live(server.url, "small").logprobs([3, 4]))
    while server.asked_for([3, 4]) < 5:
        await asyncio.sleep(0.01)
    assert server.asked_for([1, 2]) == asked
    other.cancel()


async def test_trouble_is_retried_and_then_reported(server: Server) -> None:
    reference = _reference(server)
    server.troubles = [(503, "warming up"), (429, "slow down")]
    assert await reference.logprobs([1, 2]) == pytest.approx(_scores([1, 2]))
    server.troubles = [(500, "on fire")] * 3
    with pytest.raises(ReferenceLost, match="HTTP 500: on fire") as caught:
        await reference.logprobs([1, 2])
    assert not caught.value.live


async def test_nobody_there_is_retryable(server: Server) -> None:
    reference = _reference(server, base_url="http://127.0.0.1:9")
    with pytest.raises(ReferenceLost, match=r"'big' at http://127\.0\.0\.1:9 .*ConnectError"):
        await reference.logprobs([1, 2])


@pytest.mark.parametrize(
    ("status", "words"),
    [(400, "refuses to score"), (404, "/v1/models"), (401, "RATCHET_REFERENCE_KEY")],
)
async def test_refusals_are_the_users(server: Server, status: int, words: str) -> None:
    server.troubles = [(status, "because")]
    with pytest.raises(CreditError, match=words):
        await _reference(server).logprobs([1, 2])
    assert len(server.asked) == 1, "a refusal is not asked for twice"


async def test_an_answer_without_scores_is_refused(server: Server) -> None:
    server.troubles = [(200, '{"choices": [{"prompt_logprobs": null}]}')]
    with pytest.raises(CreditError, match="does not score every token"):
        await _reference(server).logprobs([1, 2])


async def test_a_replaced_engine_is_lost(server: Server) -> None:
    references = References()
    references.bind()
    server.troubles = [(404, "The model `policy-e1` does not exist")]
    with pytest.raises(ReferenceLost) as caught:
        await references.live(server.url, "policy-e1").logprobs([1, 2])
    assert caught.value.live


async def test_the_key_is_sent_and_never_said(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BIG_MODEL_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    reference = _reference(server, api_key_var="BIG_MODEL_KEY")
    server.troubles = [(401, "no")]
    with pytest.raises(CreditError, match="BIG_MODEL_KEY of this worker holds a key") as caught:
        await reference.logprobs([1, 2])
    assert server.keys == [f"Bearer {KEY}"]
    assert KEY not in str(caught.value) + repr(reference) + repr(reference.endpoint) + caplog.text


@pytest.mark.parametrize("held", [f"{KEY}\n", f"\t{KEY} "])
async def test_white_space_around_a_key_is_left_out(
    server: Server, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setenv("RATCHET_REFERENCE_KEY", held)
    assert await _reference(server).logprobs([1, 2]) == pytest.approx(_scores([1, 2]))
    assert server.keys == [f"Bearer {KEY}"]


@pytest.mark.parametrize("held", [f"{KEY}\nX-Evil: 1", f"{KEY}\u00e9", f"{KEY}\x7f"])
async def test_what_cannot_be_a_key_is_refused_unseen(
    server: Server, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setenv("RATCHET_REFERENCE_KEY", held)
    with pytest.raises(CreditError, match="variable RATCHET_REFERENCE_KEY") as caught:
        await _reference(server).logprobs([1, 2])
    (problem,) = await check_references(_config("opd", name="big", base_url=server.url))
    assert problem.key == "algo.teacher.api_key_var"
    assert KEY not in str(caught.value) + problem.message and server.keys == []


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_a_key_that_a_server_repeats_is_masked(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("RATCHET_REFERENCE_KEY", f"{KEY}\n")
    # The cut of a long answer must not leave half a key.
    server.troubles = [(status, "x" * 290 + f" Bearer {KEY}")] * 3
    with pytest.raises((CreditError, ReferenceLost)) as caught:
        await _reference(server).logprobs([1, 2])
    assert "xxx Bearer" in str(caught.value) and "sk-" not in str(caught.value)


async def test_errors_about_a_request_do_not_repeat_it() -> None:
    references = References()
    references.bind()
    with pytest.raises(ReferenceLost, match=r"\(UnsupportedProtocol\)"):
        await references.ask(Endpoint("gopher://h", "big"), "GET", "/v1/models")


async def test_requests_are_bounded_over_all_loops(server: Server) -> None:
    server.delay_s, server.until_busy = 0.02, 3
    reference = _reference(server, max_concurrent=3)

    async def many() -> list[list[float]]:
        return await asyncio.gather(*(reference.logprobs([n, n + 1]) for n in range(8)))

    def elsewhere() -> list[list[float]]:
        return asyncio.run(many())

    found = await asyncio.gather(asyncio.to_thread(elsewhere), many())
    for scores in found:
        assert scores == [pytest.approx(_scores([n, n + 1])) for n in range(8)]
    assert server.busiest == 3


async def test_requests_go_to_the_url_with_the_fewest(server: Server, second: Server) -> None:
    """All of them together are bounded once."""
    server.delay_s = second.delay_s = 0.05
    reference = _reference(server, more_urls=[second.url], max_concurrent=4)
    found = await asyncio.gather(*(reference.logprobs([n, n + 1]) for n in range(8)))
    assert found == [pytest.approx(_scores([n, n + 1])) for n in range(8)]
    assert (server.busiest, second.busiest) == (2, 2)
    assert len(server.asked) + len(second.asked) == 8


async def test_a_url_that_failed_is_left_for_another(server: Server, second: Server) -> None:
    """For a while; if all have failed, each is asked again."""
    reference = _reference(server, more_urls=[second.url], max_retries=1)
    server.troubles = [(503, "going down")]
    for n in range(3):
        assert await reference.logprobs([n, n + 1]) == pytest.approx(_scores([n, n + 1]))
    assert (len(server.asked), len(second.asked)) == (1, 3)
    second.troubles = [(500, "on fire")]
    assert await reference.logprobs([7, 8]) == pytest.approx(_scores([7, 8]))
    assert (len(server.asked), len(second.asked)) == (2, 4)
    server.troubles = second.troubles = [(500, "on fire")] * 9
    with pytest.raises(ReferenceLost, match=rf"{server.url}, {second.url} .*on fire, from http"):
        await reference.logprobs([8, 9])


async def test_headers_come_from_the_environment_and_are_never_said(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENANT_KEY", KEY)
    headers = {"X-Tenant": "TENANT_KEY", "X-Other": "UNSET_KEY"}
    reference = _reference(server, headers_from_env=headers, max_retries=0)
    server.troubles = [(500, f"no tenant {KEY}")]
    with pytest.raises(ReferenceLost, match="no tenant") as caught:
        await reference.logprobs([1, 2])
    assert server.tenants == [KEY], "tried once"
    assert KEY not in str(caught.value) + repr(reference.endpoint)
    config = _config("opd", name="big", base_url=server.url, headers_from_env=headers)
    (problem,) = await check_references(config)
    assert problem.key == "algo.teacher.headers_from_env.X-Other"
    assert "UNSET_KEY is not set; set it on rollout workers" in problem.message


async def test_every_url_is_checked(server: Server, second: Server) -> None:
    gone = "http://127.0.0.1:9"
    config = _config("sft", name="big", base_url=server.url, more_urls=[second.url, gone])
    (problem,) = await check_references(config)
    assert problem.key == "algo.source.more_urls.1" and gone in problem.message
    assert server.keys == second.keys == [None]


# -- what an algorithm is given ---------------------------------------------------------------


def _config(kind: str, **model: Any) -> Any:
    place = "source" if kind == "sft" else "teacher"
    algo = {"type": kind, place: model or "policy"}
    env = {"id": "reverse-text", "sampling": {"max_tokens": 4}}
    trainer = {"seq_len": CONTEXT, "micro_batch_tokens": CONTEXT}
    return validate({"max_steps": 1, "algo": algo, "train": {"env": [env]}, "trainer": trainer})


async def test_the_policy_is_asked_at_the_engine_of_each_call() -> None:
    from ratchet.activities.contracts.rollouts import EngineTarget

    config = _config("opsd")

    class Context:
        def config(self, run_id: str) -> Any:
            return config

    library = AlgorithmLibrary(Context(), lambda run_id: lambda messages, tools: [])  # type: ignore[arg-type]
    library.references.bind()
    engines = [EngineTarget(0, n, f"http://h:{n}/", f"policy-e{n}", 0) for n in (1, 2)]
    found = [library.algorithm("run", "reverse-text", engine) for engine in engines]
    asked = [algorithm._reference.endpoint for algorithm in found]  # type: ignore[attr-defined]
    assert [(end.root, end.model, end.live) for end in asked] == [
        ("http://h:1", "policy-e1", True),
        ("http://h:2", "policy-e2", True),
    ]
    nobody = library.algorithm("run", "reverse-text", None)
    with pytest.raises(ReferenceLost):
        await nobody._reference.logprobs([1, 2])  # type: ignore[attr-defined]


# -- preflight --------------------------------------------------------------------------------


def _policy_ids(text: str) -> list[int]:
    from ratchet.activities.training.tokenizer import build_tokenizer

    return list(build_tokenizer(64).encode(text, add_special_tokens=False))


async def test_a_good_teacher_passes(server: Server) -> None:
    server.tokenize = _policy_ids
    config = _config("opd", name="big", base_url=server.url)
    assert await check_references(config) == []
    assert server.asked[-1]["prompt"][-1] == 127, "the policy's highest token id is scored"


async def test_an_endpoint_without_tokenize_passes(server: Server) -> None:
    assert await check_references(_config("opd", name="big", base_url=server.url)) == []


@pytest.mark.parametrize("said", ["<html>no</html>", "[]", "{}", '{"tokens": "no"}'])
async def test_any_answer_to_tokenize_is_no_proof(server: Server, said: str) -> None:
    server.tokenized = web.Response(text=said)
    assert await check_references(_config("opd", name="big", base_url=server.url)) == []


@pytest.mark.parametrize(
    ("kind", "model", "key", "words"),
    [
        ("opd", {"name": "bgi"}, "algo.teacher.name", "did you mean 'big'?"),
        ("sft", {"name": "x"}, "algo.source.name", "it serves 'big', 'small'"),
        ("sft", {"base_url": "http://127.0.0.1:9"}, "algo.source.base_url", "is a server running"),
        ("opd", {"api_key_var": "UNSET_KEY"}, "algo.teacher.api_key_var", "UNSET_KEY is not set"),
    ],
)
async def test_problems_name_key_and_remedy(
    server: Server, kind: str, model: dict[str, str], key: str, words: str
) -> None:
    table = {"name": "big", "base_url": server.url, **model}
    (problem,) = await check_references(_config(kind, **table))
    assert (problem.key, problem.pointer) == (key, "/" + key.replace(".", "/"))
    assert words in problem.message


async def test_another_vocabulary_is_found_out(server: Server) -> None:
    config = _config("opd", name="big", base_url=server.url)
    server.tokenize = lambda text: [ord(character) for character in text]
    (problem,) = await check_references(config)
    assert problem.key == "algo.teacher.name" and "tokenizer is not the policy's" in problem.message
    server.tokenize, server.vocabulary = _policy_ids, 127
    (problem,) = await check_references(config)
    assert "highest token id, 127" in problem.message and "out of vocabulary" in problem.message
    assert await check_references(_config("sft", name="big", base_url=server.url)) == [], (
        "a model that only plays may have any vocabulary"
    )


async def test_a_short_context_is_found_out(server: Server) -> None:
    config = _config("opd", name="big", base_url=server.url)
    longer = config.trainer.model_copy(update={"seq_len": CONTEXT + 1})
    (problem,) = await check_references(config.model_copy(update={"trainer": longer}))
    assert "context of 16 tokens" in problem.message and "--max-model-len" in problem.message


async def test_a_frozen_teacher_needs_room_for_demonstrations(server: Server) -> None:
    config = _config("opsd", name="big", base_url=server.url)
    assert isinstance(config.algo, OpsdConfig)
    short = config.trainer.model_copy(update={"seq_len": CONTEXT - 4})
    for shown, room in ((4, True), (5, False)):
        algo = config.algo.model_copy(update={"demo_tokens": shown})
        found = await check_references(config.model_copy(update={"trainer": short, "algo": algo}))
        assert [problem.key for problem in found] == ([] if room else ["algo.teacher.name"])
        assert room or "17 (trainer.seq_len and 5 of demo_tokens)" in found[0].message
