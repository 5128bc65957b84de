"""A curl call for each operation of the OpenAPI document, made from the document's examples."""

import json
import shlex
from typing import Any

ADDRESS = "localhost:8080"
PLACES = {"run_id": "RUN", "rid": "ROLLOUT", "name": "config.json"}
"""Placeholders for the parameters in a path, as in the docs."""
CONFIG = "configs/examples/reverse_text.toml"
TOML = "application/toml"


def call(method: str, path: str, operation: dict[str, Any]) -> str:
    """The command line for an operation."""
    words = ["curl", "-sS"]
    if method != "get":
        words += ["-X", method.upper()]
    words.append(ADDRESS + path.format_map(PLACES))
    content = operation.get("requestBody", {}).get("content", {})
    if TOML in content:
        words += ["-H", f"content-type: {TOML}", "--data-binary", f"@{CONFIG}"]
    elif content:
        media, described = next(iter(content.items()))
        words += ["-H", f"content-type: {media}", "-d", json.dumps(described["example"])]
    return shlex.join(words)


def add_calls(document: dict[str, Any]) -> None:
    """Appends to the description of each operation its call."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            text = operation.get("description", "")
            operation["description"] = f"{text}\n\n```sh\n{call(method, path, operation)}\n```"
