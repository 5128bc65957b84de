"""Serves the dashboard: one HTML page, its ES modules and styles, and the vendored uPlot.

One module is made of the service's own tables: `contract.js`, with the verbs of a run, its statuses
and the config keys that may change.

The pages hold no data. Everything they show comes from `/v1` with the reader's own key, so that
serving them needs no authorisation. Nothing is loaded from elsewhere, which the Content Security
Policy enforces; what rollouts say is shown as text only.

Vendored: uPlot 1.6.32 from the npm package `uplot` (MIT, licence beside it).
"""

import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import Scope

from ratchet.activities.contracts.controls import CONTROLS
from ratchet.activities.contracts.statuses import ENDED, STATUSES
from ratchet.configs.live import LIVE_KEYS

FILES = Path(__file__).parent / "static"
PREFIX = "/dashboard"
CONTRACT = "contract.js"
SHOWN = ("name", "label", "text", "offered", "of_training", "danger", "confirm", "dismiss")
FORM = ("type", "enum", "default")
"""What a dialog needs from the JSON schema of a field."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    # Browsers ask whether a file has changed each time, so that an update of the service is seen.
    "Cache-Control": "no-cache",
}


def contract() -> str:
    """The JavaScript module with constants of the service that the pages use."""
    verbs = []
    for verb in CONTROLS.values():
        schemas = verb.body.model_json_schema()["properties"]
        shown: dict[str, Any] = {key: getattr(verb, key) for key in SHOWN}
        fields = {
            name: {key: schemas[name][key] for key in FORM if key in schemas[name]}
            for name in verb.fields
        }
        labels = dict(verb.labels) if fields else {}
        verbs.append({**shown, "labels": labels, "fields": fields})
    shared = {"CONTROLS": verbs, "LIVE": LIVE_KEYS, "STATUSES": STATUSES, "ENDED": ENDED}
    return "".join(f"export const {name} = {json.dumps(shared[name])};\n" for name in shared)


class Files(StaticFiles):
    """Static files and the contract, with the dashboard's headers."""

    _contract = contract()

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file; raises HTTPException 404 for none."""
        answer: Response
        if path == CONTRACT and scope["method"] in ("GET", "HEAD"):
            answer = Response(self._contract, media_type="text/javascript")
        else:
            answer = await super().get_response(path, scope)
        answer.headers.update(HEADERS)
        return answer


def install(app: FastAPI) -> None:
    """Serves the dashboard under /dashboard/ and redirects / to it."""
    files = GZipMiddleware(Files(directory=FILES, html=True), minimum_size=1000)
    app.mount(PREFIX, files, name="dashboard")

    @app.get("/", include_in_schema=False)
    async def index() -> RedirectResponse:
        return RedirectResponse(f"{PREFIX}/")
