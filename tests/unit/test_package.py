"""The distribution: the same files whichever way it is built, and a client without its servers."""

import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests import ROOT
from tests.packaging import Venv, build, contents, wheel_of_sdist

ROOMS = ("activities", "api", "configs", "worker", "workflows")
HEAVY = {"fastapi", "starlette", "temporalio", "torch", "vllm", "transformers", "verifiers"}

LOCAL = {"rollout", "trainer", "stack", "smollm2", "reasoning-gym"}
LOCKS = {
    "cpu": LOCAL,
    "cuda": LOCAL | {"cuda"},
    "cuda-312": LOCAL | {"cuda"},
    "control": {"api"},
    "rollout": {"rollout"},
}
"""The extras that each lock is resolved from."""
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout."""
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """The wheel, installed."""
    return Venv(tmp_path_factory.mktemp("venv") / "env", wheel, borrow=True)


def test_a_wheel_holds_every_file_of_the_rooms_and_nothing_else(wheel: Path) -> None:
    expected = {"ratchet/__init__.py", "ratchet/py.typed"}
    for room in ROOMS:
        files = (p for p in (ROOT / room).rglob("*") if p.is_file())
        expected |= {
            f"ratchet/{p.relative_to(ROOT)}" for p in files if p.parent.name != "__pycache__"
        }
    held = set(contents(wheel))
    metadata = {name for name in held if ".dist-info/" in name}
    assert held - metadata == expected
    assert {Path(name).name for name in metadata} >= {"LICENSE", "NOTICE", "entry_points.txt"}


def test_a_wheel_of_the_sdist_holds_the_same_files(wheel: Path, tmp_path: Path) -> None:
    assert contents(wheel_of_sdist(tmp_path)) == contents(wheel)


def test_a_wheel_of_what_the_images_are_given_holds_the_same_files(
    wheel: Path, tmp_path: Path
) -> None:
    lines = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    for pattern in (line[1:] for line in lines if line.startswith("!")):
        for path in ROOT.glob(pattern):
            copy = tmp_path / "context" / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, copy, symlinks=True, ignore=ignored)
            else:
                shutil.copy(path, copy)
    built = build(tmp_path / "context", "wheel", tmp_path / "wheel")
    assert contents(built) == contents(wheel)


def test_the_client_and_the_command_import_nothing_heavy(venv: Venv) -> None:
    printed = venv.python(
        "import sys\n"
        "from ratchet import Ratchet\n"
        "import ratchet.api.client.cli, ratchet.configs.load\n"
        "print(ratchet.__file__, *{name.partition('.')[0] for name in sys.modules})"
    )
    file, *modules = printed.split()
    assert Path(file).is_relative_to(venv.bin.parent)
    assert not HEAVY & set(modules)


def test_the_client_is_imported_by_who_asks_for_it(venv: Venv) -> None:
    client = {"httpx", "ratchet.api.client"}
    code = f"import sys, ratchet.configs.run\nprint(*{client} & {{*sys.modules}})"
    assert not venv.python(code).split()


def test_only_ratchet_is_importable(venv: Venv) -> None:
    printed = venv.python(
        "from importlib.util import find_spec\n"
        f"print([name for name in ('ratchet', *{ROOMS}) if find_spec(name)])"
    )
    assert printed.strip() == "['ratchet']"


def test_an_installed_api_serves_its_pages(venv: Venv, tmp_path: Path) -> None:
    code = """
from fastapi.testclient import TestClient
import ratchet
from ratchet.api.app import create_app
from ratchet.api.dashboard.pages import PREFIX
client = TestClient(create_app(), base_url="http://127.0.0.1")
files = (f"{PREFIX}/js/main.js", f"{PREFIX}/vendor/uplot/uPlot.iife.min.js")
for path in ("/", *files, "/docs", "/docs/assets/swagger-ui-bundle.js"):
    reply = client.get(path)
    assert reply.status_code == 200, (path, reply.status_code)
assert client.get("/openapi.json").json()["info"]["version"] == ratchet.__version__
"""
    venv.python(code, RATCHET_HOME=str(tmp_path))


def test_the_version_is_the_distribution_s(venv: Venv) -> None:
    printed = venv.python(
        "from importlib import metadata\n"
        "import ratchet\n"
        "print(ratchet.__version__, metadata.version('ratchet-rl'))"
    )
    assert len(set(printed.split())) == 1


def requirements_of(extra: str) -> Iterator[Requirement]:
    """What an extra asks for, other extras that it names included."""
    for requirement in map(Requirement, PYPROJECT["project"]["optional-dependencies"][extra]):
        if requirement.name == PYPROJECT["project"]["name"]:
            for other in requirement.extras:
                yield from requirements_of(other)
        else:
            yield requirement


def locked(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", text, flags=re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_hold_what_the_extras_ask_for(lock: str) -> None:
    versions = locked(lock)
    asked = [*map(Requirement, PYPROJECT["project"]["dependencies"])]
    for extra in LOCKS[lock]:
        asked += requirements_of(extra)
    if lock == "cpu":
        # Installed apart, in the one version that everything names.
        (torch,) = (requirement for requirement in asked if requirement.name == "torch")
        asked.remove(torch)
        dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
        assert f"ARG TORCH_VERSION={str(torch.specifier).removeprefix('==')}\n" in dockerfile
    missed = [str(r) for r in asked if not r.specifier.contains(versions.get(r.name, "0"))]
    assert not missed, "`make lock` resolves them again"


def test_pre_commit_has_the_locked_ruff() -> None:
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert hooks["rev"] == f"v{locked('cpu')['ruff']}"


@pytest.mark.nightly
def test_an_empty_environment_gets_the_client_and_no_server(wheel: Path, tmp_path: Path) -> None:
    venv = Venv(tmp_path / "env", wheel, borrow=False)
    installed = f"from importlib.util import find_spec\nprint([n for n in {HEAVY} if find_spec(n)])"
    assert venv.python(installed).strip() == "[]"
    venv.python("from ratchet import Ratchet; Ratchet(base_url='http://127.0.0.1:1').close()")
    assert venv.run("ratchet", "runs", "--help").returncode == 0
    # Nobody listens there: the command says so in a line, by the status for it.
    refused = venv.run("ratchet", "runs", "list", RATCHET_API="http://127.0.0.1:1")
    assert refused.returncode == 3, refused.stderr
