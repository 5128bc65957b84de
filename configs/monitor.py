"""Heartbeats to services outside that watch over a run.

The URL of a heartbeat is often a secret by itself: then a config names the environment variable
that holds it.
"""

from typing import Any

from pydantic import Field, model_validator

from ratchet.configs.base import Section, refusal
from ratchet.configs.reference import HIDDEN, url_problem
from ratchet.configs.variables import VariableConfig, named_variable

_NAMED = '{ env_var = "NAME" } names a variable of orchestrator workers that holds it'


def _problem(url: Any) -> str:
    """Why a URL to ping is invalid; '' if it is valid."""
    form = f"must have the form http(s)://host/path; {_NAMED}"
    if not isinstance(url, str) or len(url) > 2000 or "\\" in url:
        return form
    bare = f"must have no user, query or fragment, which may be secrets: {_NAMED}"
    return url_problem(url, form, bare)


class MonitorConfig(Section):
    """Heartbeats to services that raise an alarm when one is missing."""

    heartbeat_url: str | VariableConfig | None = Field(
        default=None,
        description='A URL that receives a GET after each step, or { env_var = "NAME" }, a '
        "variable of orchestrator workers that holds it. A failed ping only logs a warning in the "
        "worker's log; redirects are not followed.",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_url_is_shown(cls, data: Any) -> Any:
        """Refuses what may be a secret without repeating it."""
        url = data.get("heartbeat_url") if isinstance(data, dict) else None
        named = isinstance(url, dict | VariableConfig)
        if url is not None and not named and (problem := _problem(url)):
            raise refusal("monitor", "heartbeat_url", problem, HIDDEN)
        if isinstance(url, dict) and named_variable(url) is None:
            message = f"must be a URL, or {_NAMED}, the name in capitals, digits and '_'"
            raise refusal("monitor", "heartbeat_url", message, HIDDEN)
        return data

    @property
    def url(self) -> str:
        """The URL, if it is in the config."""
        return self.heartbeat_url if isinstance(self.heartbeat_url, str) else ""

    @property
    def url_var(self) -> str:
        """The variable that holds the URL, if one does."""
        held = self.heartbeat_url
        return held.env_var if isinstance(held, VariableConfig) else ""
