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
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel

from ratchet.activities.contracts.names import SHIPPED_ENVS
from ratchet.api.http.security import is_loopback
from ratchet.api.schemas.problems import FieldError, printable, shown
from ratchet.configs.base import FunctionSection
from ratchet.configs.env import EnvConfig
from ratchet.configs.pointers import pointer
from ratchet.configs.reference import FrozenModelConfig
from ratchet.configs.run import RunConfig

Allowed = Sequence[str] | None
Place = tuple[str | int, ...]
"""Where in the config something is: keys and indexes, from the outermost inwards."""

CODE, HOSTS, VARIABLES = "RATCHET_CUSTOM_CODE", "RATCHET_ENDPOINT_HOSTS", "RATCHET_KEY_VARS"
JUDGES = ("decision", "reference", "rubric")
"""Judges that verifiers ships."""


class _Named(NamedTuple):
    """Something that a config names: `setting` is the list that could allow it, and `admits` tells
    whether what stands in that list does.
    """

    place: Place
    value: str
    what: str
    setting: str
    admits: Callable[[Sequence[str]], bool]


# -- what a list admits -----------------------------------------------------------------------


def _below(folder: str, allowed: Sequence[str]) -> bool:
    path = posixpath.normpath(folder)
    roots = [posixpath.normpath(entry) for entry in allowed if entry.startswith("/")]
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


def _within(module: str, allowed: Sequence[str]) -> bool:
    return any(module == entry or module.startswith(f"{entry}.") for entry in allowed)


def _module(plugin: str) -> str:
    """The module that verifiers imports for an id: 'owner/my-env@2' is my_env."""
    return plugin.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


def _plugged(plugin: str, shipped: Sequence[str], allowed: Sequence[str]) -> bool:
    modules = [_module(entry) for entry in allowed if not entry.startswith("/")]
    return _within(_module(plugin), modules) or _module(plugin) in map(_module, shipped)


def _function(path: str, allowed: Sequence[str]) -> bool:
    """Whether a function that verifiers imports may be: by module, or in a file."""
    module = path.partition(":")[0]
    if "/" in path or module.endswith(".py"):
        return path.startswith("/") and _below(module, allowed)
    return _within(module, allowed)


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


def _readable(variable: str, variables: Sequence[str]) -> bool:
    own = re.fullmatch(r"RATCHET_[A-Z0-9_]+_KEY", variable) and variable != "RATCHET_API_KEY"
    return bool(own) or variable in variables


# -- what a config names ----------------------------------------------------------------------


def _host(place: Place, value: str) -> _Named:
    return _Named(place, value, "names a host", HOSTS, partial(_reachable, value))


def _variable(place: Place, value: str) -> _Named:
    return _Named(place, value, "names a variable of workers", VARIABLES, partial(_readable, value))


def _folder(place: Place, value: str, what: str) -> _Named:
    return _Named(place, value, what, CODE, partial(_below, value))


def _plugin(place: Place, value: str, what: str, shipped: Sequence[str]) -> _Named:
    return _Named(place, value, what, CODE, partial(_plugged, value, shipped))


def _in_section(section: BaseModel, place: Place) -> Iterator[_Named]:
    match section:
        case FrozenModelConfig():
            yield _host((*place, "base_url"), section.base_url)
            yield _variable((*place, "api_key_var"), section.api_key_var)
        case FunctionSection():
            admits = partial(_within, section.function.partition(":")[0])
            yield _Named((*place, "function"), section.function, "names code", CODE, admits)
        case EnvConfig():
            yield _plugin((*place, "id"), section.id, "names an environment", SHIPPED_ENVS)
            yield from _in_args(section.args, (*place, "args"))
    if isinstance(section, FunctionSection | EnvConfig) and section.path is not None:
        yield _folder((*place, "path"), section.path, "names a folder of code")
    if isinstance(section, EnvConfig) and section.address is not None:
        yield _host((*place, "address"), section.address)


def _in_config(value: Any, place: Place = ()) -> Iterator[_Named]:
    if isinstance(value, BaseModel):
        yield from _in_section(value, place)
        for name in type(value).model_fields:
            yield from _in_config(getattr(value, name), (*place, name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _in_config(item, (*place, number))


def _in_args(value: Any, place: Place) -> Iterator[_Named]:
    """What verifiers lets the args of any environment plug in, wherever it stands in them."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in inner:
        below = (*place, name)
        match name, item:
            case "judges", _ if item:
                yield from _in_judges(item, below)
            case "headers_from_env", dict():
                yield from (_variable((*below, key), str(named)) for key, named in item.items())
            case "fn", str():
                yield _Named(below, item, "names code", CODE, partial(_function, item))
            case "system_prompt", str():
                yield _folder(below, item, "names a file")
            case "base_url", str():
                yield _host(below, item)
            case "api_key_var", str():
                yield _variable(below, item)
        if isinstance(item, dict | list):
            yield from _in_args(item, below)


def _in_judges(judges: Any, place: Place) -> Iterator[_Named]:
    # Pairs would do for verifiers, too, and could hold anything unseen.
    for number, judge in enumerate(judges if isinstance(judges, list) else [None]):
        input = judge if isinstance(judge, dict) else {}
        plugin, prompt = str(input.get("id")), input.get("prompt")
        yield _plugin((*place, number, "id"), plugin, "names a judge", JUDGES)
        if prompt is not None:
            yield _folder((*place, number, "prompt"), str(prompt), "names a file")


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
    return [
        FieldError(
            pointer=printable(pointer(*named.place)),
            key=printable(".".join(map(str, named.place))),
            value=shown(named.value),
            message=f"{named.what} that the API does not allow; allowed: {besides[named.setting]} "
            f"what {named.setting} of the API lists: {', '.join(allowed) or 'nothing'}",
        )
        for named in _in_config(config)
        if (allowed := lists[named.setting]) is not None and not named.admits(allowed)
    ]
