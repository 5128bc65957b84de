"""What the API reads from the artifact store: configs, step metrics, evals, gauges.

Every method blocks, unless it says otherwise, and is called through `asyncio.to_thread`. Committed
records never change, so those already read are cached, up to a bound. A run is named by its own id;
its data may lie under the ids of its attempts, and under those of the run it was forked from.
"""

import threading
import time
from collections.abc import Collection
from typing import Any

from cachetools import LRUCache, cachedmethod

from ratchet.activities.contracts.names import attempt_id
from ratchet.activities.contracts.redact import redacted, redacted_all
from ratchet.activities.contracts.roles import WorkerRole
from ratchet.activities.storage import configs, keys, series
from ratchet.activities.storage.lineage import attempts, segments
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact
from ratchet.api.http.store_errors import damage_in
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.schemas.run import Progress
from ratchet.api.store.curves import Curves, Span
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import read_config

KEPT = 4096

ERRORS = ("error", "frames")
"""Fields of an eval's record that come from the user's code."""


class Records:
    """Reads, and the writes of the API: configs and the readiness probe."""

    def __init__(self, store: ArtifactStore) -> None:
        self.store = store
        self.curves = Curves(store)
        self._kept: LRUCache[str, Any] = LRUCache(KEPT)
        self._lock = threading.Lock()

    @cachedmethod(lambda self: self._kept, lambda _, key: key, lambda self: self._lock)
    def read(self, key: str) -> Any:
        """A committed JSON value; raises FileNotFoundError."""
        return self.store.get_json(self.store.require(key))

    # -- config -----------------------------------------------------------------------------

    def require_space(self, wanted: int) -> None:
        """Raises 507 if the store's disk has less than `wanted` bytes free."""
        free = self.store.free_bytes()
        if free is not None and free < wanted:
            raise ApiProblem(
                507,
                "no-disk-space",
                "No disk space for a run",
                f"The artifact store {redacted(self.store.url)} has {free / 2**20:.0f} MiB free "
                f"and a run needs at least {wanted / 2**20:.0f} MiB. Free some space, or set "
                "RATCHET_STORE to a larger disk for the API and every worker.",
            )

    def save_config(self, attempt: str, config: RunConfig) -> None:
        """Commits the resolved config of an attempt; workers read it from there."""
        configs.save(self.store, attempt, config, attempt="api")

    def config_of(self, attempt: str, revision: int = 0) -> RunConfig:
        """A revision of the config of an attempt; raises FileNotFoundError, NewerSchema."""
        return read_config(self._stored_config(attempt, revision))

    @cachedmethod(
        lambda self: self._kept,
        lambda _, attempt, revision=0: keys.config(attempt, revision),
        lambda self: self._lock,
    )
    def _stored_config(self, attempt: str, revision: int = 0) -> Any:
        return configs.document(self.store, attempt, revision)

    def config(self, run_id: str) -> RunConfig | None:
        """The config that a run's newest attempt began with, or None if there is no such run."""
        try:
            return self.config_of(self.attempts(run_id)[-1])
        except FileNotFoundError:
            return None

    def remembers(self, run_id: str) -> bool:
        """Whether the run is known without a look at the store. Does not block."""
        return keys.config(run_id) in self._kept

    def forget(self, run_id: str) -> None:
        """Drops what is cached about a deleted run."""
        folders = (f"{keys.run_folder(run_id)}/", keys.run_folder(attempt_id(run_id, 2))[:-1])
        with self._lock:
            for key in [key for key in self._kept if key.startswith(folders)]:
                del self._kept[key]

    def knows(self, run_id: str) -> bool:
        """Whether anything was ever recorded for a run."""
        try:
            self._stored_config(run_id)
        except FileNotFoundError:
            return False
        except CorruptArtifact:
            # The other records can be read without it.
            return True
        return True

    # -- attempts ---------------------------------------------------------------------------

    def attempts(self, run_id: str) -> list[str]:
        """Ids of a run's attempts that have stored anything, oldest first."""
        return attempts(self.store, run_id)

    def spans(self, run_id: str) -> list[Span]:
        """Which steps of which attempts make up a run, oldest first."""
        spans: list[Span] = []
        for attempt, last in reversed(segments(self.store, self.attempts(run_id)[-1])):
            first = spans[-1].last if spans and spans[-1].last is not None else -1
            spans.append(Span(attempt, first, last))
        return spans

    # -- evals ------------------------------------------------------------------------------

    def evals(self, run_id: str) -> list[dict[str, Any]]:
        """Records of all evals, by step and env. An epoch's id is '<step>-<k>/<env>'."""
        return [record for _, record in self.held_evals(run_id)]

    def held_evals(self, run_id: str) -> list[tuple[str, dict[str, Any]]]:
        """The same, each with the attempt that recorded it, whose config it was made by.

        Where a restored run evaluated a step again, its own record counts.
        """
        result: dict[tuple[Any, Any, str], tuple[str, dict[str, Any]]] = {}
        for span in self.spans(run_id):
            for record in self._evals_of(span.attempt):
                step = record.get("step") or 0
                if span.last is None or step <= span.last:
                    epoch = record["epoch"]
                    result[step, record.get("env"), epoch] = span.attempt, record
        return [result[key] for key in sorted(result, key=lambda key: (key[0], key[2]))]

    def _evals_of(self, attempt: str) -> list[dict[str, Any]]:
        root = keys.eval_records(attempt)
        result = self.store.committed_keys(root)
        for folder in self.store.folders(root):
            result += self.store.committed_keys(f"{root}/{folder}")
        return [
            self._eval(key, key.removeprefix(f"{root}/").removesuffix(".json")) for key in result
        ]

    def _eval(self, key: str, epoch: str) -> dict[str, Any]:
        try:
            record = self.read(key)
            said = {name: redacted_all(record[name]) for name in ERRORS if name in record}
            return {"epoch": epoch, **record, **said}
        except CorruptArtifact as damage:
            step, _, env = epoch.partition("/")
            number = step.partition("-")[0]
            return {
                "epoch": epoch,
                "env": env or None,
                "step": int(number) if number.isdecimal() else None,
                "problem": damage_in(damage, self.store.root),
            }

    # -- gauges -----------------------------------------------------------------------------

    def live(self, run_id: str, max_age_s: float) -> list[dict[str, Any]]:
        """What each process last reported about a run, if within the last `max_age_s` seconds, with
        its `source`.
        """
        now = time.time()
        listed = self.store.live_keys(keys.live_records(run_id))
        records = ((key, self.store.read_live(key)) for key in listed)
        return [
            {"source": key.rpartition("/")[2].removesuffix(".json"), **record}
            for key, record in records
            if record and now - float(record["time"]) <= max_age_s
        ]

    def progress(self, run_id: str, max_age_s: float) -> Progress | None:
        """Live gauges, or None if no process wrote any within `max_age_s` seconds.

        Dispatch gauges reach several workers at different times: the latest count. Token rates are
        each worker's own and add up.
        """
        fresh = self.live(run_id, max_age_s)
        if not fresh:
            return None
        gauged = [r for r in fresh if "inflight_train" in r]
        gauges = max(gauged, key=lambda r: float(r.get("heard", r["time"]))) if gauged else {}
        return Progress(
            rollouts_inflight_train=int(gauges.get("inflight_train", 0)),
            rollouts_inflight_eval=int(gauges.get("inflight_eval", 0)),
            tokens_per_s=round(sum(float(r.get("tokens_per_s") or 0) for r in fresh), 1),
            permits=gauges.get("permits"),
            rollouts_inflight=gauges.get("inflight", {}),
            mode=gauges.get("mode"),
            queued_eval=gauges.get("queued_eval", 0),
            waiting_for=gauges.get("waiting_for") or None,
        )

    def silent(
        self, run_id: str, roles: Collection[WorkerRole], after_s: float
    ) -> dict[str, float]:
        """Seconds since a worker of each of `roles` last reported, where that is more than
        `after_s`; a role that never reported is left out.
        """
        now = time.time()
        heard = series.last_heard(self.store, run_id, now)
        ages = {role: now - heard[role] for role in sorted(roles) if role in heard}
        return {role: round(age, 1) for role, age in ages.items() if age > after_s}

    def gauges(
        self, run_id: str, after: float, limit: int, role: str | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """Samples of the workers of a role, or of all, with their `role`, taken later than `after`
        (Unix seconds), ascending, at most `limit` moments; and whether more follow.
        """
        data, more = series.page(self.store, run_id, after, limit, role)
        return [{**sample, "role": series.role_of(sample["source"])} for sample in data], more

    def probe(self) -> None:
        """Raises OSError if the store cannot be written."""
        self.store.write_live("live/api.json", {"time": time.time()})
