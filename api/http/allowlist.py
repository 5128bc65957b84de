"""What a config may name if the API has keys: code, hosts, models, flags of engines, and the
variables that hold keys. Pure.

Otherwise everyone who may create runs could run anything that workers can import, have workers read
their files, or have them send their secrets anywhere. There are five allow-lists, each a setting of
the API; None stands for a list that is not in force:

- RATCHET_CUSTOM_CODE: modules, each with everything below it (functions, environments, what args of
  an environment plug in), and absolute folders. Environments that ship need no entry.
- RATCHET_ENDPOINT_HOSTS: 'host' or 'host:port' of teachers, judges, env servers and heartbeats.
  Loopback needs no entry.
- RATCHET_KEY_VARS: variables of workers with keys of endpoints. RATCHET_…_KEY needs no entry,
  except for RATCHET_API_KEY, which is the API's own.
- RATCHET_MODELS: hub names ('*' stands for anything), and absolute folders with everything below.
  Shipped models and versions of other runs need no entry. A hub name is pinned to a commit.
- RATCHET_ENGINE_FLAGS: flags in `inference.extra_args`, besides those that only affect speed.

Flags of engines that Ratchet sets itself are always refused.
"""

import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel

from ratchet.activities.contracts.names import SHIPPED_ENVS
from ratchet.api.http import env_args
from ratchet.api.http.security import is_loopback
from ratchet.api.schemas.problems import FieldError, printable, shown
from ratchet.configs import engine_flags
from ratchet.configs.base import FunctionSection
from ratchet.configs.env import EnvConfig
from ratchet.configs.load import MOST_REPORTED
from ratchet.configs.model import COMMIT, HUB_NAME, SHIPPED_MODELS, ModelConfig, version_named
from ratchet.configs.monitor import MonitorConfig
from ratchet.configs.pointers import pointer
from ratchet.configs.reference import FrozenModelConfig
from ratchet.configs.run import RunConfig
from ratchet.configs.trainer import InferenceConfig

Allowed = Sequence[str] | None
Place = tuple[str | int, ...]
"""Where in the config something is: keys and indexes, from the outermost inwards."""

CODE, HOSTS, VARIABLES = "RATCHET_CUSTOM_CODE", "RATCHET_ENDPOINT_HOSTS", "RATCHET_KEY_VARS"
MODELS, FLAGS = "RATCHET_MODELS", "RATCHET_ENGINE_FLAGS"


class _Named(NamedTuple):
    """Something that a config names: `setting` is the list that could allow it, and `admits` says
    whether the entries of that list do.
    """

    place: Place
    value: Any
    what: str
    setting: str
    admits: Callable[[Sequence[str]], bool]


class _Mistake(NamedTuple):
    """Something that no list could allow."""

    place: Place
    value: Any
    message: str


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
    """Whether a function that verifiers imports is allowed: by module, or in a file."""
    module = path.partition(":")[0]
    if "/" in path or module.endswith(".py"):
        return path.startswith("/") and _below(module, allowed)
    return _within(module, allowed)


def _reachable(url: str, hosts: Sequence[str]) -> bool:
    # urlsplit drops characters that other parsers keep, and credentials have no place here.
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


def _loadable(name: str, models: Sequence[str]) -> bool:
    if name in SHIPPED_MODELS or version_named(name):
        return True
    # Anything else is a folder; a path that climbs out of a listed folder is not below it.
    if re.fullmatch(HUB_NAME, name) is None or {".", ".."} & set(name.split("/")):
        return name.startswith("/") and _below(name, models)
    return any(fnmatchcase(name, entry) for entry in models if not entry.startswith("/"))


# -- what a config names ----------------------------------------------------------------------


def _host(place: Place, value: str) -> _Named:
    return _Named(place, value, "names a host", HOSTS, partial(_reachable, value))


def _variable(place: Place, value: str) -> _Named:
    return _Named(place, value, "names a variable of workers", VARIABLES, partial(_readable, value))


def _folder(place: Place, value: str, what: str) -> _Named:
    return _Named(place, value, what, CODE, partial(_below, value))


def _plugin(place: Place, value: str, what: str, shipped: Sequence[str]) -> _Named:
    return _Named(place, value, what, CODE, partial(_plugged, value, shipped))


def _in_section(section: BaseModel, place: Place) -> Iterator[_Named | _Mistake]:
    match section:
        case FrozenModelConfig():
            yield _host((*place, "base_url"), section.base_url)
            for number, url in enumerate(section.more_urls):
                yield _host((*place, "more_urls", number), url)
            yield _variable((*place, "api_key_var"), section.api_key_var)
            for header, variable in section.headers_from_env.items():
                yield _variable((*place, "headers_from_env", header), variable)
        case FunctionSection():
            admits = partial(_within, section.function.partition(":")[0])
            yield _Named((*place, "function"), section.function, "names code", CODE, admits)
        case EnvConfig():
            yield _plugin((*place, "id"), section.id, "names an environment", SHIPPED_ENVS)
            for use in env_args.uses(section.args, (*place, "args")):
                yield _used(use)
        case ModelConfig():
            yield from _in_model(section, place)
        case MonitorConfig():
            where = (*place, "heartbeat_url")
            if section.url:
                yield _host(where, section.url)
            if section.url_var:
                yield _variable((*where, "env_var"), section.url_var)
        case InferenceConfig():
            for number, argument in enumerate(section.extra_args):
                admits = partial(engine_flags.admitted, argument)
                flag = (*place, "extra_args", number)
                yield _Named(flag, argument, "names a flag of engines", FLAGS, admits)
    if isinstance(section, FunctionSection | EnvConfig) and section.path is not None:
        yield _folder((*place, "path"), section.path, "names a folder of code")
    if isinstance(section, EnvConfig) and section.address is not None:
        yield _host((*place, "address"), section.address)


def _in_model(model: ModelConfig, place: Place) -> Iterator[_Named | _Mistake]:
    name = model.name
    yield _Named((*place, "name"), name, "names a model", MODELS, partial(_loadable, name))
    hub = name not in SHIPPED_MODELS and re.fullmatch(HUB_NAME, name) is not None
    if hub and re.fullmatch(COMMIT, model.revision or "") is None:
        message = (
            f"an API with keys accepts a model of the hub only at a commit: set model.revision to "
            f"a commit of {name!r} (40 hex digits)"
        )
        yield _Mistake((*place, "revision"), model.revision, message)
    # Options become keys of the renderer's own config, which can name a class.
    if imported := model.renderer_options.get("import_path"):
        admits = partial(_function, str(imported))
        option = (*place, "renderer_options", "import_path")
        yield _Named(option, imported, "names code", CODE, admits)


def _used(use: env_args.Use) -> _Named | _Mistake:
    """What an argument of an environment does, as something that a list may or cannot allow."""
    place, value = use.place, use.value
    match use.kind:
        case "host":
            return _host(place, value)
        case "variable":
            return _variable(place, value)
        case "function":
            return _Named(place, value, "names code", CODE, partial(_function, value))
        case "file":
            return _folder(place, value, "names a file")
        case "judge":
            return _plugin(place, value, "names a judge", env_args.JUDGES)
    return _Mistake(place, value, use.message)


def _in_config(value: Any, place: Place = ()) -> Iterator[_Named | _Mistake]:
    if isinstance(value, BaseModel):
        yield from _in_section(value, place)
        for name in type(value).model_fields:
            yield from _in_config(getattr(value, name), (*place, name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _in_config(item, (*place, number))


# -- what is refused ----------------------------------------------------------------------------


def _error(place: Place, value: Any, message: str) -> FieldError:
    return FieldError(
        pointer=printable(pointer(*place)),
        key=printable(".".join(map(str, place))),
        value=shown(value),
        message=message,
    )


def own_flags(config: RunConfig) -> list[FieldError]:
    """Flags of engines in the config that Ratchet sets itself, with or without lists."""
    arguments = config.inference.extra_args
    return [
        _error(("inference", "extra_args", number), arguments[number], message)
        for number, message in islice(engine_flags.own_flags(arguments), MOST_REPORTED)
    ]


def refused(
    config: RunConfig,
    code: Allowed,
    hosts: Allowed = None,
    variables: Allowed = None,
    models: Allowed = None,
    flags: Allowed = None,
) -> list[FieldError]:
    """What the config names and the lists do not allow; a list that is None allows everything. What
    no list could allow is refused unless code is unrestricted.
    """
    lists = {CODE: code, HOSTS: hosts, VARIABLES: variables, MODELS: models, FLAGS: flags}
    besides = {
        CODE: f"environments that ship ({', '.join(SHIPPED_ENVS)}), and",
        HOSTS: "loopback, and",
        VARIABLES: "RATCHET_…_KEY, and",
        MODELS: f"{', '.join(SHIPPED_MODELS)}, versions of other runs, and",
        FLAGS: "flags that only affect speed, and",
    }
    errors: list[FieldError] = []
    for input in _in_config(config):
        if len(errors) == MOST_REPORTED:
            break
        if isinstance(input, _Mistake):
            if code is not None:
                errors.append(_error(*input))
            continue
        allowed = lists[input.setting]
        if allowed is not None and not input.admits(allowed):
            message = (
                f"{input.what} that the API does not allow; allowed: {besides[input.setting]} what "
                f"{input.setting} of the API lists: {', '.join(allowed) or 'nothing'}"
            )
            errors.append(_error(input.place, input.value, message))
    return errors
