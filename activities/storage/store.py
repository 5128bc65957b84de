"""The artifact store: immutable artifacts on any fsspec filesystem, a local folder by default.

Invariants:

- Content is written first, under a name that holds its hash (files) or its attempt (folders);
  a marker `<key>.commit` is written last. What has no marker does not exist.
- A marker is created exclusively: of several attempts at one key the first to commit wins, and
  every later one is handed the winner's reference. So writes are idempotent and late writers
  are fenced.
- Readers verify the hash they were given; damage raises CorruptArtifact with key and path.
- Live records (`write_live`) are the one mutable kind: gauges, nothing a decision rests on.
"""

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec

from activities.storage.refs import ArtifactRef

MARKER = ".commit"


class CorruptArtifact(Exception):
    """An artifact whose bytes differ from what was committed, or that lost a part."""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ArtifactStore:
    """Artifacts under one root URL. Keys are '/'-separated and relative to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, root = fsspec.core.url_to_fs(url)
        self.root = root.rstrip("/")
        self.local = "file" in (
            self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,)
        )

    def path(self, key: str) -> str:
        """The full path of `key`; a key that would leave the root is refused."""
        if key.startswith("/") or ".." in key.split("/"):
            raise ValueError(f"artifact key {key!r} leaves the store")
        return f"{self.root}/{key}"

    # -- bytes and JSON ---------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, attempt: str = "", schema: int = 1) -> ArtifactRef:
        """Commits `data` under `key`; returns the reference of whoever committed first."""
        sha = hashlib.sha256(data).hexdigest()
        path = f"{key}@{sha[:16]}"
        self._write(self.path(path), data)
        return self._commit(ArtifactRef(key, sha, len(data), path, schema, attempt))

    def put_json(self, key: str, value: Any, *, attempt: str = "", schema: int = 1) -> ArtifactRef:
        """Commits a JSON value under `key`."""
        data = json.dumps(value, separators=(",", ":")).encode()
        return self.put(key, data, attempt=attempt, schema=schema)

    def get(self, ref: ArtifactRef) -> bytes:
        """The verified bytes of an artifact; raises CorruptArtifact."""
        try:
            data: bytes = self.fs.cat_file(self.path(ref.path))
        except FileNotFoundError:
            raise CorruptArtifact(f"{ref.key}: content {ref.path} is missing") from None
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise CorruptArtifact(f"{ref.key}: {ref.path} does not match its sha256")
        return data

    def get_json(self, ref: ArtifactRef) -> Any:
        """The verified JSON value of an artifact."""
        return json.loads(self.get(ref))

    # -- folders ----------------------------------------------------------------------------

    def put_folder(self, key: str, folder: Path, *, attempt: str, schema: int = 1) -> ArtifactRef:
        """Commits every file of a local folder as one artifact."""
        if found := self.committed(key):
            return found
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        files = {n: (_digest(folder / n), (folder / n).stat().st_size) for n in names}
        path = f"{key}@{attempt.replace('/', '-')}"
        for name in names:
            self._write(self.path(f"{path}/{name}"), (folder / name).read_bytes())
        manifest = json.dumps(files, sort_keys=True, separators=(",", ":")).encode()
        self._write(self.path(f"{path}/manifest.json"), manifest)
        size = sum(size for _, size in files.values())
        sha = hashlib.sha256(manifest).hexdigest()
        return self._commit(ArtifactRef(key, sha, size, path, schema, attempt))

    def fetch_folder(self, ref: ArtifactRef, cache: Path | None = None) -> Path:
        """A local, verified copy of a folder artifact (the folder itself on a local store)."""
        manifest_path = self.path(f"{ref.path}/manifest.json")
        if not self.fs.exists(manifest_path):
            raise CorruptArtifact(f"{ref.key}: {ref.path}/manifest.json is missing")
        manifest = self.fs.cat_file(manifest_path)
        if hashlib.sha256(manifest).hexdigest() != ref.sha256:
            raise CorruptArtifact(f"{ref.key}: its manifest does not match its sha256")
        if self.local:
            target = Path(self.path(ref.path))
        else:
            target = (cache or Path(tempfile.gettempdir()) / "ratchet-cache") / ref.sha256
        for name, (sha, _) in json.loads(manifest).items():
            file = target / name
            if not self.local and not (file.exists() and _digest(file) == sha):
                file.parent.mkdir(parents=True, exist_ok=True)
                part = file.with_name(f".part-{uuid.uuid4().hex}")
                self.fs.get_file(self.path(f"{ref.path}/{name}"), str(part))
                part.replace(file)
            if not file.exists() or _digest(file) != sha:
                raise CorruptArtifact(f"{ref.key}: {ref.path}/{name} does not match its sha256")
        return target

    # -- markers ----------------------------------------------------------------------------

    def committed(self, key: str) -> ArtifactRef | None:
        """The reference committed under `key`, or None."""
        try:
            marker = self.fs.cat_file(self.path(key + MARKER))
        except FileNotFoundError:
            return None
        return ArtifactRef(**json.loads(marker))

    def require(self, key: str) -> ArtifactRef:
        """The reference committed under `key`; raises FileNotFoundError."""
        ref = self.committed(key)
        if ref is None:
            raise FileNotFoundError(f"no artifact is committed under {key!r} in {self.url}")
        return ref

    def committed_keys(self, prefix: str) -> list[str]:
        """Keys committed directly below `prefix`, sorted."""
        folder = self.path(prefix.rstrip("/"))
        try:
            names = self.fs.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        start = len(self.root) + 1
        return sorted(n[start : -len(MARKER)] for n in names if n.endswith(MARKER))

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below `prefix`, sorted."""
        try:
            entries = self.fs.ls(self.path(prefix.rstrip("/")), detail=True)
        except FileNotFoundError:
            return []
        return sorted(e["name"].rsplit("/", 1)[-1] for e in entries if e["type"] == "directory")

    def delete(self, ref: ArtifactRef) -> None:
        """Forgets an artifact: its marker first, then its content."""
        self.fs.rm(self.path(ref.key + MARKER))
        self.fs.rm(self.path(ref.path), recursive=True)

    # -- live records -----------------------------------------------------------------------

    def write_live(self, key: str, value: Any) -> None:
        """Replaces a live record; readers see the old one or the new one, never half of it."""
        self._replace_live(key, json.dumps(value, separators=(",", ":")).encode())

    def read_live(self, key: str) -> Any | None:
        """A live record, or None."""
        try:
            return json.loads(self.fs.cat_file(self.path(key)))
        except FileNotFoundError:
            return None

    def write_lines(self, key: str, values: Sequence[Any]) -> None:
        """Replaces a live record of many JSON values, one a line."""
        lines = [json.dumps(value, separators=(",", ":")) + "\n" for value in values]
        self._replace_live(key, "".join(lines).encode())

    def read_lines(self, key: str) -> list[Any]:
        """The values of a live record of lines; none if there is no such record."""
        try:
            data = self.fs.cat_file(self.path(key))
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in data.splitlines()]

    def live_keys(self, prefix: str, suffix: str = ".json") -> list[str]:
        """Keys of the live records directly below `prefix` that end in `suffix`, sorted."""
        try:
            names = self.fs.ls(self.path(prefix.rstrip("/")), detail=False)
        except FileNotFoundError:
            return []
        start = len(self.root) + 1
        return sorted(n[start:] for n in names if n.endswith(suffix))

    # -- private ----------------------------------------------------------------------------

    def _replace_live(self, key: str, data: bytes) -> None:
        path = self.path(key)
        if self.local:
            self._replace_local(Path(path), data, sync=False)
        else:
            self.fs.pipe_file(path, data)

    def _write(self, path: str, data: bytes) -> None:
        if self.local:
            self._replace_local(Path(path), data, sync=True)
        else:
            self.fs.pipe_file(path, data)

    @staticmethod
    def _temporary(path: Path, data: bytes, *, sync: bool) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        return name

    @classmethod
    def _replace_local(cls, path: Path, data: bytes, *, sync: bool) -> None:
        os.replace(cls._temporary(path, data, sync=sync), path)

    def _commit(self, ref: ArtifactRef) -> ArtifactRef:
        path = self.path(ref.key + MARKER)
        data = json.dumps(asdict(ref)).encode()
        try:
            if self.local:
                name = self._temporary(Path(path), data, sync=True)
                try:
                    os.link(name, path)
                finally:
                    os.unlink(name)
            else:
                self.fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return self.require(ref.key)
        return ref


def free_bytes(store: ArtifactStore) -> int | None:
    """Free space of a local store in bytes; None where the store has no such limit."""
    if not store.local:
        return None
    Path(store.root).mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(store.root).free
