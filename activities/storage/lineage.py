"""Where a run comes from: the attempts and forks that led to it.

Invariant: a run's history is its own records, and those of each source up to the step at which the
run left it. An attempt begins after its source, so that lineages have no cycles.
"""

from ratchet.activities.contracts.names import attempt_id
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore


def attempts(store: ArtifactStore, run_id: str) -> list[str]:
    """Ids of a run's attempts that have stored anything, oldest first.

    A later one counts once its checkpoint was restored: before that, there is only what came before
    it.
    """
    result, number = [run_id], 2
    while store.committed(keys.config(attempt_id(run_id, number))) is not None:
        attempt = attempt_id(run_id, number)
        if store.committed(keys.lineage(attempt)) is not None:
            result.append(attempt)
        number += 1
    return result


def segments(store: ArtifactStore, run_id: str) -> list[tuple[str, int | None]]:
    """Ids of the attempts that led to `run_id`, newest first, each with the last of its steps that
    counts (None: all). The first is `run_id` itself.

    Raises CorruptArtifact.
    """
    result: list[tuple[str, int | None]] = [(run_id, None)]
    limit: int | None = None
    while (ref := store.committed(keys.lineage(result[-1][0]))) is not None:
        origin = store.get_json(ref)
        source, step = str(origin["source"]), int(origin["step"])
        assert source not in [attempt for attempt, _ in result], f"{run_id} descends from itself"
        limit = step if limit is None else min(limit, step)
        result.append((source, limit))
    return result
