"""Pings a service that raises an alarm when a sign of life is missing.

Invariants: a ping follows finished work and can neither undo nor fail it. Logs show only the URL's
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
    """Requests `url`, or the URL in an environment variable, once `what` is done."""
    url = os.environ.get(variable, "").strip() if variable else url
    if not url:
        log.warning("%s: no ping, since %s is not set on this worker", what, variable)
        return
    try:
        place = urlsplit(url).hostname or "no host"
        # A redirect must not lead to an address that a config may not name.
        async with (
            asyncio.timeout(PING_S),
            httpx.AsyncClient(verify=shared_context(), follow_redirects=False) as client,
            # Only the status matters; a body might never end.
            client.stream("GET", url) as answer,
        ):
            pass
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError) as error:
        log.warning("%s: the heartbeat ping failed: %s", what, type(error).__name__)
        return
    if not answer.is_success:
        status = answer.status_code
        log.warning("%s: the heartbeat ping at %s was answered with %d", what, place, status)
