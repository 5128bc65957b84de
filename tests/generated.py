"""A client that openapi-python-client makes of the document, and what it reads of an API."""

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "made_of_openapi"
# Its own formatting is of no use here, and of the media types of bodies it knows no TOML.
CONFIG = {
    "post_hooks": [],
    "content_type_overrides": {"application/toml": "application/octet-stream"},
}


def make_client(document: Mapping[str, Any], folder: Path) -> Path:
    """Writes the client's package into `folder`, which is to be on sys.path; what of the document
    cannot be made into a client is an error.
    """
    (folder / "openapi.json").write_text(json.dumps(document))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = [str(Path(sys.executable).with_name("openapi-python-client")), "generate"]
    command += ["--path", "openapi.json", "--config", "config.json", "--meta", "none"]
    command += ["--output-path", NAME, "--overwrite", "--fail-on-warning"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / NAME


def _operations() -> Iterator[ModuleType]:
    api = importlib.import_module(f"{NAME}.api")
    for found in pkgutil.walk_packages(api.__path__, f"{api.__name__}."):
        module = importlib.import_module(found.name)
        if hasattr(module, "sync_detailed"):
            yield module


def read_every_get(url: str, about: Mapping[str, str]) -> dict[str, Any]:
    """What the client makes of each GET's reply, by operation; `about` are parameters of paths."""
    client = importlib.import_module(f"{NAME}.client").Client(
        base_url=url, raise_on_unexpected_status=True, timeout=60.0
    )
    problem = importlib.import_module(f"{NAME}.models").ProblemDocument
    read: dict[str, Any] = {}
    for module in _operations():
        # What comes first is what paths are made of.
        names = [
            name
            for name, one in inspect.signature(module.sync_detailed).parameters.items()
            if one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        if names and not set(names) <= about.keys():
            continue
        places = {name: about[name] for name in names}
        if "body" in inspect.signature(module.sync_detailed).parameters:
            continue
        if module._get_kwargs(**places)["method"] != "get":
            continue
        name = module.__name__.rpartition(".")[2]
        reply = module.sync_detailed(client=client, **places)
        assert reply.status_code == 200, (name, reply)
        assert reply.parsed is not None and not isinstance(reply.parsed, problem), (name, reply)
        read[name] = reply.parsed
    return read
