"""The TLS context that short-lived HTTP clients share: creating one costs 20 ms of CPU."""

import functools
import ssl

import httpx


@functools.cache
def shared_context() -> ssl.SSLContext:
    """The context that httpx clients verify certificates with by default."""
    return httpx.create_ssl_context()
