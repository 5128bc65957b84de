"""Where a machine keeps Ratchet's state: RATCHET_HOME, the same for every command and process."""

import os
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def home_folder(env: Mapping[str, str] = os.environ) -> Path:
    """RATCHET_HOME; by default .ratchet in the checkout, and for a package ~/.ratchet."""
    if folder := env.get("RATCHET_HOME"):
        return Path(folder).absolute()
    checkout = (_ROOT / "pyproject.toml").is_file()
    return (_ROOT if checkout else Path.home()) / ".ratchet"
