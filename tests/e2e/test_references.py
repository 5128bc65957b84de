"""References against a plain vLLM, beside nothing else: what it scores, and what it plays.

The reference for every log-probability is transformers in float32.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts.checks import CheckInput
from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.rollouts import (
    EngineTarget,
    FinalizeGroupInput,
    GroupWork,
    RunRolloutsInput,
)
from ratchet.activities.envs.host import env_spec
from ratchet.activities.hosting.process import ServerProcess
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.scoring.algorithms.base import CreditError
from ratchet.activities.scoring.check import AlgorithmActivities
from ratchet.activities.scoring.references import ReferenceLost, References
from ratchet.activities.storage import keys
from ratchet.activities.storage.documents import read
from ratchet.configs.load import validate
from ratchet.configs.reference import FrozenModelConfig
from tests.e2e.frozen import frozen_model
from tests.e2e.policies import random_policy
from tests.groups import rollout_activities

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(200),
    pytest.mark.asyncio(loop_scope="module"),
]

RUN = "frozen-e2e"
SEQ_LEN = 256
NAME = "teacher"
KEY_VAR = "TEACHER_KEY"
KEY = "sk-teacher-0123456789"


@dataclass
class Teacher:
    """A served model, and the same model in transformers."""

    url: str
    model: Any
    home: Path

    def table(self, **changes: Any) -> dict[str, Any]:
        """The config section of it."""
        return {"name": NAME, "base_url": self.url, "api_key_var": KEY_VAR, **changes}

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities [T]; the first is 0.0."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids])).logits[0, :-1]
        scores = torch.log_softmax(logits, dim=-1)
        picked = scores.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return [0.0, *picked.tolist()]


@pytest.fixture(scope="module")
async def teacher(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Teacher]:
    home = tmp_path_factory.mktemp("frozen")
    model, tokenizer = random_policy(5, SEQ_LEN, initializer_range=0.2)
    model.save_pretrained(home / "weights")
    tokenizer.save_pretrained(home / "weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VAR, KEY)
        async with frozen_model(home / "weights", NAME, home, seq_len=SEQ_LEN, key=KEY) as url:
            yield Teacher(url, model, home)


def _config(kind: str, **model: Any) -> Any:
    place = "source" if kind == "sft" else "teacher"
    return {
        "max_steps": 1,
        "algo": {"type": kind, place: model},
        "train": {
            "env": [{"id": "reverse-text"}],
            "batch_size": 4,
            "group_size": 4,
            "sampling": {"max_tokens": 16},
        },
        "trainer": {"seq_len": SEQ_LEN},
    }


async def test_scores_agree_with_transformers(teacher: Teacher) -> None:
    import torch

    references = References()
    references.bind()
    reference = references.frozen(FrozenModelConfig.model_validate(teacher.table()))
    generator = torch.Generator().manual_seed(3)
    lengths = [2, 3, 17, 100, 128, 129, SEQ_LEN - 1, SEQ_LEN]
    sequences = [torch.randint(128, (n,), generator=generator).tolist() for n in lengths]
    # Twice, so that the second time the prefix cache holds all of it.
    found = await asyncio.gather(*(reference.logprobs(ids) for ids in sequences * 2))
    worst = max(
        abs(ours - theirs)
        for ids, scores in zip(sequences * 2, found, strict=True)
        for ours, theirs in zip(scores, teacher.logprobs(ids), strict=True)
    )
    print(f"worst of {2 * sum(lengths)} tokens: {worst:.1e}")
    assert worst <= 1e-4
    with pytest.raises(CreditError, match="context of 256 tokens and cannot score 257"):
        await reference.logprobs([1] * (SEQ_LEN + 1))
    with pytest.raises(CreditError, match="must have the policy's tokenizer"):
        await reference.logprobs([1, 128])
    await references.close()


async def test_preflight_tells_what_is_wrong(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    activities = AlgorithmActivities(
        WorkerContext(home=teacher.home, store_url=str(teacher.home / "store"), own_queue="own")
    )

    async def problems(**changes: Any) -> dict[str, str]:
        config = _config("opd", **teacher.table(**changes))
        given = CheckInput(validate(config).model_dump(mode="json"))
        result = await ActivityEnvironment().run(activities.check_algorithms, given)
        return {problem.key: problem.message for problem in result.problems}

    assert await problems() == {}
    wrong_name = await problems(name="techer")
    assert "did you mean 'teacher'?" in wrong_name["algo.teacher.name"]
    wrong_port = await problems(base_url="http://127.0.0.1:9/v1")
    assert "is a server running there?" in wrong_port["algo.teacher.base_url"]
    monkeypatch.setenv(KEY_VAR, "sk-wrong-0123456789")
    wrong_key = (await problems())["algo.teacher.base_url"]
    assert f"{KEY_VAR} of this worker holds a key that it does not accept" in wrong_key
    assert "sk-" not in wrong_key
    monkeypatch.delenv(KEY_VAR)
    assert "is not set" in (await problems())["algo.teacher.api_key_var"]


async def test_it_plays_rollouts_in_the_policys_tokens(teacher: Teacher, tmp_path: Path) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="own")
    config = validate(_config("sft", **teacher.table())).model_dump(mode="json")
    ctx.store.put_json(keys.config(RUN), config)
    ctx.store.put_folder(keys.weights(RUN, 0), teacher.home / "weights", attempt="test")
    spec = await env_spec(ctx, HostInput(RUN, "env", 0, "q", name="reverse-text"), 1)
    process = ServerProcess(spec, home=tmp_path, run=RUN, host="env", epoch=1)
    # No engine of the policy exists: nobody must ask it.
    engine = EngineTarget(0, 1, "http://127.0.0.1:9", "policy", version=3)
    work = GroupWork("train/0", "train", "reverse-text", 0, 4)
    rooms, run = rollout_activities(ctx), ActivityEnvironment().run
    try:
        await process.start()
        while not await spec.probe():
            assert not process.exited.is_set(), process.log_tail()
            await asyncio.sleep(0.2)
        given = RunRolloutsInput(RUN, work, engine, spec.address)
        result = await run(rooms.run_rollouts, given)
        assert (result.ok, result.errored) == (4, 0)
        gone = _config("sft", **teacher.table(base_url="http://127.0.0.1:9"))
        ctx.store.put_json(keys.config("gone"), validate(gone).model_dump(mode="json"))
        ctx.store.put_folder(keys.weights("gone", 0), teacher.home / "weights", attempt="test")
        with pytest.raises(ReferenceLost, match=r"'teacher' at \S+:9 ended a rollout"):
            await run(rooms.run_rollouts, RunRolloutsInput("gone", work, engine, spec.address))
    finally:
        await process.stop()
    documents = [
        read(ctx.store, ctx.store.require(keys.rollout(RUN, work.group, index)))
        for index in range(work.size)
    ]
    for document in documents:
        assert (document["version"], document["labels"], document["temperature"]) == (-1, [], 1.0)
        (sample,) = document["samples"]
        assert set(sample["versions"]) == {-1} and set(sample["logprobs"]) == {0.0}
        assert any(sample["loss_mask"])
    group = await run(rooms.finalize_group, FinalizeGroupInput(RUN, work, 3, engine=engine))
    assert (group.survivors, group.version_start, group.labels) == (4, 3, [])
    # The same rollouts, had they been the policy's, scored by a teacher.
    scored_by = validate(_config("opd", **teacher.table())).model_dump(mode="json")
    ctx.store.put_json(keys.config("scored"), scored_by)
    ctx.store.put_folder(keys.weights("scored", 0), teacher.home / "weights", attempt="test")
    for index, document in enumerate(documents):
        ctx.store.put_json(keys.rollout("scored", work.group, index), document, attempt="test")
    group = await run(rooms.finalize_group, FinalizeGroupInput("scored", work, 3, engine=engine))
    assert group.ref is not None
    for member in read(ctx.store, group.ref)["rollouts"]:
        (sample,) = member["samples"]
        scores = teacher.logprobs(sample["token_ids"])
        expected = [s if on else 0.0 for s, on in zip(scores, sample["loss_mask"], strict=True)]
        assert sample["ref_logprobs"] == pytest.approx(expected, abs=1e-4)
