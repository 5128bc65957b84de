"""What single processes of a run wrote: read where it is, and else refused with its place."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.contracts.logs import env_log, orchestrator_log
from ratchet.api.client.client import Ratchet
from tests.unit.api.client.support import serving
from tests.unit.api.client.test_cli import ratchet
from tests.unit.api.conftest import Served
from tests.unit.api.routes.test_create import problem

pytestmark = pytest.mark.asyncio(loop_scope="session")

LINE = "2026-01-02T03:04:05.678Z INFO"


def write(served: Served, path: str, text: str) -> Path:
    file = served.settings.home / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


async def page(served: Served, run_id: str, **asked: Any) -> Any:
    answer = await served.http.get(f"/v1/runs/{run_id}/logs", params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_each_source_is_the_log_of_its_process(served: Served) -> None:
    """Sections that share a server share a log; else `env:NAME` is the training one."""
    train = {"batch_size": 16, "group_size": 4, "env": [{"id": "a"}, {"id": "b"}]}
    evals = {"env": [{"id": "a"}, {"id": "b", "args": {"n": 1}}, {"id": "c", "workers": 2}]}
    permits = {"max_inflight_rollouts": 600}
    run_id = (await served.start("logged", train=train, eval=evals, dispatch=permits))["id"]
    wrote = {
        "env:a": env_log(run_id, "train", "a"),
        "env:a:3": env_log(run_id, "train", "a:3"),
        "env:b": env_log(run_id, "train", "b"),
        "env:eval/b": env_log(run_id, "eval", "b"),
        "env:c": env_log(run_id, "eval", "c"),
        "env:c:2": env_log(run_id, "eval", "c:2"),
        "orchestrator": orchestrator_log(run_id),
    }
    for source, path in wrote.items():
        write(served, path, f"{LINE} ratchet.x: by {source}\n")
    same = {"env:eval/a": "env:a", "env:train/a": "env:a", "env:train/b": "env:b"}
    for source, whose in {**{name: name for name in wrote}, **same}.items():
        found = await page(served, run_id, source=source)
        assert [line["message"] for line in found["data"]] == [f"by {whose}"], source
        assert found["data"][0]["source"] == "ratchet.x" and found["next_after"]
    own = await page(served, run_id)
    assert own["data"] and own["data"][0]["source"] == "run", "without a source as ever"
    text = await served.http.get(
        f"/v1/runs/{run_id}/logs?source=env:c", headers={"accept": "text/plain"}
    )
    assert text.text == "2026-01-02T03:04:05.678Z info    ratchet.x: by env:c\n"


async def test_what_is_not_there_says_who_has_it(served: Served) -> None:
    there = {"id": "far", "address": "tcp://127.0.0.1:5000"}
    train = {"batch_size": 16, "group_size": 4, "env": [{"id": "a"}, there]}
    run_id = (await served.start("unlogged", train=train))["id"]
    path = f"/v1/runs/{run_id}/logs?source="
    body = problem(await served.http.get(f"{path}env:a"), 404, "no-such-log")
    assert "worker of role env" in body["detail"]
    assert f"RATCHET_HOME/logs/{run_id}/envs/train/a.log" in body["detail"]
    body = problem(await served.http.get(f"{path}orchestrator"), 404, "no-such-log")
    polls = served.env.client.identity
    assert "worker of role orchestrator" in body["detail"] and polls in body["detail"]
    body = problem(await served.http.get(f"{path}env:far"), 404, "no-such-log")
    assert "someone else runs the env server at tcp://127.0.0.1:5000" in body["detail"]
    for wrong in ("env:nope", "env:train/reverse-text", "env:../a", "engine:0", "env:"):
        body = problem(await served.http.get(f"{path}{wrong}"), 422, "invalid-request")
        assert "its sources: orchestrator, env:a, env:far" in body["detail"]
    write(served, orchestrator_log(run_id), "x\n")
    problem(await served.http.get(f"{path}orchestrator&after=x"), 404, "unknown-cursor")


async def test_the_command_shows_and_follows_a_log(served: Served) -> None:
    run_id = (await served.start("followed"))["id"]
    log = write(served, env_log(run_id, "train", "reverse-text"), f"{LINE} my_env: first\n")
    async with serving(served) as address:
        shown = await ratchet(address, "runs", "logs", run_id, "--env", "reverse-text")
        assert shown.status == 0 and "my_env: first" in shown.out
        both = await ratchet(address, "runs", "logs", run_id, "--env", "a", "--source", "b")
        assert both.status == 2 and "both choose a log" in both.err
        missing = await ratchet(address, "runs", "logs", run_id, "--source", "orchestrator")
        assert missing.status == 1 and "worker of role orchestrator" in missing.err

        def follow() -> list[str]:
            with Ratchet(address) as client:
                lines = client.runs.follow_logs(run_id, source="env:reverse-text", every_s=0.05)
                found = [next(lines).message]
                with log.open("a") as file:
                    file.write(f"{LINE} my_env: second\n")
                found.append(next(lines).message)
                client.runs.stop(run_id)
                return found + [line.message for line in lines]

        assert await asyncio.to_thread(follow) == ["first", "second"]
        result = await ratchet(address, "runs", "logs", run_id, "--follow", "--source", "events")
        assert result.status == 0 and "stop was requested" in result.out
        away = await ratchet(address, "runs", "logs", run_id, "--follow")
        assert away.status == 1 and "worker of role orchestrator" in away.err
        write(served, orchestrator_log(run_id), f"{LINE} pipeline: step 1/2\n")
        result = await ratchet(address, "runs", "logs", run_id, "--follow")
        assert result.status == 0 and "pipeline: step 1/2" in result.out
