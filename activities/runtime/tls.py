"""The TLS context that short-lived HTTP clients share: each would make its own, in 20 ms of CPU."""

import functools
import ssl

import httpx


@functools.cache
def shared_context() -> ssl.SSLContext:
    """What clients of httpx verify certificates with by default."""
    return httpx.create_ssl_context()
