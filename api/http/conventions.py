"""What holds for every route: HEAD wherever there is GET, an `Allow` header with all methods of a
path, and no query parameter that the route does not know.
"""

import asyncio
import difflib

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.api.schemas.problems import ApiProblem, FieldError, joined, printable

MOST_REPORTED = 20
MOST_PARAMETERS = 200
"""In the query of one request."""


class Head:
    """Middleware that answers HEAD like GET, but without the body, of which it makes no more than
    the start.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            # A stream would never end: the timeout below stops it.
            limit.reschedule(0.0)
            await asyncio.get_running_loop().create_future()

        try:
            async with asyncio.timeout(None) as limit:
                await self._app({**scope, "method": "GET"}, receive, send_head)
        except TimeoutError:
            if not limit.expired():
                raise


def allowed(app: FastAPI, scope: Scope) -> str:
    """The methods of a path, as an `Allow` header; '' for an unknown path."""
    methods: set[str] = set()
    # A mount changes the scope's idea of where its paths begin.
    place = {**scope, "root_path": scope.get("app_root_path", scope.get("root_path", ""))}
    for route in app.routes:
        if route.matches(place)[0] is not Match.NONE:
            methods |= _methods(route)
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


def _methods(route: BaseRoute) -> set[str]:
    if isinstance(route, Mount):
        # Only files are mounted.
        return {"GET"}
    return set(route.methods or ()) if isinstance(route, Route) else set()


def _known(route: APIRoute) -> list[str]:
    """The query parameters of a route; one that is an object ends in '[]'."""
    declared = [str(field.alias) for field in route.dependant.query_params]
    further = (route.openapi_extra or {}).get("parameters", ())
    return declared + [f"{it['name']}[]" for it in further if it["in"] == "query"]


async def require_known_query(request: Request) -> None:
    """Raises 422 for a query parameter that the route does not know: a misspelled one would
    otherwise be ignored silently. Takes a few milliseconds for any query.
    """
    title = "The request has invalid parameters"
    # Counted before they are parsed.
    if (count := request.scope["query_string"].count(b"&") + 1) > MOST_PARAMETERS:
        detail = f"The query has {count} parameters; a request may have at most {MOST_PARAMETERS}."
        raise ApiProblem(422, "invalid-request", title, detail)
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = _known(route)
    objects = tuple(name.removesuffix("]") for name in known if name.endswith("[]"))
    errors = []
    for name, value in request.query_params.multi_items():
        if name in known or (name.endswith("]") and name.startswith(objects)):
            continue
        near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}? " if near else ""
        there = f"this route takes: {', '.join(known)}" if known else "this route takes none"
        errors.append(
            FieldError(
                pointer="",
                key=printable(f"query.{name}"),
                value=printable(value),
                message=f"unknown parameter; {hint}{there}",
            )
        )
        if len(errors) == MOST_REPORTED:
            break
    if errors:
        raise ApiProblem(422, "invalid-request", title, joined(errors), errors=errors)
