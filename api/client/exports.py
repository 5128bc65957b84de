"""Writes a model to a local folder.

Invariants: an existing folder is never touched; a folder that appears holds all files, each with
the hash that the API reported. Files are written to a hidden folder beside it, which is renamed
last.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ratchet.api.client.errors import NotExported
from ratchet.api.schemas.artifacts import Model, ModelFile

CARD = "README.md"
MERGER = "ratchet.activities.training.merging"

OnBytes = Callable[[int], None]
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


def require_merger() -> None:
    """Raises NotExported if adapters cannot be merged here."""
    missing = [name for name in ("torch", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotExported(
            f"the run keeps only its adapter, and merging it requires {' and '.join(missing)}: pip "
            "install 'ratchet-rl[trainer]', or export the adapter and version 0 (--step 0)"
        )


def write_merged(
    adapter: Model, base: Model, folder: Path, fetches: tuple[Fetch, Fetch], on_bytes: OnBytes
) -> Model:
    """Writes `adapter` merged into its `base`, and the card; returns that model. `fetches` are of
    the files of each. Raises as `write_model` does, and NotExported if they cannot be merged.
    """
    with _beside(folder) as part:
        write_model(adapter, part / "adapter", fetches[0], on_bytes)
        after = adapter.size
        write_model(base, part / "base", fetches[1], lambda done: on_bytes(after + done))
        (part / "base" / CARD).unlink()
        whole = part / "whole"
        places = [str(part / name) for name in ("base", "adapter", "whole")]
        # Without its working folder, where users keep modules of any name.
        argv = [sys.executable, "-P", "-m", MERGER, *places]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode != 0:
            raise NotExported(
                f"step {adapter.step} of {adapter.run_id} could not be merged into version 0: "
                f"{done.stderr.strip()[-2000:]}; export the two (--step {adapter.step}, --step 0), "
                "and merge them with peft"
            )
        files = [
            ModelFile(name=name, size=file.stat().st_size, sha256=_sha256(file))
            for file in sorted(whole.rglob("*"))
            if file.is_file() and (name := str(file.relative_to(whole)))
        ]
        card = adapter.merged_card or adapter.card
        (whole / CARD).write_text(card)
        require_absent(folder)
        whole.rename(folder)
    size = sum(file.size for file in files)
    more = {"kind": "model", "card": card, "merged_card": None, "files": files, "size": size}
    return adapter.model_copy(update=more)


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder`, gone afterwards. Errors of the disk become NotExported."""
    part = folder.with_name(f".{folder.name}.part-{uuid.uuid4().hex[:8]}")
    try:
        part.mkdir(parents=True)
        yield part
    except OSError as error:
        raise NotExported(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_model(model: Model, folder: Path, fetch: Fetch, on_bytes: OnBytes) -> None:
    """Writes all files of `model`, and its card. Raises NotExported, and what `fetch` raises."""
    with _beside(folder) as part:
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
