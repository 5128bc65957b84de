"""API keys: who may use the API. `ratchet keys new` makes one.

A key is 256 random bits, so its SHA-256 needs no salt and reveals nothing about it; only the hash
is kept, in $RATCHET_HOME/api_keys.json or, as the same JSON, in RATCHET_API_KEYS:

    {"keys": [{"name": "ci", "sha256": "…", "scopes": ["read", "write"], "per_minute": 600,
               "expires_at": "2027-01-31T00:00:00Z"}]}

Invariant: a file without any key admits nobody. Where no file was ever written no key is needed.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from ratchet.configs.home import private_file, private_folder

PREFIX = "rk_"
PER_MINUTE = 6000


class ApiKey(BaseModel):
    """One key. 'write' allows changes, 'read' everything else."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Literal["read", "write"], ...] = ("read", "write")
    per_minute: int = Field(default=PER_MINUTE, ge=1, le=10_000_000)
    expires_at: AwareDatetime | None = None

    @property
    def expired(self) -> bool:
        """Whether it has expired."""
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)


class KeyFile(BaseModel):
    """The file of all keys."""

    model_config = ConfigDict(extra="forbid")

    keys: tuple[ApiKey, ...] = ()


def digest(key: str) -> str:
    """The hash under which a key is kept."""
    return hashlib.sha256(key.encode()).hexdigest()


def load_keys(text: str | None, path: Path) -> tuple[ApiKey, ...]:
    """The keys in `text` (JSON) if there is one, else in the file at `path` if it exists.

    Raises ValueError that names the place of a mistake and quotes nothing from the file.
    """
    where = "RATCHET_API_KEYS" if text else str(path)
    if not text:
        if not path.exists():
            return ()
        text = path.read_text()
    try:
        keys = KeyFile.model_validate_json(text).keys
    except ValidationError as error:
        result = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in result["loc"]) or "(the whole file)"
        raise ValueError(f"{where} is not a list of API keys: {place}: {result['msg']}") from None
    names = [key.name for key in keys]
    if len(set(names)) < len(names):
        raise ValueError(f"{where} has two keys with the same name")
    return keys


def key_for(keys: Sequence[ApiKey], input: str) -> ApiKey | None:
    """The key that `input` is, unless it has expired. The time it takes reveals nothing about the
    keys.
    """
    mine = digest(input)
    result = [key for key in keys if hmac.compare_digest(key.sha256, mine)]
    return result[-1] if result and not result[-1].expired else None


def add(
    path: Path,
    name: str,
    scopes: Sequence[str],
    per_minute: int,
    expires_at: datetime | None = None,
) -> str:
    """Adds a key to the file, which only its owner may read, and returns it.

    Raises ValueError for a name that is taken or invalid.
    """
    kept = load_keys(None, path)
    if any(key.name == name for key in kept):
        raise ValueError(
            f"{path} already has a key {name!r}; `ratchet keys revoke {name}`, or use another name"
        )
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ValueError(f"invalid name {name!r}: use 1 to 64 letters, digits, '.', '_' or '-'")
    key = PREFIX + secrets.token_urlsafe(32)
    entry = ApiKey.model_validate(
        {
            "name": name,
            "sha256": digest(key),
            "scopes": scopes,
            "per_minute": per_minute,
            "expires_at": expires_at,
        }
    )
    _save(path, (*kept, entry))
    return key


def revoke(path: Path, name: str) -> None:
    """Removes a key from the file; raises ValueError if there is none with that name."""
    kept = load_keys(None, path)
    left = tuple(key for key in kept if key.name != name)
    if len(left) == len(kept):
        names = ", ".join(key.name for key in kept) or "none"
        raise ValueError(f"{path} has no key named {name!r}; its keys: {names}")
    _save(path, left)


def _save(path: Path, keys: tuple[ApiKey, ...]) -> None:
    private_folder(path.parent)
    text = KeyFile(keys=keys).model_dump_json(indent=2, exclude_none=True) + "\n"
    private_file(path.with_suffix(".part"), text).replace(path)
