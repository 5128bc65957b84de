"""The installed package against a real stack: the command and the client drive the stack of the
checkout, and the demo of an installed wheel is a stack by itself.
"""

import json
from pathlib import Path

import pytest

from ratchet.worker.stack import Stack
from tests import ROOT
from tests.e2e.driving import TEMPORAL, get, processes_of
from tests.packaging import Venv, build, wheel_of_sdist

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.stack]

EXAMPLE = "ratchet/configs/examples/reverse_text.toml"


@pytest.fixture(scope="module", params=["checkout", "sdist"])
def venv(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """A wheel, installed: the one of the checkout, and the one by way of its sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    direct = request.param == "checkout"
    wheel = build(ROOT, "wheel", folder) if direct else wheel_of_sdist(folder)
    return Venv(tmp_path_factory.mktemp("venv") / "env", wheel, borrow=True)


def test_the_installed_command_and_client_drive_a_stack(stack: Stack, venv: Venv) -> None:
    where = stack.up()
    config = venv.packages / EXAMPLE

    def ratchet(*arguments: str) -> str:
        done = venv.run("ratchet", *arguments, RATCHET_API=where.api)
        assert done.returncode == 0, done.stderr
        return done.stdout

    started = json.loads(ratchet("runs", "create", str(config), "max_steps=2", "--json"))
    shown = json.loads(ratchet("runs", "show", started["id"], "--json"))
    assert shown["id"] == started["id"] and shown["max_steps"] == 2
    # The stack's home names the API as well as its address does.
    code = f"""
from ratchet import Ratchet
with Ratchet() as client:
    client.runs.cancel({started["id"]!r}, reason="seen enough")
    *_, last = client.runs.stream_events({started["id"]!r})
    print(last.type, client.runs.retrieve({started["id"]!r}).status)
"""
    assert venv.python(code, RATCHET_HOME=str(stack.home)).split() == ["run.ended", "cancelled"]
    assert get(where, f"/v1/runs/{started['id']}")["status"] == "cancelled"
    assert started["id"] in ratchet("runs", "list", "--status", "cancelled")


@pytest.mark.nightly
def test_the_demo_of_an_installed_wheel_trains(venv: Venv, stack: Stack, tmp_path: Path) -> None:
    # Temporal's server comes with a package that is only borrowed here.
    (venv.bin / "temporal").symlink_to(TEMPORAL)
    home = {"RATCHET_HOME": str(tmp_path), "RATCHET_STORE": f"file://{stack.home}/store"}
    config = venv.packages / EXAMPLE
    demo = ("-m", "ratchet.worker.demo", config, "max_steps=2")
    done = venv.run("python", *demo, limit_s=800, **home)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "succeeded"
    assert not processes_of(tmp_path)
