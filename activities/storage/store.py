"""The artifact store: immutable artifacts on any fsspec filesystem, a local folder by default.

Invariants:

- Content is written first, under a name that holds its hash (files) or its attempt (folders);
  a marker `<key>.commit` is written last. What has no marker does not exist. A small file may be
  `put_inside` its marker, before the reference and a line break: one file, that is there or not.
- A marker is created exclusively: of several attempts at one key the first to commit wins, and
  every later one gets the winner's reference. So writes are idempotent and late writers are fenced.
- Readers verify the hash in the reference; damage raises CorruptArtifact with key and path, and a
  schema above the one the reader knows raises its subclass FutureArtifact.
- Every answer of a filesystem is 'not found', 'exists already', or StoreUnavailable, which says
  what failed, where, why, and what fixes it. Nothing is retried here.
- A committed artifact is on disk, names included: the folders are synced, too, content before
  marker. So a crash of the machine reverts nothing that was reported to a workflow.
- A mount point without its disk is neither read as an empty store nor written to, and a remote
  store that does not create exclusively is not used (`usable`).
- A failed write leaves nothing of its own behind: on a full disk that would keep it full.
- Live records (`write_live`) are the only mutable kind: gauges, on which no decision depends.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import fsspec

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage.cache import Cache
from ratchet.activities.storage.files import (
    CHUNK,
    chunks,
    create,
    make_folder,
    replace,
    sync_folder,
)
from ratchet.activities.storage.usable import MARK, Mark, require_exclusive
from ratchet.activities.storage.usable import StoreUnavailable as StoreUnavailable
from ratchet.activities.storage.usable import UnusableStore as UnusableStore
from ratchet.activities.storage.usable import remedy as remedy

MARKER = ".commit"
MANIFEST = "manifest.json"


class CorruptArtifact(Exception):
    """An artifact whose bytes differ from what was committed, or that lost a part."""

    remedy = "restore it from a copy of the store, or resume the run from an earlier checkpoint"


class FutureArtifact(CorruptArtifact):
    """An artifact in a schema that only later versions of Ratchet know."""

    remedy = "read it with that version, or resume the run from an earlier checkpoint"


def require_schema(where: str, result: Any, known: int) -> None:
    """Raises FutureArtifact if schema `result` is a number above `known`."""
    if isinstance(result, int) and result > known:
        raise FutureArtifact(
            f"{where}: schema {result} is later than {known}, the latest that this build reads: a "
            "later version of Ratchet wrote it"
        )


def digest(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_inside(ref: ArtifactRef) -> bool:
    return ref.path == ref.key + MARKER


def _is_folder(ref: ArtifactRef) -> bool:
    return not _is_inside(ref) and ref.path != f"{ref.key}@{ref.sha256[:16]}"


def _mismatch(key: str, path: str, result: int, size: int) -> CorruptArtifact:
    reported = f": it has {result} of {size} bytes" if result != size else ""
    return CorruptArtifact(f"{key}: {path} does not match its sha256{reported}")


def _reference(key: str, path: str, marker: bytes) -> ArtifactRef:
    """The reference in a marker; raises CorruptArtifact if it is not a reference to `key`."""
    known = {field.name: field.type for field in fields(ArtifactRef)}
    try:
        value = json.loads(marker.rpartition(b"\n")[2])
    except ValueError:
        raise CorruptArtifact(f"{key}: its marker {path} is incomplete or not JSON") from None
    if not isinstance(value, dict) or (set(known) - {"schema", "attempt"}) - set(value):
        raise CorruptArtifact(f"{key}: its marker {path} lacks fields of a reference")
    if unknown := sorted(set(value) - set(known)):
        raise FutureArtifact(
            f"{key}: its marker {path} has unknown fields ({', '.join(unknown)}): a later version "
            "of Ratchet wrote it"
        )
    wrong = [name for name in value if type(value[name]) is not known[name]]
    if wrong or value["key"] != key:
        raise CorruptArtifact(
            f"{key}: its marker {path} belongs to another artifact or is damaged: "
            + ", ".join(f"{name} {value[name]!r}" for name in wrong or ["key"])
        )
    return ArtifactRef(**value)


class ArtifactStore:
    """Artifacts under one root URL. Keys are '/'-separated and relative to it."""

    def __init__(self, url: str, known: Path | None = None) -> None:
        """`known` is a file of this machine that remembers marked local stores; without it no mark
        is required.
        """
        self.url = url
        self._exclusive = False
        self.fs, root = fsspec.core.url_to_fs(url)
        self.root = root.rstrip("/")
        self.local = "file" in (
            self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,)
        )
        self._mark = Mark(Path(self.root), known) if self.local and known else None

    def path(self, key: str) -> str:
        """The full path of `key`; refuses a key that would leave the root."""
        if key.startswith("/") or ".." in key.split("/"):
            raise ValueError(f"artifact key {key!r} leaves the store")
        return f"{self.root}/{key}"

    def require_usable(self) -> None:
        """Raises UnusableStore if the store cannot be used, StoreUnavailable if it is away."""
        if self.local:
            with self._reaching("write", MARK):
                pass
        else:
            self._require_exclusive(MARK)

    def _require_exclusive(self, path: str) -> None:
        """Checks once whether a remote store creates exclusively; raises UnusableStore."""
        if not self._exclusive:
            with self._reaching("write", path):
                require_exclusive(self.fs, self.path(f"live/probe-{uuid.uuid4().hex}"))
            self._exclusive = True

    def free_bytes(self) -> int | None:
        """Free space in bytes; None if the store has no such limit."""
        if not self.local:
            return None
        with self._reaching("measure", ""):
            make_folder(Path(self.root), sync=True)
            return shutil.disk_usage(self.root).free

    # -- bytes and JSON ---------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, attempt: str = "", schema: int = 1) -> ArtifactRef:
        """Commits `data` under `key`; returns the reference of the first to commit."""
        sha = hashlib.sha256(data).hexdigest()
        path = f"{key}@{sha[:16]}"
        self._write(path, data)
        return self._commit(ArtifactRef(key, sha, len(data), path, schema, attempt))

    def put_inside(
        self, key: str, data: bytes, *, attempt: str = "", schema: int = 1
    ) -> ArtifactRef:
        """As `put`, in the marker itself: half the files, syncs and requests."""
        sha, path = hashlib.sha256(data).hexdigest(), key + MARKER
        return self._commit(ArtifactRef(key, sha, len(data), path, schema, attempt), data)

    def put_json(self, key: str, value: Any, *, attempt: str = "", schema: int = 1) -> ArtifactRef:
        """Commits a JSON value under `key`."""
        data = json.dumps(value, separators=(",", ":")).encode()
        return self.put(key, data, attempt=attempt, schema=schema)

    def get(self, ref: ArtifactRef, *, schema: int = 1) -> bytes:
        """The verified bytes of an artifact. `schema` is the latest that the caller reads.

        Raises CorruptArtifact.
        """
        require_schema(ref.key, ref.schema, schema)
        data = self._part(ref, ref.path)
        if _is_inside(ref):
            data = data[: ref.size]
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise _mismatch(ref.key, ref.path, len(data), ref.size)
        return data

    def get_json(self, ref: ArtifactRef, *, schema: int = 1) -> Any:
        """The verified JSON value of an artifact. `schema` is the latest that the caller reads, in
        the reference and in an object's own field 'schema'. Raises CorruptArtifact.
        """
        value = json.loads(self.get(ref, schema=schema))
        if isinstance(value, dict):
            require_schema(f"{ref.key} ({ref.path})", value.get("schema"), schema)
        return value

    # -- folders ----------------------------------------------------------------------------

    def put_folder(
        self,
        key: str,
        folder: Path,
        *,
        attempt: str,
        schema: int = 1,
        without: Collection[str] = (),
    ) -> ArtifactRef:
        """Commits all files of a local folder as one artifact, except those named in `without`."""
        if result := self.committed(key):
            return result
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        path = f"{key}@{attempt.replace('/', '-')}"
        try:
            files = {
                name: self._upload(f"{path}/{name}", folder / name)
                for name in names
                if name not in without
            }
            manifest = json.dumps(files, sort_keys=True, separators=(",", ":")).encode()
            self._sync_below(path, files)
            self._write(f"{path}/{MANIFEST}", manifest)
        except BaseException:
            self._discard(path)
            raise
        size = sum(size for _, size in files.values())
        sha = hashlib.sha256(manifest).hexdigest()
        try:
            ref = self._commit(ArtifactRef(key, sha, size, path, schema, attempt))
        except StoreUnavailable:
            # On a remote store the marker may still appear.
            if self.local and not os.path.lexists(self.path(key + MARKER)):
                self._discard(path)
            raise
        if ref.path != path:
            self._discard(path)
        return ref

    def fetch_folder(self, ref: ArtifactRef, cache: Path | None = None, *, schema: int = 1) -> Path:
        """A local, verified copy of a folder artifact (the folder itself on a local store).

        `schema` is the latest that the caller reads. Raises CorruptArtifact.
        """
        require_schema(ref.key, ref.schema, schema)
        files = self.manifest(ref)
        if self.local:
            for name in files:
                self._verify_file(ref, name, *files[name])
            return Path(self.path(ref.path))
        kept = Cache() if cache is None else None
        target = kept.entry(ref.sha256) if kept else (cache or Path()) / ref.sha256
        for name, (sha, size) in files.items():
            path, file = f"{ref.path}/{name}", target / name
            try:
                with self._reaching("read", path, FileNotFoundError):
                    if not (file.exists() and digest(file) == sha):
                        self._download(path, file)
                    result, length = digest(file), file.stat().st_size
            except FileNotFoundError:
                raise CorruptArtifact(f"{ref.key}: {path} is missing") from None
            if result != sha:
                raise _mismatch(ref.key, path, length, size)
        if kept:
            kept.trim()
        return target

    def manifest(self, ref: ArtifactRef) -> dict[str, tuple[str, int]]:
        """Hash and size of each file of a folder artifact, by name; raises CorruptArtifact."""
        manifest = self._part(ref, f"{ref.path}/{MANIFEST}")
        if hashlib.sha256(manifest).hexdigest() != ref.sha256:
            raise CorruptArtifact(f"{ref.key}: {ref.path}/{MANIFEST} does not match its sha256")
        files = {name: (sha, size) for name, (sha, size) in json.loads(manifest).items()}
        for name in files:
            # Whoever writes to the store names files; readers write them to their own disks.
            if {"", ".", ".."} & set(name.split("/")) or "\0" in name:
                raise CorruptArtifact(
                    f"{ref.key}: {ref.path}/{MANIFEST} names {name!r}, which is outside the folder"
                )
        return files

    def _verify_file(self, ref: ArtifactRef, name: str, sha: str, size: int) -> None:
        result, length = hashlib.sha256(), 0
        try:
            for piece in self.pieces(ref, name):
                result.update(piece)
                length += len(piece)
        except FileNotFoundError:
            raise CorruptArtifact(f"{ref.key}: {ref.path}/{name} is missing") from None
        if result.hexdigest() != sha:
            raise _mismatch(ref.key, f"{ref.path}/{name}", length, size)

    def copy(
        self, ref: ArtifactRef, key: str, *, attempt: str, without: Collection[str] = ()
    ) -> ArtifactRef:
        """Commits the verified content of an artifact under another key, as a separate copy; of a
        folder all files except those named in `without`. Raises CorruptArtifact.
        """
        if not _is_folder(ref):
            data = self.get(ref, schema=ref.schema)
            return self.put(key, data, attempt=attempt, schema=ref.schema)
        with tempfile.TemporaryDirectory(prefix="ratchet-copy-") as cache:
            folder = self.fetch_folder(ref, Path(cache), schema=ref.schema)
            left_out = {MANIFEST, *without}
            return self.put_folder(
                key, folder, attempt=attempt, schema=ref.schema, without=left_out
            )

    def verify(self, ref: ArtifactRef, *, schema: int | None = None) -> None:
        """Reads all of an artifact and keeps nothing of it; raises CorruptArtifact. `schema` is the
        latest that the caller reads; None: any.
        """
        if _is_folder(ref):
            require_schema(ref.key, ref.schema, schema or ref.schema)
            for name, (sha, size) in self.manifest(ref).items():
                self._verify_file(ref, name, sha, size)
        else:
            self.get(ref, schema=ref.schema)

    def read_file(self, ref: ArtifactRef, name: str) -> bytes:
        """One file of a folder artifact, not verified; raises FileNotFoundError."""
        return self._read(f"{ref.path}/{name}")

    def pieces(self, ref: ArtifactRef, name: str) -> Iterator[bytes]:
        """One file of a folder artifact piece by piece, not verified; raises FileNotFoundError."""
        path = f"{ref.path}/{name}"
        with (
            self._reaching("read", path, FileNotFoundError),
            self.fs.open(self.path(path), "rb") as file,
        ):
            while piece := file.read(CHUNK):
                yield piece

    def info(self, path: str) -> dict[str, Any]:
        """What the filesystem reports about a file, such as 'size'; raises FileNotFoundError."""
        with self._reaching("look at", path, FileNotFoundError):
            result: dict[str, Any] = self.fs.info(self.path(path))
        return result

    # -- markers ----------------------------------------------------------------------------

    def committed(self, key: str) -> ArtifactRef | None:
        """The reference committed under `key`, or None; raises CorruptArtifact if the marker is
        damaged.
        """
        try:
            marker = self._read(key + MARKER)
        except FileNotFoundError:
            return None
        return _reference(key, self._place(key + MARKER), marker)

    def require(self, key: str) -> ArtifactRef:
        """The reference committed under `key`; raises FileNotFoundError."""
        ref = self.committed(key)
        if ref is None:
            raise FileNotFoundError(f"no artifact is committed under {key!r} in {self.url}")
        return ref

    def committed_keys(self, prefix: str) -> list[str]:
        """Keys committed directly below `prefix`, sorted."""
        return [key.removesuffix(MARKER) for key in self.live_keys(prefix, MARKER)]

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below `prefix`, sorted."""
        entries = self._list(prefix, detail=True)
        return sorted(e["name"].rsplit("/", 1)[-1] for e in entries if e["type"] == "directory")

    def delete(self, ref: ArtifactRef) -> None:
        """Deletes an artifact: its marker first, then its content; raises FileNotFoundError."""
        with self._reaching("delete", ref.key, FileNotFoundError):
            self.fs.rm(self.path(ref.key + MARKER))
            if not _is_inside(ref):
                self.fs.rm(self.path(ref.path), recursive=True)

    def size_of(self, prefix: str) -> int:
        """Bytes that all files below `prefix` take: on a local disk its blocks; 0 if there are
        none. Files written or deleted meanwhile may or may not count.
        """
        path = self.path(prefix)
        try:
            with self._reaching("measure", prefix, FileNotFoundError):
                if not self.local:
                    return int(self.fs.du(path))
                if not os.path.isdir(path):
                    raise FileNotFoundError(path)
                return sum(
                    os.lstat(f"{folder}/{name}").st_blocks * 512
                    for folder, _, names in os.walk(path)
                    for name in names
                )
        except FileNotFoundError:
            return 0

    def delete_folder(self, prefix: str) -> None:
        """Deletes an unreferenced file, or folder with its contents; a missing one is no error."""
        with (
            contextlib.suppress(FileNotFoundError),
            self._reaching("delete", prefix, FileNotFoundError),
        ):
            self.fs.rm(self.path(prefix), recursive=True)

    # -- live records -----------------------------------------------------------------------

    def write_live(self, key: str, value: Any, *, sync: bool = False) -> None:
        """Replaces a live record; readers see the old one or the new one, never half of it. With
        `sync` it is on disk when this returns.
        """
        self._write(key, json.dumps(value, separators=(",", ":")).encode(), sync=sync)

    def read_live(self, key: str) -> Any | None:
        """A live record, or None; one torn by a crash of the machine counts as none."""
        try:
            return json.loads(self._read(key))
        except (FileNotFoundError, ValueError):
            return None

    def write_lines(self, key: str, values: Sequence[Any]) -> None:
        """Replaces a live record of many JSON values, one per line."""
        lines = [json.dumps(value, separators=(",", ":")) + "\n" for value in values]
        self._write(key, "".join(lines).encode(), sync=False)

    def read_lines(self, key: str) -> list[Any]:
        """The values of a live record of lines; empty if there is no such record, or if a crash of
        the machine tore it.
        """
        try:
            return [json.loads(line) for line in self._read(key).splitlines()]
        except (FileNotFoundError, ValueError):
            return []

    def touch(self, keys: Iterable[str]) -> None:
        """Creates empty files, on disk when this returns; existing ones stay."""
        folders: set[Path] = set()
        for key in keys:
            path = Path(self.path(key))
            with self._reaching("write", key):
                if not self.local:
                    self.fs.pipe_file(self.path(key), b"")
                else:
                    if path.parent not in folders:
                        make_folder(path.parent, sync=True)
                        folders.add(path.parent)
                    path.touch()
        for folder in folders:
            with self._reaching("write", str(folder)):
                sync_folder(folder)

    def live_keys(self, prefix: str, suffix: str = ".json") -> list[str]:
        """Keys of the live records directly below `prefix` that end in `suffix`, sorted."""
        start = len(self.root) + 1
        names = self._list(prefix, detail=False)
        return sorted(name[start:] for name in names if name.endswith(suffix))

    # -- private: access to the filesystem --------------------------------------------------

    def _place(self, path: str) -> str:
        """Where `path` is, for people."""
        full = self.path(path)
        return full if self.local else str(self.fs.unstrip_protocol(full))

    @contextlib.contextmanager
    def _reaching(self, do: str, path: str, *answers: type[OSError]) -> Iterator[None]:
        """Turns errors of the filesystem into StoreUnavailable, except those in `answers`."""
        try:
            if self._mark and not answers:
                self._mark.require()
            try:
                yield
            except answers:
                # A missing store also reports that nothing is there.
                if self._mark:
                    self._mark.require()
                raise
        except answers:
            raise
        except UnusableStore:
            raise
        except Exception as error:
            # Filesystems raise errors of their own libraries, too; other builtin ones are bugs.
            if not isinstance(error, OSError) and type(error).__module__ == "builtins":
                raise
            failure = StoreUnavailable(
                f"the artifact store cannot {do} {path.partition('@')[0]} "
                f"({self._place(path)}): {type(error).__name__}: {error}; {remedy(error)}"
            )
            failure.errno = getattr(error, "errno", None)
            raise failure from error

    def _read(self, path: str) -> bytes:
        """Raises FileNotFoundError."""
        with self._reaching("read", path, FileNotFoundError):
            data: bytes = self.fs.cat_file(self.path(path))
        return data

    def _part(self, ref: ArtifactRef, path: str) -> bytes:
        try:
            return self._read(path)
        except FileNotFoundError:
            raise CorruptArtifact(f"{ref.key}: {path} is missing") from None

    def _list(self, prefix: str, *, detail: bool) -> list[Any]:
        """Entries directly below `prefix`: paths, or with `detail` objects that describe them."""
        folder = prefix.rstrip("/")
        try:
            with self._reaching("list", folder, FileNotFoundError):
                # Remote filesystems cache listings, without what other processes wrote since.
                fresh = {} if self.local else {"refresh": True}
                result: list[Any] = self.fs.ls(self.path(folder), detail=detail, **fresh)
        except FileNotFoundError:
            return []
        return result

    def _write(self, path: str, data: bytes, *, sync: bool = True) -> None:
        with self._reaching("write", path):
            if self.local:
                replace(Path(self.path(path)), [data], sync=sync)
            else:
                self.fs.pipe_file(self.path(path), data)

    def _upload(self, path: str, source: Path) -> tuple[str, int]:
        """Writes a local file; returns hash and size of what was written. Its name gets to disk
        with its folder, by `_sync_below` or with the manifest.
        """
        with self._reaching(f"copy {source} to", path):
            if not self.local:
                self.fs.put_file(str(source), self.path(path))
                return digest(source), source.stat().st_size
            sha = hashlib.sha256()
            replace(Path(self.path(path)), chunks(source, sha), sync=True, name_too=False)
            return sha.hexdigest(), source.stat().st_size

    def _sync_below(self, path: str, names: Iterable[str]) -> None:
        """Syncs the folders below an artifact's own: once per folder costs less than per file."""
        if self.local:
            with self._reaching("write", path):
                for folder in {os.path.dirname(name) for name in names} - {""}:
                    sync_folder(Path(self.path(f"{path}/{folder}")))

    def _download(self, path: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".part-{uuid.uuid4().hex}")
        try:
            self.fs.get_file(self.path(path), str(part))
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    def _discard(self, path: str) -> None:
        """Removes unreferenced content, as far as that is possible."""
        # What prevents it is the earlier failure, which the caller reports.
        with contextlib.suppress(Exception):
            self.fs.rm(self.path(path), recursive=True)

    def _commit(self, ref: ArtifactRef, inside: bytes | None = None) -> ArtifactRef:
        marker = ref.key + MARKER
        path = self.path(marker)
        data = json.dumps(asdict(ref)).encode()
        if inside is not None:
            data = inside + b"\n" + data
        if not self.local:
            self._require_exclusive(marker)
        try:
            with self._reaching("write", marker, FileExistsError):
                if self.local:
                    create(Path(path), data)
                else:
                    self.fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return self.require(ref.key)
        return ref
