"""What the OpenAPI document says about all operations: headers, refusals, examples of replies.

Each part is derived from the models and routes, so that nothing is written twice.
Invariant: what is derived holds for every request; what holds for one route is documented there.
"""

from typing import Any

from ratchet.api.schemas.common import ListOf

PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
JSON = "application/json"
REF = "#/components/schemas/"
HEADERS: dict[str, Any] = {
    "RequestId": {
        "description": "The request's id, as in the API's log and the run's events.",
        "schema": {"type": "string", "format": "uuid"},
        "example": "6f2c1c0e-5d0e-4d8e-9a53-0a3f3f7d6c11",
    },
    "RetryAfter": {
        "description": "Seconds until the next try, where known.",
        "schema": {"type": "integer", "minimum": 1},
        "example": 5,
    },
    "Location": {
        "description": "Address of the new run.",
        "schema": {"type": "string"},
        "example": "/v1/runs/reverse-1a2b3c",
    },
}
SENT_WITH = {"201": ("Location",), **dict.fromkeys(("409", "429", "503"), ("RetryAfter",))}
NAMES = {"RequestId": "x-request-id", "RetryAfter": "Retry-After", "Location": "Location"}


def complete(document: dict[str, Any]) -> None:
    """Adds to a document what holds for all its operations and schemas."""
    schemas = document["components"]["schemas"]
    document["components"]["headers"] = {name: HEADERS[name] for name in NAMES}
    for name, schema in schemas.items():
        if name.startswith(f"{ListOf.__name__}_"):
            schema["description"] = ListOf.__doc__
        _describe(schema, schemas)
    _require_types(schemas)
    for operations in document["paths"].values():
        for operation in operations.values():
            _refuse_unknown(operation)
            if "requestBody" in operation:
                late = {"description": "The body did not arrive in time.", "content": PROBLEM}
                operation["responses"].setdefault("408", late)
            for status, reply in operation["responses"].items():
                sent = reply.setdefault("headers", {})
                for name in ("RequestId", *SENT_WITH.get(status, ())):
                    sent[NAMES[name]] = {"$ref": f"#/components/headers/{name}"}
                content = reply.get("content", {}).get(JSON)
                if content is not None and "example" not in content:
                    content["example"] = example_of(content["schema"], schemas)


def _refuse_unknown(operation: dict[str, Any]) -> None:
    """Documents that an operation refuses unknown query parameters."""
    reply = {"description": "The request has mistakes, or an unknown query parameter."}
    operation["responses"].setdefault("422", {**reply, "content": PROBLEM})


def _named(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema that a schema refers to, or the schema itself."""
    ref = schema.get("$ref")
    named: dict[str, Any] = schemas[ref.removeprefix(REF)] if ref else schema
    return named


def _describe(schema: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Describes properties that explain themselves: constants, sections, unions."""
    for field in schema.get("properties", {}).values():
        if "description" in field:
            continue
        one = next(part for part in field.get("anyOf", [field]) if part.get("type") != "null")
        if "const" in one:
            field["description"] = f"Always '{one['const']}', which identifies this kind."
        elif "discriminator" in one:
            known = ", ".join(f"'{name}'" for name in one["discriminator"]["mapping"])
            field["description"] = f"`type` chooses one of {known}."
        elif "$ref" in one:
            field["description"] = _named(one, schemas)["description"].partition("\n\n")[0]


def _require_types(schemas: dict[str, Any]) -> None:
    """Where `type` chooses one of several schemas, each of them requires it."""
    unions: list[dict[str, Any]] = []

    def collect(part: Any) -> None:
        if isinstance(part, dict):
            if "discriminator" in part:
                unions.append(part)
            part = list(part.values())
        if isinstance(part, list):
            for inner in part:
                collect(inner)

    collect(schemas)
    for union in unions:
        name = union["discriminator"]["propertyName"]
        for ref in union["discriminator"]["mapping"].values():
            required = _named({"$ref": ref}, schemas).setdefault("required", [])
            if name not in required:
                required.append(name)


def example_of(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """An example of a schema: its own, or one composed from the examples of its parts."""
    schema = _named(schema, schemas)
    if "examples" in schema:
        return schema["examples"][0]
    for key in ("example", "const", "default"):
        if key in schema:
            return schema[key]
    if parts := schema.get("anyOf", ()):
        return None if {"type": "null"} in parts else example_of(parts[0], schemas)
    if schema.get("type") == "array":
        return [example_of(schema["items"], schemas)]
    return {
        name: example_of(field, schemas)
        for name, field in schema["properties"].items()
        if name in schema.get("required", ()) or {"examples", "const"} & field.keys()
    }
