"""Writes a model to a local folder.

Invariants: an existing folder is never touched; a folder that appears holds all files, each with
the hash that the API reported. Files are written to a hidden folder beside it, which is renamed
last.
"""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from ratchet.api.client.errors import NotExported
from ratchet.api.schemas.artifacts import Model

CARD = "README.md"

Fetch = Callable[[str, Path, Callable[[int], None]], str]
"""Writes the model file of that name to a path, reporting the bytes so far; returns its sha256."""


def require_absent(folder: Path) -> None:
    """Raises NotExported if `folder` exists."""
    if os.path.lexists(folder):
        raise NotExported(f"{folder} already exists and is not overwritten: name another folder")


def _place(part: Path, name: str) -> Path:
    file = part / name
    if not file.resolve().is_relative_to(part.resolve()):
        raise NotExported(f"the API names a file {name!r}, which would lie outside the folder")
    return file


def write_model(model: Model, folder: Path, fetch: Fetch, on_bytes: Callable[[int], None]) -> None:
    """Writes all files of `model`, and its card. Raises NotExported, and what `fetch` raises."""
    part = folder.with_name(f".{folder.name}.part-{uuid.uuid4().hex[:8]}")
    try:
        part.mkdir(parents=True)
        free = shutil.disk_usage(part).free
        if free < model.size:
            raise NotExported(
                f"{folder} needs {model.size / 2**20:.0f} MiB and its disk has "
                f"{free / 2**20:.0f} MiB free: free some space there, or name another folder"
            )
        done = 0
        for item in model.files:
            file = _place(part, item.name)
            file.parent.mkdir(parents=True, exist_ok=True)

            def progress(of_file: int, before: int = done) -> None:
                on_bytes(before + of_file)

            sha = fetch(item.name, file, progress)
            if sha != item.sha256:
                raise NotExported(
                    f"{item.name} differs from the file of version {model.step}: try again; if the "
                    "error persists, the store's own file is damaged, so export another step"
                )
            done += item.size
        (part / CARD).write_text(model.card)
        require_absent(folder)
        part.rename(folder)
    except OSError as error:
        raise NotExported(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
