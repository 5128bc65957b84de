"""Reads request bodies with limits: on size, media type, and what JSON and TOML can hide."""

import asyncio
import json
from typing import Any

from fastapi import Request

from ratchet.api.schemas.bodies import MERGE_PATCH
from ratchet.api.schemas.problems import ApiProblem
from ratchet.configs.load import ConfigError, parse

MEDIA_TYPES = {"application/json": "json", "application/toml": "toml", "text/toml": "toml"}
BODY_WITHIN_S = 30.0
MAX_DEPTH = 32
MAX_VALUES = 10_000
"""Keys and values of one body: each costs time to process."""


def _too_large(limit: int) -> ApiProblem:
    return ApiProblem(
        413,
        "body-too-large",
        "The body is too large",
        f"A body may have at most {limit} bytes; large data belongs in files that a config names.",
    )


def wrong_media(detail: str) -> ApiProblem:
    """415: the body has a media type that is not supported here."""
    return ApiProblem(415, "unsupported-media-type", "The media type is not supported", detail)


def unreadable(why: str) -> ApiProblem:
    """400: the body is not what its media type says."""
    return ApiProblem(400, "unreadable-body", "The body cannot be read", why)


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body; raises 413 as soon as it is known to exceed `limit` bytes, and 408 if it has not
    arrived within BODY_WITHIN_S.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise ApiProblem(
            408,
            "body-too-slow",
            "The body did not arrive in time",
            f"A body must be sent within {BODY_WITHIN_S:.0f} s of its head.",
        ) from None
    return bytes(body)


def _named_media(request: Request) -> str:
    """The media type that a request names, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def media_of(request: Request) -> str:
    """'json' or 'toml'; raises 415 for anything else."""
    media = MEDIA_TYPES.get(_named_media(request))
    if media is None:
        header = request.headers.get("content-type", "")
        raise wrong_media(
            f"Content-Type is {header[:100]!r}; send application/json or application/toml."
        )
    return media


def decode(data: bytes, media: str) -> Any:
    """Plain data of a JSON or TOML body; raises 400 if it cannot be parsed."""
    try:
        return parse(data.decode(), media=media)
    except UnicodeDecodeError as error:
        raise unreadable(f"The body is not UTF-8 (byte {error.start}).") from None
    except ConfigError as error:
        raise unreadable(error.problems[0].message) from None
    except RecursionError:
        raise unreadable("The body is nested too deeply.") from None
    except ValueError as error:
        raise unreadable(f"not valid {media}: {error}") from None


def _require_bounded(data: Any) -> None:
    """Raises 400 or 413 for data that is deeper or larger than the limits."""
    left, level, values = [data], 0, 0
    while left := [
        item
        for inner in left
        for item in (
            inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
        )
    ]:
        level, values = level + 1, values + len(left)
        if level > MAX_DEPTH:
            raise unreadable(f"The body is nested more than {MAX_DEPTH} levels deep.")
        if values > MAX_VALUES:
            raise ApiProblem(
                413,
                "body-too-large",
                "The body is too large",
                f"A body may hold at most {MAX_VALUES} values; large data belongs in files that a "
                "config names.",
            )


def require_portable(data: Any) -> Any:
    """`data`, if every JSON parser can read it.

    Raises 400 for NaN, infinities, lone surrogates and more than MAX_DEPTH levels, 413 for more
    than MAX_VALUES values.
    """
    _require_bounded(data)
    try:
        json.dumps(data, ensure_ascii=False, allow_nan=False, default=str).encode()
    except UnicodeEncodeError:
        raise unreadable("The body holds a lone surrogate, which is not a character.") from None
    except ValueError:
        raise unreadable("The body holds NaN or an infinity, which JSON cannot carry.") from None
    return data


def optional_json(request: Request, data: bytes) -> dict[str, Any]:
    """The JSON object in a body, or {} for an empty one; raises 400 or 415. A PATCH may also
    declare it as a merge patch (RFC 7396).
    """
    if not data.strip():
        return {}
    patches = request.method == "PATCH" and _named_media(request) == MERGE_PATCH
    if not patches and media_of(request) != "json":
        also = f" or {MERGE_PATCH}" if request.method == "PATCH" else ""
        raise wrong_media(f"Send application/json{also}.")
    value = require_portable(decode(data, "json"))
    if not isinstance(value, dict):
        raise unreadable("The body must be a JSON object.")
    return value
