"""Pings a service that raises an alarm once it misses a sign of life.

Invariants: a ping follows finished work and cannot undo it or fail it. Logs show only the URL's
host: the rest may be a secret.
"""

import asyncio
import logging
import os
from urllib.parse import urlsplit

import httpx

from ratchet.activities.runtime.tls import shared_context

log = logging.getLogger(__name__)

PING_S = 10.0


async def ping(url: str, variable: str, what: str) -> None:
    """Asks for `url`, or for the one that an environment variable holds, once `what` is done."""
    url = os.environ.get(variable, "").strip() if variable else url
    if not url:
        log.warning("%s: no ping, since %s is not set on this worker", what, variable)
        return
    try:
        place = urlsplit(url).hostname or "no host"
        # An address that a config may not name must not be reached by way of one that it may.
        async with (
            asyncio.timeout(PING_S),
            httpx.AsyncClient(verify=shared_context(), follow_redirects=False) as client,
            # Of the answer its status counts; a body may never end.
            client.stream("GET", url) as answer,
        ):
            pass
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError) as error:
        log.warning("%s: the ping of its monitor failed: %s", what, type(error).__name__)
        return
    if not answer.is_success:
        status = answer.status_code
        log.warning("%s: the ping of its monitor at %s was answered %d", what, place, status)
