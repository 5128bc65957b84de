"""What a config may name where an API has keys: code, hosts, and variables that hold keys. Pure.

Whoever may create runs would else run anything that workers can import, have them read their files,
or have them send their own secrets anywhere. Three allow-lists, each a setting of the API; None
stands for one that is not in force:

- RATCHET_CUSTOM_CODE: modules, which stand for themselves and all below (functions, environments,
  what args of an environment plug in), and absolute folders. Environments that ship need no entry.
- RATCHET_ENDPOINT_HOSTS: 'host' or 'host:port' of teachers, judges and env servers. Loopback needs
  no entry.
- RATCHET_KEY_VARS: variables of workers with keys of endpoints. RATCHET_…_KEY needs no entry, but
  for RATCHET_API_KEY, which is the API's own.
"""

import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from ratchet.activities.contracts.names import SHIPPED_ENVS
from ratchet.api.http.security import is_loopback
from ratchet.api.schemas.problems import FieldError, printable, shown
from ratchet.configs.base import FunctionSection
from ratchet.configs.env import EnvConfig
from ratchet.configs.reference import FrozenModelConfig
from ratchet.configs.run import RunConfig

Allowed = Sequence[str] | None
Refuse = Callable[[str, str, str, str], None]
"""Takes the pointer to a value, the value, what it does, and the setting that could allow it."""

CODE, HOSTS, VARIABLES = "RATCHET_CUSTOM_CODE", "RATCHET_ENDPOINT_HOSTS", "RATCHET_KEY_VARS"
JUDGES = ("decision", "reference", "rubric")
"""Judges that verifiers ships."""


def _sections(value: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionSection | EnvConfig | FrozenModelConfig):
        yield pointer, value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _sections(getattr(value, name), f"{pointer}/{name}")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _sections(item, f"{pointer}/{place}")


def _below(folder: str, allowed: Sequence[str]) -> bool:
    path = posixpath.normpath(folder)
    roots = [posixpath.normpath(entry) for entry in allowed if entry.startswith("/")]
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


def _named(module: str, allowed: Sequence[str]) -> bool:
    return any(module == entry or module.startswith(f"{entry}.") for entry in allowed)


def _module(plugin: str) -> str:
    """The module that verifiers imports for an id: 'owner/my-env@2' is my_env."""
    return plugin.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


def _plugged(plugin: str, allowed: Sequence[str], shipped: Sequence[str]) -> bool:
    modules = [_module(entry) for entry in allowed if not entry.startswith("/")]
    return _named(_module(plugin), modules) or _module(plugin) in map(_module, shipped)


def _function(path: str, allowed: Sequence[str]) -> bool:
    """Whether a function that verifiers imports may be: by module, or in a file."""
    if "/" in path or path.partition(":")[0].endswith(".py"):
        return path.startswith("/") and _below(path.partition(":")[0], allowed)
    return _named(path.partition(":")[0], allowed)


def _reachable(url: str, hosts: Sequence[str]) -> bool:
    # urlsplit drops what others would not, and credentials have no place here.
    if re.search(r"[\s\\@]", url):
        return False
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return False
    port = port or {"http": 80, "https": 443}.get(parts.scheme)
    listed = {entry.lower() for entry in hosts}
    return is_loopback(host) or bool({host, f"{host}:{port}", f"[{host}]:{port}"} & listed)


class _Rules:
    """Checks values against the lists that are in force, and refuses what none of them has."""

    def __init__(self, code: Allowed, hosts: Allowed, variables: Allowed, refuse: Refuse) -> None:
        self._code, self._hosts, self._variables = code, hosts, variables
        self._refuse = refuse

    def function(self, pointer: str, module: str, value: str) -> None:
        if self._code is not None and not _named(module, self._code):
            self._refuse(pointer, value, "names code", CODE)

    def folder(self, pointer: str, value: str | None) -> None:
        if self._code is not None and value is not None and not _below(value, self._code):
            self._refuse(pointer, value, "names a folder of code", CODE)

    def env(self, pointer: str, value: str) -> None:
        if self._code is not None and not _plugged(value, self._code, SHIPPED_ENVS):
            self._refuse(pointer, value, "names an environment", CODE)

    def host(self, pointer: str, value: str | None) -> None:
        if self._hosts is not None and value is not None and not _reachable(value, self._hosts):
            self._refuse(pointer, value, "names a host", HOSTS)

    def variable(self, pointer: str, value: str) -> None:
        own = re.fullmatch(r"RATCHET_[A-Z0-9_]+_KEY", value) and value != "RATCHET_API_KEY"
        if self._variables is not None and not own and value not in self._variables:
            self._refuse(pointer, value, "names a variable of workers", VARIABLES)

    def args(self, pointer: str, value: Any) -> None:
        """What verifiers lets the args of any environment plug in, wherever it stands in them."""
        if isinstance(value, list):
            for number, item in enumerate(value):
                self.args(f"{pointer}/{number}", item)
        if not isinstance(value, dict):
            return
        for name, item in value.items():
            place = f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}"
            if name == "judges" and item:
                self._judges(place, item)
            elif name == "headers_from_env" and isinstance(item, dict):
                for header, variable in item.items():
                    self.variable(f"{place}/{header}", str(variable))
            elif isinstance(item, str):
                self._arg(place, name, item)
            self.args(place, item)

    def _arg(self, pointer: str, name: str, value: str) -> None:
        if name == "fn" and self._code is not None and not _function(value, self._code):
            self._refuse(pointer, value, "names code", CODE)
        elif name == "system_prompt" and self._code is not None and not _below(value, self._code):
            self._refuse(pointer, value, "names a file", CODE)
        elif name == "base_url":
            self.host(pointer, value)
        elif name == "api_key_var":
            self.variable(pointer, value)

    def _judges(self, pointer: str, judges: Any) -> None:
        if self._code is None:
            return
        for place, judge in enumerate(judges if isinstance(judges, list) else [None]):
            # Pairs would do for verifiers, too, and could hold anything unseen.
            input = judge if isinstance(judge, dict) else {}
            plugin, prompt = str(input.get("id")), input.get("prompt")
            if not _plugged(plugin, self._code, JUDGES):
                self._refuse(f"{pointer}/{place}/id", plugin, "names a judge", CODE)
            if prompt is not None and not _below(str(prompt), self._code):
                self._refuse(f"{pointer}/{place}/prompt", str(prompt), "names a file", CODE)


def refused(
    config: RunConfig, code: Allowed, hosts: Allowed = None, variables: Allowed = None
) -> list[FieldError]:
    """What of the config is not allowed; a list that is None allows everything."""
    lists = {CODE: code, HOSTS: hosts, VARIABLES: variables}
    besides = {
        CODE: f"environments that ship ({', '.join(SHIPPED_ENVS)}), and",
        HOSTS: "loopback, and",
        VARIABLES: "RATCHET_…_KEY, and",
    }
    errors: list[FieldError] = []

    def refuse(pointer: str, value: str, what: str, setting: str) -> None:
        listed = ", ".join(lists[setting] or ()) or "nothing"
        errors.append(
            FieldError(
                pointer=printable(pointer),
                key=printable(pointer.strip("/").replace("/", ".")),
                value=shown(value),
                message=f"{what} that the API does not allow; allowed: {besides[setting]} what "
                f"{setting} of the API lists: {listed}",
            )
        )

    rules = _Rules(code, hosts, variables, refuse)
    for pointer, section in _sections(config):
        match section:
            case FrozenModelConfig():
                rules.host(f"{pointer}/base_url", section.base_url)
                rules.variable(f"{pointer}/api_key_var", section.api_key_var)
            case FunctionSection():
                module = section.function.partition(":")[0]
                rules.function(f"{pointer}/function", module, section.function)
                rules.folder(f"{pointer}/path", section.path)
            case EnvConfig():
                rules.env(f"{pointer}/id", section.id)
                rules.args(f"{pointer}/args", section.args)
                rules.folder(f"{pointer}/path", section.path)
                rules.host(f"{pointer}/address", section.address)
    return errors
