"""References: what travels through Temporal instead of data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ArtifactRef:
    """Names one committed, immutable artifact of the store (about 200 B as JSON).

    `sha256` is of the bytes, or of the manifest for a folder; readers verify it.
    `attempt` names the activity attempt that produced it.
    """

    key: str
    sha256: str
    size: int
    path: str
    schema: int = 1
    attempt: str = ""
