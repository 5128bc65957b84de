"""The OpenAPI document and its page.

The page is Swagger UI 5.35.0, vendored from the npm package `swagger-ui-dist` (Apache-2.0, licence
beside it), so that it works without a network.
"""

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from pydantic.json_schema import models_json_schema

from ratchet.activities.contracts.controls import CONTROLS
from ratchet.api.http.curl import add_calls
from ratchet.api.http.openapi import complete
from ratchet.api.http.security import documented_security
from ratchet.api.schemas.bodies import ConfigPatch, ForkBody, NoteBody
from ratchet.api.schemas.problems import ProblemDocument
from ratchet.configs.run import RunConfig

ASSETS = Path(__file__).parent / "static" / "swagger-ui"
DESCRIPTION = """\
Launches, monitors and steers durable RL post-training runs.

Create a run with `POST /v1/runs` (JSON or TOML), watch it with `GET /v1/runs/{id}`. Errors are
[RFC 9457](https://www.rfc-editor.org/rfc/rfc9457) problem documents whose `errors` list every
mistake with a JSON pointer to it.

Each operation has its curl call: RUN stands for a run's id, and where the API has keys, add
`-H "Authorization: Bearer $RATCHET_API_KEY"`.
"""


def _schemas() -> dict[str, Any]:
    """Schemas of bodies that are parsed by hand, and of problems."""
    _, document = models_json_schema(
        [
            (RunConfig, "validation"),
            *((verb.body, "validation") for verb in CONTROLS.values()),
            (ConfigPatch, "validation"),
            (ForkBody, "validation"),
            (NoteBody, "validation"),
            (ProblemDocument, "serialization"),
        ],
        ref_template="#/components/schemas/{model}",
    )
    schemas = document["$defs"]
    assert isinstance(schemas, dict)
    return schemas


def _drop_default_errors(document: dict[str, Any]) -> None:
    """Removes FastAPI's own 422, which it adds wherever a path has a parameter.

    Routes whose parameters can be wrong document their problem reply themselves.
    """
    for operations in document["paths"].values():
        for operation in operations.values():
            reply = operation["responses"].get("422", {"content": {}})
            if "application/json" in reply["content"]:
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def install(app: FastAPI) -> None:
    """Serves /openapi.json and /docs."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=DESCRIPTION,
                license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
                servers=[{"url": "/"}],
                routes=app.routes,
                tags=[
                    {"name": "runs", "description": "Create runs, list them, show one."},
                    {"name": "events", "description": "Watch: what happened to a run."},
                    {"name": "metrics", "description": "Watch: what a run measured."},
                    {"name": "rollouts", "description": "Watch: what the policy wrote."},
                    {"name": "artifacts", "description": "Watch: what else a run stored."},
                    {"name": "control", "description": "Steer a run; note, archive and delete it."},
                    {"name": "machines", "description": "What runs execute on."},
                    {"name": "health", "description": "For probes."},
                ],
            )
            known = document.setdefault("components", {}).setdefault("schemas", {})
            document["components"]["schemas"] = {**_schemas(), **known}
            _drop_default_errors(document)
            documented_security(document)
            complete(document)
            add_calls(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the extension point FastAPI documents
    app.mount("/docs/assets", StaticFiles(directory=ASSETS), name="docs-assets")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title=f"{app.title} API",
            swagger_js_url="/docs/assets/swagger-ui-bundle.js",
            swagger_css_url="/docs/assets/swagger-ui.css",
            swagger_favicon_url="/docs/assets/favicon-32x32.png",
            swagger_ui_parameters={
                "validatorUrl": None,
                "filter": True,
                "docExpansion": "list",
                "defaultModelsExpandDepth": 0,
                "defaultModelExpandDepth": 0,
            },
        )
