"""What builds left behind, as recorded: each item must go on under the code as it is."""

import gzip
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUILD = "c20687b"
"""The build whose items have no schema number."""
BUILDS = (BUILD, "c49e718")
"""All builds, the oldest first."""


def item(name: str, build: str = BUILD) -> Any:
    """A recorded JSON value."""
    return json.loads(gzip.decompress((HERE / build / f"{name}.json.gz").read_bytes()))


def names(pattern: str, build: str = BUILD) -> list[str]:
    """Names of the items that match a pattern."""
    folder = HERE / build
    found = [path.relative_to(folder).as_posix() for path in folder.glob(f"{pattern}.json.gz")]
    return sorted(name.removesuffix(".json.gz") for name in found)
