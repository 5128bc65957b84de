"""Where a machine keeps Ratchet's state: RATCHET_HOME, the same for every command and process.

Invariant: only its owner can read what is created here: rollouts, logs and configs of runs.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

KEYS_FILE = "api_keys.json"
STACK_FILE = "stack.json"
STORES_FILE = "stores.json"
"""Files of that folder: the keys of the API, the record of a local stack, and the stores known."""

_ROOT = Path(__file__).resolve().parents[1]


def home_folder(env: Mapping[str, str] = os.environ) -> Path:
    """RATCHET_HOME; by default .ratchet in the checkout, and for a package ~/.ratchet."""
    if folder := env.get("RATCHET_HOME"):
        return Path(folder).absolute()
    checkout = (_ROOT / "pyproject.toml").is_file()
    return (_ROOT if checkout else Path.home()) / ".ratchet"


def private_folder(folder: Path) -> Path:
    """`folder`, created if missing, and closed to all but its owner and a group that was granted
    access by hand. A folder that belongs to another user, or to everyone such as /tmp, is not
    changed.
    """
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    now = folder.stat()
    shared = now.st_uid != os.geteuid() or now.st_mode & stat.S_ISVTX
    if now.st_mode & 0o007 and not shared:
        folder.chmod(stat.S_IMODE(now.st_mode) & ~0o007)
    return folder


def private_file(path: Path, text: str) -> Path:
    """Writes a file that only its owner can read, from the moment it exists."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return path
