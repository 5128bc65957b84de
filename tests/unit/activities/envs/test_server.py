"""A real env server: starts, answers, notices what it cannot serve, and can be killed."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.envs import load_times, loading
from ratchet.activities.envs.host import env_spec
from ratchet.activities.envs.probe import probe
from ratchet.activities.envs.server import set_up_logs
from ratchet.activities.hosting.process import ServerProcess
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
            assert await probe(spec.address, 30) == "up"
            assert spec.lag is not None
            async with asyncio.timeout(60):
                while not spec.lag.exists():
                    await asyncio.sleep(0.1)
            sample = json.loads(spec.lag.read_text())
            assert abs(sample["time"] - time.time()) < 99 and sample["event_loop_lag"]["n"] >= 1
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


CHATTY_ENV = """
import logging
import verifiers.v1 as vf
from ratchet_helpers import help_out

logging.getLogger(__name__).info("mine: sk-hunter2")
logging.getLogger(__name__).debug("too low")
logging.getLogger("somebody.else").info("a library's")
logging.getLogger("somebody.else").warning("a library's warning")
help_out()
print("printed")

class ChattyTaskset(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self):
        raise ValueError("not here")

__all__ = ["ChattyTaskset"]
"""
HELPERS = "import logging\ndef help_out(): logging.getLogger(__name__).info('helping')\n"


async def test_a_server_writes_what_its_environment_logs(tmp_path: Path) -> None:
    """Its own loggers from `log_level` on, libraries' warnings, and what it prints, as it comes."""
    (tmp_path / "chatty_env.py").write_text(CHATTY_ENV)
    (tmp_path / "ratchet_helpers.py").write_text(HELPERS)
    spec = await _spec(tmp_path, {"id": "chatty-env", "path": str(tmp_path)})
    assert spec.log == "logs/r/envs/train/chatty-env.log"
    process = ServerProcess(spec, home=tmp_path, run="r", host="env/0", epoch=1)
    await process.start()
    log = tmp_path / spec.log
    try:
        async with asyncio.timeout(60):
            while "printed" not in log.read_text():
                assert not process.exited.is_set(), log.read_text()
                await asyncio.sleep(0.1)
    finally:
        await process.stop(grace_s=0)
    lines = log.read_text().splitlines()
    assert lines[0] == "--- env-chatty-env-1, epoch 1"
    said = [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", "", line) for line in lines[1:]]
    assert said[:4] == [
        "INFO chatty_env: mine: sk-hunter2",
        "WARNING somebody.else: a library's warning",
        "INFO ratchet_helpers: helping",
        "printed",
    ]


def test_a_line_shows_no_secret_of_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        set_up_logs(["my_env"], "debug", ["sk-hunter2", "p,w0rd"])
        logging.getLogger("my_env.parts").debug("key sk-hunter2!")
        logging.getLogger("my_env").info("asks with OPENAI_API_KEY=abc")
        logging.getLogger("my_env").info("logs in with password=p,w0rd, user=me")
        logging.getLogger("other").info("nothing")
    finally:
        logging.getLogger("my_env").setLevel(logging.NOTSET)
        root.handlers[:] = before
        root.setLevel(level)
    said = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "DEBUG my_env.parts: key (not shown)!",
        "INFO my_env: asks with OPENAI_API_KEY=[hidden]",
        "INFO my_env: logs in with password=[hidden], user=me",
    ]
