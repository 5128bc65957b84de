"""Serves the dashboard: one HTML page, its ES modules and styles, and the vendored uPlot.

The pages hold no data. Everything they show comes from `/v1` with the reader's own key, so that
serving them needs no authorisation. Nothing is loaded from elsewhere, which the Content Security
Policy enforces; what rollouts say is shown as text only.

Vendored: uPlot 1.6.32 from the npm package `uplot` (MIT, licence beside it).
"""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import Scope

FILES = Path(__file__).parent / "static"
PREFIX = "/dashboard"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    # Browsers ask whether a file has changed each time, so that an update of the service is seen.
    "Cache-Control": "no-cache",
}


class Files(StaticFiles):
    """Static files with the dashboard's headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file; raises HTTPException 404 for none."""
        answer = await super().get_response(path, scope)
        answer.headers.update(HEADERS)
        return answer


def install(app: FastAPI) -> None:
    """Serves the dashboard under /dashboard/ and leads there from /."""
    files = GZipMiddleware(Files(directory=FILES, html=True), minimum_size=1000)
    app.mount(PREFIX, files, name="dashboard")

    @app.get("/", include_in_schema=False)
    async def index() -> RedirectResponse:
        return RedirectResponse(f"{PREFIX}/")
