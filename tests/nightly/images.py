"""Builds the images without a container engine, and has them serve a short run.

    python -m tests.nightly.images            # API, orchestrator, rollouts and env servers
    python -m tests.nightly.images --targets control,rollout,trainer,inference

mmdebstrap makes a base image from Debian's archive, buildah builds on it and runs commands in what
it built, both as root. What has no image is served from this checkout. Exit status 0: the run
succeeded with every process alive.

The images of trainer and inference hold torch and vLLM, 4 GB each, of which buildah without an
engine's storage makes several copies.

What it does not show: anything of compose.yaml (networks, limits, read-only roots), which needs an
engine, and the base image that the Dockerfile names, for which it stands in.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from ratchet.api.client import Ratchet
from ratchet.configs.load import load
from ratchet.worker.stack import answers
from ratchet.worker.temporal_server import DYNAMIC_CONFIG, TEMPORAL
from ratchet.workflows.protocol.messages import SEARCH_ATTRIBUTES
from tests import ROOT

FOLDER = ROOT / ".ratchet" / "images"
BASE = "localhost/ratchet-base"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates,libgomp1"
BUILDAH = [
    *("buildah", "--root", str(FOLDER / "storage"), "--runroot", str(FOLDER / "run")),
    *("--storage-driver", "vfs"),
]
USER = 10001
ROLES = {"rollout": "rollout,env", "trainer": "trainer", "inference": "inference"}
"""Of workers, by the image that is made for them."""
READY_WITHIN_S = 300.0
RUN_WITHIN_S = 900.0
SMALL = ("max_steps=2", "train.batch_size=16", "train.group_size=4", "eval.num_examples=8")


def require_tools() -> None:
    """Exits with what is missing."""
    if os.geteuid() != 0:
        sys.exit("images: buildah and mmdebstrap need root here")
    if missing := [tool for tool in ("mmdebstrap", "buildah") if shutil.which(tool) is None]:
        sys.exit(
            f"images: missing: {' '.join(missing)}; Debian: apt-get install {' '.join(missing)}"
        )


def _pip_settings() -> list[str]:
    """Mounts of this machine's own pip settings, and of the folders and certificates they name."""
    reported = subprocess.run(["pip", "config", "debug"], capture_output=True, text=True).stdout
    words = reported.replace("file://", " ").replace("'", " ").replace(",", " ").split()
    places = {"/etc/pip.conf", "/etc/ssl/certs"}
    places |= {word.removesuffix("/simple") for word in words if word.startswith("/opt/")}
    there = sorted(place for place in places if Path(place).exists())
    return [word for place in there for word in ("-v", f"{place}:{place}:ro")]


def make_base() -> None:
    """Makes the base image, unless it is there."""
    if (
        subprocess.run(
            [*BUILDAH, "inspect", "--type", "image", BASE], capture_output=True
        ).returncode
        == 0
    ):
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    archive = str(FOLDER / "base.tar")
    include = f"--include={PACKAGES}"
    if not Path(archive).exists():
        subprocess.run(["mmdebstrap", "--variant=minbase", include, SUITE, archive], check=True)
    name = _said("from", "scratch")
    _said("add", name, archive, "/")
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    _said("config", "--env", path, name)
    _said("commit", "--rm", name, BASE)


def _said(*words: str) -> str:
    done = subprocess.run([*BUILDAH, *words], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def build(target: str, torch_index: str) -> None:
    """Builds the image of a target of docker/Dockerfile."""
    arguments = ["--build-arg", f"PYTHON_IMAGE={BASE}"]
    if torch_index:
        arguments += ["--build-arg", f"TORCH_INDEX={torch_index}"]
    command = [*BUILDAH, "bud", "--isolation", "chroot", "--layers=false", *_pip_settings()]
    command += [*arguments, "-f", "docker/Dockerfile", "--target", target]
    began = time.monotonic()
    subprocess.run([*command, "-t", f"ratchet-{target}", "."], check=True, cwd=ROOT)
    print(f"images: {target} was built in {time.monotonic() - began:.0f} s", flush=True)


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


class Site:
    """Processes of one stack, in images and beside them, on a store that all share."""

    def __init__(self, folder: Path, built: list[str]) -> None:
        self.folder = folder
        self.built = built
        # The images' own user, unless this checkout serves beside them: as root, whose files on the
        # store nobody else reads.
        self.user = USER if {"control", *ROLES} <= {*built} else 0
        self.temporal = free_port()
        self.api = free_port()
        self.store = self._own("store")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._containers: list[str] = []
        self._healthy: dict[str, int] = {}

    def _own(self, name: str) -> Path:
        made = self.folder / name
        made.mkdir()
        os.chown(made, self.user, self.user)
        return made

    def start(self) -> None:
        """Starts all and waits until it is healthy."""
        settings = [f"--dynamic-config-value={value}" for value in DYNAMIC_CONFIG]
        settings += [f"--search-attribute={n}={kind}" for n, kind in SEARCH_ATTRIBUTES.items()]
        words = [str(TEMPORAL), "server", "start-dev", "--headless", "--log-level", "error"]
        self._spawn("temporal", [*words, "--port", str(self.temporal), *settings], {})
        self._until("temporal", lambda: answers(self.temporal))
        self._serve("control", "api", ["ratchet.api", "--port", str(self.api)], self.api)
        for image, roles in {"control": "orchestrator", **ROLES}.items():
            self._serve(image, f"worker-{roles}", ["ratchet.worker", "--roles", roles], free_port())
        for name, port in self._healthy.items():
            self._until(name, lambda port=port: self._answers(port))  # type: ignore[misc]

    def _serve(self, image: str, name: str, module: list[str], health: int) -> None:
        env = {
            "TEMPORAL_ADDRESS": f"127.0.0.1:{self.temporal}",
            "RATCHET_HEALTH_PORT": str(health),
        }
        self._healthy[name] = health
        home = self._own(name)
        if image in self.built:
            user = f"{self.user}:{self.user}"
            container = _said("from", f"localhost/ratchet-{image}")
            self._containers.append(container)
            words = ["run", "--isolation", "chroot", "--user", user]
            words += ["-v", f"{self.store}:/var/lib/ratchet/store"]
            words += ["-v", f"{home}:/var/lib/ratchet/home", container, "--", "env"]
            reported = [f"{key}={value}" for key, value in env.items()]
            self._spawn(name, [*BUILDAH, *words, *reported, "python", "-m", *module], {})
            return
        env |= {"RATCHET_STORE": f"file://{self.store}", "RATCHET_HOME": str(home)}
        env |= {"HOME": str(home), "PATH": os.environ["PATH"]}
        self._spawn(name, [sys.executable, "-P", "-m", *module], env)

    def _spawn(self, name: str, command: list[str], env: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                env=env or None,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _answers(self, port: int) -> bool:
        try:
            url = f"http://127.0.0.1:{port}/healthz"
            return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def dead(self) -> list[str]:
        """Names of what has ended."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def _until(self, name: str, holds) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + READY_WITHIN_S
        while not holds():
            if name in self.dead() or time.monotonic() > deadline:
                raise RuntimeError(f"{name} is not healthy; its log:\n{self.tail(name)}")
            time.sleep(0.2)

    def tail(self, name: str) -> str:
        """The end of a process's log."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        """Ends all that was started, and what that has started."""
        begun: list[psutil.Process] = []
        for process in self._processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                begun += [*parent.children(recursive=True), parent]
        for wait_s, end in ((20.0, "terminate"), (10.0, "kill")):
            for one in begun:
                with contextlib.suppress(psutil.NoSuchProcess):
                    getattr(one, end)()
            _, begun = psutil.wait_procs(begun, timeout=wait_s)
        for container in self._containers:
            subprocess.run([*BUILDAH, "rm", container], capture_output=True)


@contextlib.contextmanager
def site(built: list[str]) -> Iterator[Site]:
    """A stack of these images that is healthy, for as long as it is used."""
    with tempfile.TemporaryDirectory(prefix="ratchet-images-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        one = Site(folder, built)
        try:
            one.start()
            yield one
        finally:
            one.stop()


def short_run(one: Site) -> dict[str, object]:
    """Trains two steps; returns what the run came to. Raises RuntimeError if it did not succeed."""
    began = time.monotonic()
    with Ratchet(f"http://127.0.0.1:{one.api}") as client:
        config = load(ROOT / "configs" / "examples" / "reverse_text.toml", SMALL)
        run = client.runs.create(config)
        while run.status not in ("succeeded", "failed", "cancelled"):
            if one.dead() or time.monotonic() - began > RUN_WITHIN_S:
                what = f"dead: {one.dead()}, {run.status}, {run.waiting_for}"
                raise RuntimeError(f"the run does not end ({what})")
            time.sleep(1.0)
            run = client.runs.retrieve(run.id)
        if run.status != "succeeded" or run.step != 2:
            raise RuntimeError(f"the run ended as {run.status} at step {run.step}: {run.error}")
        return {
            "run": run.id,
            "seconds": round(time.monotonic() - began),
            "step": run.step,
            "eval": {name: result.reward for name, result in run.eval.items()},
            "restarts": run.restarts,
        }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.images")
    parser.add_argument("--targets", default="control,rollout")
    parser.add_argument("--torch-index", default="", help="where pip finds a CPU build of torch")
    parser.add_argument("--no-build", action="store_true", help="run what was built before")
    given = parser.parse_args(argv)
    require_tools()
    targets = given.targets.split(",")
    if not given.no_build:
        make_base()
        for target in targets:
            build(target, given.torch_index)
    with site(targets) as one:
        try:
            result = short_run(one)
        except Exception:
            for log in sorted(one.folder.glob("*.log")):
                print(f"== {log.name}\n{one.tail(log.stem)}", file=sys.stderr)
            raise
    print(json.dumps({"images": targets, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
