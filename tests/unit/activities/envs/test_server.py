"""A real env server: starts, answers, notices what it cannot serve, and can be killed."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.envs import load_times, loading
from ratchet.activities.envs.host import env_spec
from ratchet.activities.envs.probe import probe
from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.rollouts.connections import EnvConnections
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.configs.run import RunConfig


async def _spec(tmp_path: Path, env: dict[str, object]) -> ServerSpec:
    config = RunConfig.model_validate({"max_steps": 1, "train": {"env": [env]}})
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"))
    name = config.train.env[0].name
    return await env_spec(ctx, HostInput("r", "env", 0, "q", name=name), 1)


def _start(spec: ServerSpec) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        spec.argv,
        cwd=spec.cwd,
        env={**os.environ, **spec.env},
        start_new_session=True,
        stderr=subprocess.PIPE,
    )


async def test_start_answer_kill(tmp_path: Path) -> None:
    spec = await _spec(tmp_path, {"id": "reverse-retry"})
    assert await probe(spec.address, 1.0) == "refused"
    process = _start(spec)
    try:
        async with asyncio.timeout(60):
            while not await spec.probe():
                assert process.poll() is None
                await asyncio.sleep(0.2)
        async with EnvConnections().use(spec.address) as connection:
            assert await connection.client.health(timeout=30)
            os.kill(process.pid, signal.SIGSTOP)
            assert await probe(spec.address, 0.5) == "silent"
            os.kill(process.pid, signal.SIGCONT)
            assert await probe(spec.address, 30) == "up"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            await asyncio.wait_for(connection.lost.wait(), 60)
            assert "nothing listens there" in connection.reason
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def test_unknown_taskset_ends_with_a_reason(tmp_path: Path) -> None:
    spec = await _spec(tmp_path, {"id": "no-such-env"})
    process = _start(spec)
    _, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 2
    assert "env server: 'no-such-env' does not load" in err.decode()


async def test_args_are_on_no_command_line(tmp_path: Path) -> None:
    args = {"words": ["no one else's business"]}
    spec = await _spec(tmp_path, {"id": "reverse-text", "args": args})
    assert "business" not in " ".join(spec.argv)
    file = Path(spec.argv[-1])
    assert "business" in file.read_text() and file.stat().st_mode & 0o777 == 0o600


def test_variables_stand_for_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_JUDGE_KEY", "sk-hunter2")
    secrets: list[str] = []
    args = {"a": [{"key": {"env_var": "RATCHET_JUDGE_KEY"}}], "env_var": "X", "n": 3}
    known = loading.with_variables(args, secrets)
    assert known == {"a": [{"key": "sk-hunter2"}], "env_var": "X", "n": 3}
    assert loading.without(secrets, "wrong key 'sk-hunter2'!") == "wrong key '(not shown)'!"
    monkeypatch.delenv("RATCHET_JUDGE_KEY")
    with pytest.raises(ValueError, match="RATCHET_JUDGE_KEY, which is not set on this worker"):
        loading.with_variables(args, [])


async def test_a_variable_reaches_the_environment_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`min_len` is no number: verifiers says what it was given."""
    monkeypatch.setenv("RATCHET_JUDGE_KEY", "sk-hunter2")
    args = {"min_len": {"env_var": "RATCHET_JUDGE_KEY"}}
    process = _start(await _spec(tmp_path, {"id": "reverse-text", "args": args}))
    _, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 2
    assert "hunter2" not in err.decode() and "(not shown)" in err.decode()


def test_import_path_of_a_server(tmp_path: Path) -> None:
    """Project first, then the user's folder, then what ships; and a home of its own."""
    env = loading.process_env("/srv/envs", tmp_path)
    head = env["PYTHONPATH"].split(os.pathsep)[:2]
    assert head == ["/srv/envs", str(loading.SHIPPED_DIR)]
    assert env["HOME"] == str(tmp_path)


async def test_a_server_may_take_thrice_as_long_as_the_preflight(tmp_path: Path) -> None:
    """What loads fast leaves no record; a measurement counts for the same arguments alone."""
    config = RunConfig.model_validate({"max_steps": 1, "train": {"env": [{"id": "reverse-text"}]}})
    env = config.train.env[0]
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    load_times.note_load(ctx.store, env, 39.0)
    assert not (tmp_path / "store" / "cache").exists()
    load_times.note_load(ctx.store, env, 200.0)
    load_times.note_load(ctx.store, env, 50.0)
    assert (await _spec(tmp_path, {"id": "reverse-text"})).start_timeout_s == 600.0


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({"id": "reverse-text"}, 120.0),
        ({"id": "reverse-text", "start_timeout_s": 30}, 30.0),
        ({"id": "reverse-text", "start_timeout_s": 3600}, 3600.0),
    ],
)
async def test_how_long_a_server_may_take_to_start(
    tmp_path: Path, env: dict[str, object], seconds: float
) -> None:
    assert (await _spec(tmp_path, env)).start_timeout_s == seconds
