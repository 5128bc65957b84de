"""Models other than the one in training: they score a policy's tokens, or sample in its place.

A reference is either the word 'policy', the run's own model as its engines serve it at that
moment, or a frozen model behind an OpenAI-compatible endpoint. Keys of endpoints are never part
of a config, which is stored and shown: a config names the environment variable that holds one.
"""

import difflib
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ratchet.configs.base import Section, refusal
from ratchet.configs.variables import NAME

DEFAULT_KEY_VAR = "RATCHET_REFERENCE_KEY"
HIDDEN = "(not shown)"
"""Replaces a value that may be a secret, wherever an error would quote it."""

_SECRET = re.compile(r"key|token|secret|password|auth|bearer", re.IGNORECASE)
_NO_KEYS = (
    "a key itself never goes into a config: put it into an environment variable of rollout "
    "workers and env servers, and name that in api_key_var"
)


def _unknown(key: str, section: type[Section]) -> str:
    near = difflib.get_close_matches(key[:64], section.model_fields, n=1, cutoff=0.8)
    if near and near[0] != "api_key_var":
        return f"unknown key; did you mean {near[0]!r}?"
    if _SECRET.search(key):
        return f"unknown key; {_NO_KEYS}"
    return f"unknown key; valid keys: {', '.join(section.model_fields)}"


def url_problem(url: Any, form: str, bare: str) -> str:
    """`form` if `url` is no http(s) URL, `bare` if parts of it may hold a secret, else ''."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return form
    if not usable or re.search(r"\s", url):
        return form
    return bare if "@" in parts.netloc or parts.query or parts.fragment else ""


def _url_problem(url: Any) -> str:
    """Why an endpoint's address is invalid; '' if it is valid."""
    form = "must have the form http(s)://host:port"
    return url_problem(url, form, f"{form}, with a path at most; {_NO_KEYS}")


_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_SET_OTHERWISE = ("authorization", "connection", "content-length", "content-type", "host")


def _headers_problem(headers: Any) -> str:
    """Why a table of headers and variables is invalid; '' if it is valid."""
    form = f'must have the form {{ "X-Name" = "VARIABLE" }}, the variable in capitals; {_NO_KEYS}'
    if not isinstance(headers, dict) or len(headers) > 16:
        return f"{form}; at most 16 of them"
    for name, variable in headers.items():
        if not (isinstance(name, str) and _HEADER.fullmatch(name)):
            return form
        if name.lower() in _SET_OTHERWISE:
            return f"cannot set {name!r}: requests set it themselves, and api_key_var names the key"
        # Variables in capitals only: many keys would otherwise be valid names.
        if not (isinstance(variable, str) and re.fullmatch(NAME, variable)):
            return form
    return ""


def _more_urls_problem(urls: Any) -> str:
    """Why a list of additional endpoints is invalid; '' if it is valid."""
    if not isinstance(urls, list) or len(urls) > 63:
        return "must be a list of at most 63 URLs, such as base_url"
    return next((problem for url in urls if (problem := _url_problem(url))), "")


def _normal(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").rstrip("/") + "/v1"


class FrozenModelConfig(Section):
    """A model that does not change, behind one or more OpenAI-compatible endpoints of vLLM."""

    name: str = Field(
        min_length=1, description="The name under which the endpoint serves it (/v1/models)."
    )
    base_url: str = Field(
        description="http(s)://host:port of the endpoint; '/v1' at its end may be left out.",
    )
    api_key_var: str = Field(
        default=DEFAULT_KEY_VAR,
        description="Environment variable with the endpoint's key, on rollout workers and env "
        "servers. The default may be unset, for endpoints without one; any other must be set.",
    )
    max_concurrent: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="Requests in flight at once over all URLs, per worker process; of a source, "
        "rollouts.",
    )
    more_urls: list[str] = Field(
        default_factory=list,
        description="More endpoints that serve the same model under the same name. Each request "
        "goes to the URL with the fewest in flight; a URL that failed is skipped for 10 s.",
    )
    headers_from_env: dict[str, str] = Field(
        default_factory=dict,
        description="Additional headers of every request, each with the environment variable that "
        "holds its value, which must be set where api_key_var is.",
    )
    timeout_s: float = Field(
        default=1200.0, gt=0, le=86_400, description="Time limit for a reply, in seconds."
    )
    connect_timeout_s: float = Field(
        default=30.0, gt=0, le=3600, description="Time limit for a connection, in seconds."
    )
    max_retries: int = Field(
        default=3,
        ge=0,
        le=100,
        description="Retries of a request to a teacher after a server error, after 0.5 s, 1 s, "
        "2 s … and at most 30 s; after the last one its group is retried later. A source's rollout "
        "is always restarted from its beginning.",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_value_is_shown(cls, data: Any) -> Any:
        """Refuses what may hold a key without repeating it, as pydantic's own errors would."""
        if not isinstance(data, dict):
            return data
        for key in map(str, data):
            if key not in cls.model_fields:
                raise refusal("frozen model", key, _unknown(key, cls), HIDDEN)
        if "base_url" in data and (problem := _url_problem(data["base_url"])):
            raise refusal("frozen model", "base_url", problem, HIDDEN)
        checks = {"more_urls": _more_urls_problem, "headers_from_env": _headers_problem}
        for key, find in checks.items():
            if key in data and (problem := find(data[key])):
                raise refusal("frozen model", key, problem, HIDDEN)
        name = data.get("api_key_var", DEFAULT_KEY_VAR)
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            message = (
                "must be the name of an environment variable (capitals, digits, '_'), such as "
                f"{DEFAULT_KEY_VAR!r}; {_NO_KEYS}"
            )
            raise refusal("frozen model", "api_key_var", message, HIDDEN)
        return data

    @field_validator("base_url")
    @classmethod
    def _base_url_is_normal(cls, value: str) -> str:
        """The URL with a final '/v1', and no slash after it."""
        return _normal(value)

    @field_validator("more_urls")
    @classmethod
    def _more_urls_are_normal(cls, value: list[str]) -> list[str]:
        return [_normal(url) for url in value]

    @model_validator(mode="after")
    def _urls_differ(self) -> "FrozenModelConfig":
        if len(set(self.base_urls)) < len(self.base_urls):
            raise ValueError("base_url and more_urls contain one URL twice; remove one of them")
        return self

    @property
    def root(self) -> str:
        """The first endpoint's URL without '/v1'."""
        return self.base_url.removesuffix("/v1")

    @property
    def base_urls(self) -> list[str]:
        """All endpoints, in the order of the config."""
        return [self.base_url, *self.more_urls]

    @property
    def variables(self) -> list[str]:
        """The environment variables whose values requests carry."""
        return [self.api_key_var, *self.headers_from_env.values()]


def _reference(data: Any) -> Any:
    """Reads 'policy' or a table, so that errors are about only one of them."""
    if data == "policy" or isinstance(data, FrozenModelConfig):
        return data
    if isinstance(data, dict):
        return FrozenModelConfig.model_validate(data)
    raise ValueError("must be 'policy', or a table with the name and base_url of a frozen model")


ModelReference = Annotated[Literal["policy"] | FrozenModelConfig, BeforeValidator(_reference)]
"""The run's own policy, as its engines serve it, or a frozen model."""
