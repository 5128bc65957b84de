"""Keys, scopes, limits, foreign pages, foreign code: who may ask what."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from temporalio.envconfig import ClientConnectConfig

from ratchet.activities.contracts.names import Queues
from ratchet.activities.storage.store import ArtifactStore, StoreUnavailable
from ratchet.api.__main__ import settings_for
from ratchet.api.app import create_app
from ratchet.api.http.allowlist import own_flags, refused
from ratchet.api.http.security import is_loopback
from ratchet.api.schemas import keys as api_keys
from ratchet.api.services import core
from ratchet.api.settings import Settings
from ratchet.api.temporal.client import Temporal
from ratchet.configs.load import load, validate
from ratchet.configs.run import RunConfig
from tests import ROOT
from tests.unit.api.conftest import Served, asgi, config, connection
from tests.unit.api.routes.test_create import problem

AWAY = ClientConnectConfig(target_host="127.0.0.1:1")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def settings(home: Path, **env: str) -> Settings:
    read = Settings.from_env({"RATCHET_HOME": str(home), **env})
    return replace(read, queues=Queues(), min_free_bytes=1)


def test_keys_open_what_their_scopes_say_and_nothing_else_does(home: Path) -> None:
    writer = api_keys.add(home / "api_keys.json", "ci", ["read", "write"], 6000)
    reader = api_keys.add(home / "api_keys.json", "eyes", ["read"], 6000)
    kept = (home / "api_keys.json").read_text()
    assert writer not in kept and reader not in kept
    assert (home / "api_keys.json").stat().st_mode & 0o077 == 0
    app = TestClient(create_app(settings(home, RATCHET_CUSTOM_CODE="guess"), AWAY))
    body = config()
    for headers in ({}, bearer("rk_wrong"), bearer(""), {"authorization": f"Basic {writer}"}):
        for path in ("/v1/runs", "/v1/nothing", "/metrics"):
            answer = app.get(path, headers=headers)
            problem(answer, 401, "no-key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "rk_wrong" not in answer.text
            assert ("is not valid" in answer.text) is bool(headers)
    for path in ("/healthz", "/docs", "/openapi.json"):
        assert app.get(path).status_code == 200
    dry = "/v1/runs?dry_run=true"
    assert app.post(dry, json=body, headers=bearer(writer)).status_code == 200
    problem(app.post(dry, json=body, headers=bearer(reader)), 403, "scope-missing")
    # Past the door: what is missing is Temporal.
    assert app.get("/v1/runs", headers=bearer(reader)).status_code == 503
    assert app.get("/healthz").headers["x-content-type-options"] == "nosniff"


def test_a_key_that_asks_too_often_waits(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("ratchet.api.http.security.time", SimpleNamespace(monotonic=lambda: now[0]))
    slow = api_keys.add(home / "api_keys.json", "slow", ["read"], 20)
    other = api_keys.add(home / "api_keys.json", "other", ["read"], 20)
    app = TestClient(create_app(settings(home), AWAY))
    statuses = [app.get("/v1/nope", headers=bearer(slow)).status_code for _ in range(4)]
    assert statuses == [404, 404, 429, 429]
    answer = app.get("/v1/nope", headers=bearer(slow))
    problem(answer, 429, "too-many-requests")
    assert int(answer.headers["retry-after"]) == 3
    now[0] += 3
    assert app.get("/v1/nope", headers=bearer(slow)).status_code == 404
    assert app.get("/v1/nope", headers=bearer(slow)).status_code == 429
    assert app.get("/v1/nope", headers=bearer(other)).status_code == 404
    # However long nothing was asked, a tenth of a minute's worth may be asked at once.
    now[0] += 86400
    statuses = [app.get("/v1/nope", headers=bearer(slow)).status_code for _ in range(4)]
    assert statuses == [404, 404, 429, 429]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"keys": [{"name": "a", "sha256": "hunter2"}]}',
        '{"keys": [{"name": "a", "sha256": "' + "0" * 64 + '", "scopes": ["all"]}]}',
        json.dumps({"keys": [{"name": "a", "sha256": "0" * 64}] * 2}),
    ],
)
def test_key_files_that_are_none_stop_the_start_and_are_not_shown(home: Path, text: str) -> None:
    with pytest.raises(ValueError, match="RATCHET_API_KEYS") as caught:
        settings(home, RATCHET_API_KEYS=text)
    assert "hunter2" not in str(caught.value)


def test_the_command_makes_a_key_once(home: Path) -> None:
    command = [sys.executable, "-m", "ratchet.api.client", "keys", "new", "ana", "--read-only"]
    env = {"RATCHET_HOME": str(home), "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    (key,) = api_keys.load_keys(None, home / "api_keys.json")
    assert key.scopes == ("read",) and api_keys.key_for([key], done.stdout.strip()) == key
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "ana" in done.stderr


def test_a_public_address_needs_keys(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(home))
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(ValueError, match="without API keys"):
            settings_for(host)
    for host in ("127.0.0.1", "localhost", "::1"):
        assert host in settings_for(host).hosts
    api_keys.add(home / "api_keys.json", "ci", ["read"], 60)
    assert settings_for("0.0.0.0").hosts == ()
    assert is_loopback("127.8.8.8") and not is_loopback("localhost.example.org")


def test_pages_of_other_sites_change_nothing(home: Path) -> None:
    app = TestClient(create_app(settings(home), AWAY), base_url="http://localhost:8080")
    for origin in (
        "http://evil.example",
        "http://localhost:9090",
        "http://localhost:808",
        "http://localhost:80801",
        "http://localhost:8080.evil.example",
        "http://localhost:8080@evil.example",
        "null",
    ):
        answer = app.post("/v1/runs/x/stop", headers={"origin": origin})
        problem(answer, 403, "foreign-origin")
    own = app.post("/v1/runs/x/stop", headers={"origin": "http://localhost:8080"})
    assert own.status_code == 503
    # A proxy that sends requests on under another name.
    result = settings(home, RATCHET_PUBLIC_URL="https://Ratchet.example.org:443/")
    behind = TestClient(create_app(result, AWAY), base_url="http://localhost:8080")
    for origin, status in (
        ("https://ratchet.example.org", 503),
        ("http://localhost:8080", 503),
        ("http://ratchet.example.org", 403),
        ("https://ratchet.example.org:444", 403),
        ("https://evil.example", 403),
        ("https://ratchet.example.org.evil.example", 403),
        ("https://ratchet.example.or", 403),
        ("null", 403),
    ):
        answer = behind.post("/v1/runs/x/stop", headers={"origin": origin})
        assert answer.status_code == status, origin
    with pytest.raises(ValueError, match="RATCHET_PUBLIC_URL"):
        settings(home, RATCHET_PUBLIC_URL="ratchet.example.org")
    preflight = app.options("/v1/runs", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in preflight.headers
    for name, bad in (("host", "["), ("host", "a]["), ("origin", "http://[")):
        for method in ("get", "post"):
            answer = getattr(app, method)("/v1/runs", headers={name: bad})
            problem(answer, 400, "bad-header")
    for path in ("/docs", "/dashboard/", "/healthz", "/v1/nothing"):
        answer = app.get(path)
        assert answer.headers["x-frame-options"] == "DENY"
        (policy,) = answer.headers.get_list("content-security-policy")
        assert "frame-ancestors 'none'" in policy
    named = TestClient(create_app(replace(settings(home), hosts=("localhost",)), AWAY))
    for host, status in (("localhost:8080", 200), ("evil.example:8080", 403), ("", 403)):
        assert named.get("/healthz", headers={"host": host}).status_code == status


@pytest.mark.asyncio(loop_scope="session")
async def test_readiness_writes_once_a_second_and_says_nothing_of_the_store(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: list[str] = []

    def write(_: object, key: str, value: object) -> None:
        wrote.append(key)
        raise StoreUnavailable(28, f"{served.settings.store_url} is full")

    # What serves for a second serves here for long, and then not at all.
    assert core.PROBED_S == 1.0
    monkeypatch.setattr(ArtifactStore, "write_live", write)
    monkeypatch.setattr(core, "PROBED_S", 600.0)
    async with asgi(create_app(served.settings, connection(served.env))) as http:
        answers = [await http.get("/readyz") for _ in range(5)]
        for answer in answers:
            problem(answer, 503, "store-unavailable")
            assert "No space left" in answer.text
            assert served.settings.store_url.removeprefix("file://") not in answer.text
        assert len(wrote) == 1
    monkeypatch.setattr(core, "PROBED_S", 0.0)
    async with asgi(create_app(served.settings, connection(served.env))) as http:
        await http.get("/readyz")
        await http.get("/readyz")
        assert len(wrote) == 3


@pytest.mark.asyncio(loop_scope="session")
async def test_readiness_names_no_place_without_a_key_and_asks_temporal_once_a_second(
    home: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = api_keys.add(home / "api_keys.json", "ci", ["read"], 6000)
    calls: list[str] = []
    called = Temporal.call

    async def call(self: Temporal, name: str, request: object) -> object:
        calls.append(name)
        return await called(self, name, request)

    monkeypatch.setattr(Temporal, "call", call)
    monkeypatch.setattr(core, "PROBED_S", 600.0)
    secret = ClientConnectConfig(target_host="127.0.0.1:1", namespace="inner-circle")
    keyed = replace(served.settings, keys=settings(home).keys)
    async with asgi(create_app(keyed, secret)) as http:
        for headers in ({}, bearer("rk_wrong")):
            answer = await http.get("/readyz", headers=headers)
            problem(answer, 503, "temporal-unavailable")
            assert "127.0.0.1:1" not in answer.text and "inner-circle" not in answer.text
        whole = await http.get("/readyz", headers=bearer(key))
        assert "127.0.0.1:1" in whole.text and "inner-circle" in whole.text
    assert calls == ["get_system_info"]
    async with asgi(create_app(served.settings, secret)) as http:
        assert "inner-circle" in (await http.get("/readyz")).text
    calls.clear()
    async with asgi(create_app(served.settings, connection(served.env))) as http:
        for _ in range(5):
            assert (await http.get("/readyz")).status_code == 200
    assert calls.count("get_system_info") == 1


def custom(function: str, path: str | None = None) -> dict[str, object]:
    algo = {"type": "custom", "function": function, "path": path}
    env = [{"id": "reverse-text", "algo": algo}]
    return config(train={"batch_size": 16, "group_size": 4, "env": env})


@pytest.mark.parametrize(
    ("function", "path", "pointers"),
    [
        ("acme.rewards:score", None, []),
        ("acme:score", "/srv/code/mine", []),
        ("acmeevil:score", None, ["/function"]),
        ("os:system", None, ["/function"]),
        ("acme:score", "/srv/code/../secret", ["/path"]),
        ("acme:score", "/srv/codes", ["/path"]),
        ("subprocess:run", "relative", ["/function", "/path"]),
    ],
)
def test_custom_code_comes_from_the_allow_list(
    function: str, path: str | None, pointers: list[str]
) -> None:
    run = validate(custom(function, path))
    found = [error.pointer for error in refused(run, ("acme", "guess", "/srv/code"))]
    assert found == [f"/train/env/0/algo{pointer}" for pointer in pointers]
    assert refused(run, None) == []


def test_with_keys_no_custom_code_is_allowed_unless_it_is_listed(home: Path) -> None:
    assert settings(home).custom_code is None
    assert settings(home, RATCHET_CUSTOM_CODE="").custom_code == ()
    api_keys.add(home / "api_keys.json", "ci", ["read"], 60)
    assert settings(home).custom_code == ()
    assert settings(home, RATCHET_CUSTOM_CODE="a, /b").custom_code == ("a", "/b")
    assert settings(home).endpoint_hosts == () == settings(home).key_vars
    assert settings(home).models == () == settings(home).engine_flags
    listed = settings(home, RATCHET_ENDPOINT_HOSTS="a:1,b", RATCHET_KEY_VARS="X")
    assert (listed.endpoint_hosts, listed.key_vars) == (("a:1", "b"), ("X",))


def run_of(**env: object) -> RunConfig:
    envs = [{"id": "reverse-text", **env}]
    return validate(config(train={"batch_size": 16, "group_size": 4, "env": envs}, eval={}))


def teacher(**given: object) -> dict[str, object]:
    return {"algo": {"type": "opd", "teacher": {"name": "m", **given}}}


HERE = "http://127.0.0.1:9/v1"


def judged(**given: object) -> dict[str, object]:
    whole = {"id": "rubric", "base_url": HERE, "api_key_var": "RATCHET_JUDGE_KEY", **given}
    judge = {key: value for key, value in whole.items() if value is not None}
    return {"args": {"task": {"judges": [judge]}}}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, ""),
        ({"id": "reverse_retry"}, ""),
        ({"id": "my-env"}, ""),
        ({"id": "owner/my-env@1", "name": "e"}, ""),
        ({"id": "acme.envs"}, ""),
        ({"id": "os"}, "id"),
        ({"id": "reverse-text.evil"}, "id"),
        ({"id": "other", "path": "/srv/code"}, "id"),
        ({"address": "tcp://127.0.0.1:5000"}, ""),
        ({"address": "tcp://envs.lan:5000"}, ""),
        ({"address": "tcp://one.lan:7"}, ""),
        ({"address": "tcp://one.lan:8"}, "address"),
        ({"address": "tcp://evil:5000"}, "address"),
        (teacher(base_url=HERE), ""),
        (teacher(base_url="http://ENVS.lan/v1"), ""),
        (teacher(base_url="http://localhost.evil:1"), "algo/teacher/base_url"),
        (teacher(base_url="http://169.254.169.254/"), "algo/teacher/base_url"),
        (teacher(base_url=HERE, api_key_var="RATCHET_TEACHER_KEY"), ""),
        (teacher(base_url=HERE, more_urls=["http://envs.lan/v1"]), ""),
        (
            teacher(base_url=HERE, more_urls=["http://[::1]:9", "http://evil"]),
            "algo/teacher/more_urls/1",
        ),
        (teacher(base_url=HERE, headers_from_env={"X-A": "RATCHET_A_KEY"}), ""),
        (
            teacher(base_url=HERE, headers_from_env={"X-A": "TEMPORAL_API_KEY"}),
            "algo/teacher/headers_from_env/X-A",
        ),
        (teacher(base_url=HERE, api_key_var="VLLM_KEY"), ""),
        (teacher(base_url=HERE, api_key_var="TEMPORAL_API_KEY"), "algo/teacher/api_key_var"),
        (teacher(base_url=HERE, api_key_var="RATCHET_API_KEY"), "algo/teacher/api_key_var"),
        ({"args": {"seed": 3, "task": {"rewards": {"x": {"weight": 0.5}}}}}, ""),
        ({"args": {"task": {"rewards": {"x": {"fn": "acme.score:f"}}}}}, ""),
        ({"args": {"task": {"rewards": {"x": {"fn": "os.system"}}}}}, "args/task/rewards/x/fn"),
        ({"args": {"task": {"stops": {"x": {"fn": "/tmp/a.py:f"}}}}}, "args/task/stops/x/fn"),
        ({"args": {"task": {"stops": {"x": {"fn": "/srv/code/a.py:f"}}}}}, ""),
        ({"args": {"system_prompt": "/etc/passwd"}}, "args/system_prompt"),
        (judged(), ""),
        (judged(path="/srv/code/rubric.toml"), ""),
        (judged(id="my-env", other="x"), ""),
        (judged(base_url="http://evil"), "args/task/judges/0/base_url"),
        (judged(base_url=None), "args/task/judges/0/base_url"),
        (judged(api_key_var="HF_TOKEN"), "args/task/judges/0/api_key_var"),
        (judged(api_key_var=None), "args/task/judges/0/api_key_var"),
        (judged(headers_from_env={"a": "B"}), "args/task/judges/0/headers_from_env/a"),
        (judged(headers={"Authorization": "x"}), "args/task/judges/0/headers/Authorization"),
        (judged(prompt="/etc/passwd"), "args/task/judges/0/prompt"),
        (judged(path="/etc/passwd"), "args/task/judges/0/path"),
        (judged(path="/srv/code/../../etc/passwd"), "args/task/judges/0/path"),
        (judged(file="/etc/passwd"), "args/task/judges/0/file"),
        (judged(id="os"), "args/task/judges/0/id"),
        ({"args": {"judge": {"base_url": HERE, "api_key_var": "RATCHET_JUDGE_KEY"}}}, ""),
        ({"args": {"judge": {"base_url": HERE}}}, "args/judge/api_key_var"),
        ({"args": {"api_key": "sk-1"}}, "args/api_key"),
        ({"args": {"api_key": ""}}, ""),
        ({"args": {"deep": [{"dbPassword": "x"}]}}, "args/deep/0/dbPassword"),
        ({"args": {"hf_token": ["x"]}}, "args/hf_token"),
        ({"args": {"max_tokens": "9", "eos_token": "</s>", "keys": "a", "tokens": 3}}, ""),
        ({"args": {"api_key": {"env_var": "RATCHET_JUDGE_KEY"}}}, ""),
        ({"args": {"api_key": {"env_var": "VLLM_KEY"}}}, ""),
        ({"args": {"api_key": {"env_var": "HF_TOKEN"}}}, "args/api_key/env_var"),
        ({"args": {"x": [{"env_var": "TEMPORAL_API_KEY"}]}}, "args/x/0/env_var"),
        ({"args": {"task": {"judges": [[["id", "rubric"]]]}}}, "args/task/judges/0/id"),
    ],
)
def test_with_keys_a_config_reaches_only_what_is_listed(env: dict[str, object], place: str) -> None:
    run = run_of(**env)
    code = ("acme", "my_env", "/srv/code")
    found = refused(run, code, ("envs.lan", "one.lan:7"), ("VLLM_KEY",))
    assert [error.pointer for error in found] == ([f"/train/env/0/{place}"] if place else [])
    assert all(error.key in error.pointer.replace("/", ".") for error in found)
    assert all("sk-1" not in str(error) for error in found)
    assert refused(run, None) == []


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://envs.lan/ping", ""),
        (HERE, ""),
        ("https://evil/ping", "/monitor/heartbeat_url"),
        ("http://localhost.evil:1", "/monitor/heartbeat_url"),
        ({"env_var": "RATCHET_PING_KEY"}, ""),
        ({"env_var": "HF_TOKEN"}, "/monitor/heartbeat_url/env_var"),
    ],
)
def test_with_keys_only_listed_monitors_are_pinged(url: object, place: str) -> None:
    run = validate(config(monitor={"heartbeat_url": url}))
    found = refused(run, (), ("envs.lan",), ("VLLM_KEY",))
    assert [error.pointer for error in found if "env/" not in error.pointer] == [place] * bool(
        place
    )


MODELS = ("Qwen/*", "me/one", "/srv/models")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("model", "place"),
    [
        ({}, ""),
        ({"name": "ratchet/smollm2-135m"}, ""),
        ({"name": "run:reverse-1a2b3c@40"}, ""),
        ({"name": "Qwen/Qwen3-0.6B", "revision": COMMIT}, ""),
        ({"name": "Qwen/Qwen3-0.6B"}, "revision"),
        ({"name": "Qwen/Qwen3-0.6B", "revision": "main"}, "revision"),
        ({"name": "me/one", "revision": COMMIT}, ""),
        ({"name": "me/other", "revision": COMMIT}, "name"),
        ({"name": "me/one/../other"}, "name"),
        ({"name": "Qwen/.."}, "name"),
        ({"name": "/srv/models/mine"}, ""),
        ({"name": "/srv/models/../secret"}, "name"),
        ({"name": "~/models"}, "name"),
        ({"name": "./models"}, "name"),
        ({"renderer_options": {"enable_thinking": False}}, ""),
        ({"renderer_options": {"import_path": "acme.render.Mine"}}, ""),
        ({"renderer_options": {"import_path": "os.system"}}, "renderer_options/import_path"),
    ],
)
def test_with_keys_models_come_from_the_allow_list(model: dict[str, object], place: str) -> None:
    run = validate(config(model=model))
    found = refused(run, ("acme", "guess"), models=MODELS, flags=())
    pointers = [error.pointer for error in found]
    # '..' is no commit either.
    assert pointers[:1] == ([f"/model/{place}"] if place else [])
    assert refused(run, None) == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs/examples").glob("*.toml")), ids=str)
def test_every_example_passes_with_keys_and_empty_lists(path: Path) -> None:
    run = load(path)
    assert refused(run, (), (), (), (), ()) == [] == own_flags(run)


@pytest.mark.parametrize("name", ["run:../../etc@40", "run:a@40/../..", "run:a", "run:A@1"])
def test_what_only_looks_like_a_version_is_no_model(name: str) -> None:
    run = validate(config())
    named = run.model_copy(update={"model": run.model.model_copy(update={"name": name})})
    found = refused(named, ("guess",), models=MODELS)
    assert [error.pointer for error in found] == ["/model/name"]


def test_a_revision_is_of_a_hub_name() -> None:
    for name in ("ratchet/tiny", "/srv/models/mine", "run:a@1"):
        with pytest.raises(ValueError, match="revision"):
            validate(config(model={"name": name, "revision": COMMIT}))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("arguments", "keyed", "open_too"),
    [
        (["--host", "0.0.0.0"], "--host", True),
        (["--gpu_memory_utilization=0.9"], "inference.gpu_memory_utilization", True),
        (["--middleware", "evil.M"], "RATCHET_ENGINE_FLAGS", False),
        (["--trust-remote-code"], "RATCHET_ENGINE_FLAGS", False),
        (["--block-size", "32"], "", False),
        (["--hf-overrides={}"], "", False),
    ],
)
async def test_flags_of_engines_are_refused(
    served: Served, arguments: list[str], keyed: str, open_too: bool
) -> None:
    body = config(inference={"extra_args": arguments})
    strict = replace(served.settings, engine_flags=("--hf-overrides",))
    for settings, why in ((strict, keyed), (served.settings, keyed if open_too else "")):
        async with asgi(create_app(settings, connection(served.env))) as http:
            answer = await http.post("/v1/runs?dry_run=true", json=body)
        if not why:
            assert answer.status_code == 200, answer.text
            continue
        error = problem(answer, 422, "invalid-config")["errors"][0]
        assert error["pointer"] == "/inference/extra_args/0"
        assert why in error["message"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_run_with_foreign_code_is_refused_before_anything_starts(served: Served) -> None:
    strict = replace(served.settings, custom_code=())
    async with asgi(create_app(strict, connection(served.env))) as http:
        for query in ("", "?dry_run=true"):
            answer = await http.post(f"/v1/runs{query}", json=custom("os:system"))
            found = problem(answer, 422, "invalid-config")["errors"]
            assert found[0]["pointer"] == "/train/env/0/algo/function"
            assert "RATCHET_CUSTOM_CODE" in found[0]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/runs/..%2f..%2fetc/config",
        "/v1/runs/%2e%2e/metrics",
        "/v1/runs/a%00b/evals",
        "/v1/runs/x+2/metrics",
        "/dashboard/..%2f..%2fkeys.py",
        "/docs/assets/..%2f..%2f..%2fkeys.py",
    ],
)
def test_no_path_leads_out(home: Path, path: str) -> None:
    answer = TestClient(create_app(settings(home), AWAY)).get(path)
    assert answer.status_code == 404 and "sha256" not in answer.text
