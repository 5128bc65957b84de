"""`Idempotency-Key`: for a day, the same key and request give the same reply and one effect.

Two records in the artifact store, both committed once: the claim, which says what a key was first
used for and the id of its run, and the reply. They outlive the API. Of two concurrent requests both
act on behalf of the one that claimed first: its run can be started only once, and the run receives
its signal only once (Temporal knows the key as the signal's request id, and a change by the first
request's id). A refused request claims nothing.

Records belong to the API key itself, so that another key with the same name inherits none. They lie
in one folder per day (UTC), are looked up in today's and yesterday's, and are deleted after that.
Around midnight a claim is made in both folders and the later one decides, so that nothing is done
twice while the clocks of APIs differ by less than SKEW.

Starting a run needs the store anyway. A signal to a run is sent without these records if the store
is unavailable, since a run must be paused or stopped then, too.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import JSONResponse

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore, StoreUnavailable
from ratchet.api.http.audit import Caller
from ratchet.api.schemas.problems import ApiProblem, FieldError

HEADER = "Idempotency-Key"
LONGEST = 255
DAY = timedelta(days=1)
SKEW = timedelta(minutes=1)
FORGET_EVERY_S = 3600.0
DOCUMENTED: dict[str, Any] = {
    "parameters": [
        {
            "name": HEADER,
            "in": "header",
            "required": False,
            "description": "The same key and body give the same reply and have one effect, however "
            "often they are sent within a day; the same key with another body is a 409.",
            "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST},
        }
    ]
}
"""The OpenAPI entry of the header."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Once:
    """A request with an idempotency key: digests of its caller and key, and of its contents."""

    key: str
    said: str

    @staticmethod
    def of(request: Request, body: bytes) -> "Once | None":
        """None without the header; raises 400 for an invalid key."""
        key = request.headers.get(HEADER)
        if key is None:
            return None
        if not 1 <= len(key) <= LONGEST or not key.isprintable():
            message = f"an idempotency key has 1 to {LONGEST} printable characters"
            raise ApiProblem(
                400,
                "bad-idempotency-key",
                "The idempotency key cannot be used",
                f"{HEADER}: {message}.",
                errors=[FieldError(pointer="", key=f"header.{HEADER}", message=message)],
            )
        key_used = getattr(request.state, "key", None)
        who = key_used.sha256 if key_used else ""
        scope = json.dumps([who, request.method, request.url.path, key])
        said = f"{request.url.query}\n{request.headers.get('content-type', '')}\n".encode() + body
        return Once(hashlib.sha256(scope.encode()).hexdigest(), hashlib.sha256(said).hexdigest())

    def reply(self, store: ArtifactStore) -> dict[str, Any] | None:
        """The reply that the same request got before; raises 409 if another request used the key.
        Blocks.
        """
        claimed = _latest(store, keys.idempotency_claim, self.key)
        if claimed is None:
            return None
        self._require_same(claimed)
        return _latest(store, keys.idempotency_reply, self.key)

    def claim(self, store: ArtifactStore, run_id: str) -> str:
        """The id that the run gets: `run_id`, or the id chosen by the first claim. Blocks.

        Raises 409 if another request has claimed the key.
        """
        return str(self._claimed(store, {"run_id": run_id})["run_id"])

    def claim_as(self, store: ArtifactStore, run_id: str, caller: Caller) -> Caller:
        """The caller of the first claim, which is `caller` or another one with the same request.
        Signals are deduplicated by it. Blocks; raises 409 if another request has claimed the key.
        """
        first = self._claimed(store, {"run_id": run_id, "request": caller.request})
        return Caller(caller.key, str(first["request"]))

    def _claimed(self, store: ArtifactStore, claim: dict[str, str]) -> dict[str, Any]:
        first = _latest(store, keys.idempotency_claim, self.key)
        first = first or {"said": self.said, **claim}
        now = _now()
        for day in sorted({_name(now), _name(now + SKEW)}):
            place = keys.idempotency_claim(day, self.key)
            first = store.get_json(store.put_json(place, first, attempt="api"))
        self._require_same(first)
        return first

    def keep(self, store: ArtifactStore, run_id: str, run: dict[str, Any]) -> dict[str, Any]:
        """Stores the reply, and returns the one that was stored first. Blocks."""
        value = {"run_id": run_id, "run": run}
        reply = keys.idempotency_reply(_name(_now()), self.key)
        ref = store.put_json(reply, value, attempt="api")
        kept: dict[str, Any] = store.get_json(ref)
        return kept

    def _require_same(self, claim: dict[str, Any]) -> None:
        if claim["said"] != self.said:
            raise ApiProblem(
                409,
                "idempotency-conflict",
                "The idempotency key was used for another request",
                f"This {HEADER} was used with another body, for run {claim['run_id']}; send the "
                "same body again, or another key.",
            )


def _now() -> datetime:
    return datetime.now(UTC)


def _name(moment: datetime) -> str:
    return moment.date().isoformat()


def _latest(
    store: ArtifactStore, place: Callable[[str, str], str], digest: str
) -> dict[str, Any] | None:
    """A record of today, or else of yesterday. Other APIs' clocks may have reached tomorrow."""
    now = _now()
    for day in sorted({_name(now + SKEW), _name(now), _name(now - DAY)}, reverse=True):
        if ref := store.committed(place(day, digest)):
            record: dict[str, Any] = store.get_json(ref)
            return record
    return None


def forget_old(store: ArtifactStore) -> None:
    """Deletes the records that are no longer looked up. Blocks; raises StoreUnavailable."""
    now = _now()
    kept = {_name(now + DAY), _name(now), _name(now - DAY)}
    for name in store.folders(keys.IDEMPOTENCY):
        if name not in kept:
            store.delete_folder(f"{keys.IDEMPOTENCY}/{name}")


async def forgetting(store: ArtifactStore) -> NoReturn:
    """Deletes old records now, and every hour."""
    while True:
        try:
            await asyncio.to_thread(forget_old, store)
        except StoreUnavailable as error:
            logger.warning("%s", error)
        await asyncio.sleep(FORGET_EVERY_S)


def replied(kept: dict[str, Any], status: int, *, located: bool = False) -> JSONResponse:
    """A stored reply; `located` adds the address of the run that it created."""
    headers = {"Location": f"/v1/runs/{kept['run_id']}"} if located else None
    return JSONResponse(kept["run"], status, headers)
