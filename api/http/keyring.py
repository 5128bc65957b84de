"""The keys that are valid now: from the settings, or from the file that `ratchet keys` writes.

Invariants: the file is checked at every request, so that a revoked, expired or new key counts at
once, without a restart; a file that is missing or unreadable admits nobody.
"""

import logging
from pathlib import Path

from ratchet.api.schemas.keys import ApiKey, key_for, load_keys
from ratchet.api.schemas.problems import ApiProblem

logger = logging.getLogger(__name__)


class Keyring:
    """Keys, by what a request carries."""

    def __init__(self, keys: tuple[ApiKey, ...], file: Path | None = None) -> None:
        """`file` is followed; None: `keys` never change."""
        self._keys = keys
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._damaged = False

    def bearer(self, authorization: str) -> ApiKey | None:
        """The key that a header `Authorization` carries, if it is valid; raises ApiProblem 503."""
        scheme, _, input = authorization.partition(" ")
        keys = self._current()
        return key_for(keys, input.strip()) if scheme.lower() == "bearer" else None

    def holds(self, key: ApiKey) -> bool:
        """Whether a key is still valid; raises ApiProblem 503."""
        return not key.expired and key in self._current()

    def _current(self) -> tuple[ApiKey, ...]:
        if self._file is None:
            return self._keys
        try:
            stat = self._file.stat()
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen != self._seen:
                # Remembered first: a file that is replaced while being read is read again.
                self._seen, self._damaged = seen, True
                self._keys = load_keys(None, self._file)
                self._damaged = False
        except FileNotFoundError:
            self._seen, self._keys, self._damaged = None, (), False
        except (OSError, ValueError) as error:
            logger.error("%s", error)
            self._damaged = True
        if self._damaged:
            raise ApiProblem(
                503,
                "keys-unreadable",
                "The keys cannot be read",
                "The API's key file is damaged, so no key is accepted; the API's log says where.",
            )
        return self._keys
