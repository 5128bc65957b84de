"""What the API reads from the artifact store: configs, step metrics, evals, gauges.

Every method blocks and is called through `asyncio.to_thread`. Committed records never change, so
those already read are kept, up to a bound.
"""

import threading
import time
from collections import OrderedDict
from typing import Any

from activities.storage import keys, series
from activities.storage.store import ArtifactStore, free_bytes
from api.models import Progress
from api.problems import ApiProblem
from configs.run import RunConfig

KEPT = 20_000


def _step_of(key: str) -> int:
    return int(key.rsplit("step-", 1)[1].removesuffix(".json"))


class Records:
    """Reads and the two writes (config, readiness probe) of the API."""

    def __init__(self, store: ArtifactStore) -> None:
        self.store = store
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def _read(self, key: str) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        value = self.store.get_json(self.store.require(key))
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return value

    # -- config -----------------------------------------------------------------------------

    def require_space(self, wanted: int) -> None:
        """Raises 507 if the store's disk has less than `wanted` bytes free."""
        free = free_bytes(self.store)
        if free is not None and free < wanted:
            raise ApiProblem(
                507,
                "no-disk-space",
                "No disk space for a run",
                f"The artifact store {self.store.url} has {free / 2**20:.0f} MiB free and a run "
                f"needs at least {wanted / 2**20:.0f} MiB. Free some space, or set RATCHET_STORE "
                "to a larger disk for the API and every worker.",
            )

    def save_config(self, run_id: str, config: dict[str, Any]) -> None:
        """Commits a run's resolved config; workers read it from there."""
        self.store.put_json(keys.config(run_id), config, attempt="api")

    def config(self, run_id: str) -> RunConfig | None:
        """A run's resolved config, or None if there is no such run."""
        try:
            return RunConfig.model_validate(self._read(keys.config(run_id)))
        except FileNotFoundError:
            return None

    # -- metrics ----------------------------------------------------------------------------

    def steps(self, run_id: str, after: int, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Records of steps above `after`, ascending, at most `limit`; and whether more follow."""
        wanted = sorted(
            (step, key)
            for key in self.store.committed_keys(keys.step_records(run_id))
            if (step := _step_of(key)) > after
        )
        data = [{"step": step, **self._read(key)} for step, key in wanted[:limit]]
        return data, len(wanted) > limit

    def evals(self, run_id: str) -> list[dict[str, Any]]:
        """Records of all evals, by step and env. An epoch's id is '<step>-<k>/<env>'."""
        root = keys.eval_records(run_id)
        found = self.store.committed_keys(root)
        for folder in self.store.folders(root):
            found += self.store.committed_keys(f"{root}/{folder}")
        records = [
            {"epoch": key.removeprefix(f"{root}/").removesuffix(".json"), **self._read(key)}
            for key in found
        ]
        return sorted(records, key=lambda r: (r.get("step") or 0, r["epoch"]))

    # -- gauges -----------------------------------------------------------------------------

    def progress(self, run_id: str, max_age_s: float) -> Progress | None:
        """Live gauges, or None if no process wrote any within `max_age_s` seconds.

        Dispatch gauges reach several workers at different times: those heard last count. Token
        rates are each worker's own and add up.
        """
        now = time.time()
        records = [self.store.read_live(k) for k in self.store.live_keys(keys.live_records(run_id))]
        fresh = [r for r in records if r is not None and now - float(r["time"]) <= max_age_s]
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

    def gauges(self, run_id: str, after: float, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Samples of all workers taken later than `after` (Unix seconds), ascending, at most
        `limit` moments; and whether more follow.
        """
        return series.page(self.store, run_id, after, limit)

    def probe(self) -> None:
        """Raises OSError if the store cannot be written."""
        self.store.write_live("live/api.json", {"time": time.time()})
