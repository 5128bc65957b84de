"""The Python client: `Ratchet().runs`, modelled on OpenAI's `client.fine_tuning.jobs`, and the
machines that runs execute on.

Results are the API's own models. Lists are pages that iterate over everything after them, too.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pydantic import BaseModel

from ratchet.activities.contracts.roles import WorkerRole
from ratchet.activities.contracts.statuses import ENDED, RunStatus
from ratchet.api.client import exports
from ratchet.api.client.errors import RatchetError, Refused
from ratchet.api.client.pages import Page, page_of
from ratchet.api.client.streams import SILENCE_S, EventStream
from ratchet.api.client.transport import IDEMPOTENCY, Transport, default_address
from ratchet.api.schemas.artifacts import Batch, Checkpoint, Model, RunConfigView
from ratchet.api.schemas.bodies import MERGE_PATCH
from ratchet.api.schemas.evals import EvalComparison
from ratchet.api.schemas.events import Event, Level, LogLine
from ratchet.api.schemas.health import RunHealth
from ratchet.api.schemas.machines import Engine, Health, ServiceItem, WorkerItem
from ratchet.api.schemas.metrics import EvalRecord, GaugeSample, LagSample, MetricsRow
from ratchet.api.schemas.rollouts import RolloutFull, RolloutItem
from ratchet.api.schemas.run import DeletedRun, ResolvedConfig, Run
from ratchet.configs.evaluation import evaluations
from ratchet.configs.run import RunConfig

Config = RunConfig | Mapping[str, Any]

PATIENCE_S = 300.0
FOLLOWED_EVERY_S = 1.0


def _plain(config: Config) -> dict[str, Any]:
    """The config as sent: of a model only what was set, so that defaults are the API's."""
    if isinstance(config, RunConfig):
        return config.model_dump(mode="json", exclude_unset=True)
    return dict(config)


def _path(run_id: str, *rest: str) -> str:
    if not run_id:
        raise ValueError("a run's id is required, and this one is empty")
    return "/v1/runs/" + "/".join(quote(part, safe="") for part in (run_id, *rest))


def _begun(ids: Sequence[str], idempotency_key: str | None) -> str:
    """What there is of evaluations of which a later one could not start."""
    if idempotency_key:
        further = "the same request with the same idempotency key starts the others"
    else:
        further = f"`ratchet runs stop {ids[0]}` ends one; the same request would start it twice"
    return f"already started: {', '.join(ids)}; {further}"


class Runs:
    """Everything about runs. All methods raise Refused and Unreachable. A request that changes a
    run is sent again if it gets lost, and takes effect once.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    # -- starting ---------------------------------------------------------------------------

    def create(self, config: Config, *, idempotency_key: str | None = None) -> Run:
        """Starts a run; a request that gets lost is sent again and starts no second run.

        The same `idempotency_key` and config give the same run, also from another process.
        """
        headers = {IDEMPOTENCY: idempotency_key}
        return self._transport.ask_for(
            Run, "POST", "/v1/runs", body=_plain(config), headers=headers
        )

    def plan(self, config: Config) -> ResolvedConfig:
        """A dry run: the config with all defaults, and the plan. Starts nothing."""
        return self._transport.ask_for(
            ResolvedConfig, "POST", "/v1/runs", params={"dry_run": True}, body=_plain(config)
        )

    def evaluate(
        self,
        config: Config,
        *,
        models: Sequence[str] = (),
        envs: Sequence[str] = (),
        idempotency_key: str | None = None,
    ) -> Sequence[Run]:
        """Starts an evaluation of each of `models` (names as `model.name`, or 'RUN@STEP'; none: the
        config's own) on the config's eval envs, or those named. Nothing is trained.

        Each is a run, which begins once the one before has ended. Before the first one starts,
        workers check them all. Raises ConfigError for a model that is named twice or an env that is
        no eval env; where a later one cannot start, a note of the error names those that have.
        """
        plain = evaluations(_plain(config), models, envs)
        for one in plain if len(plain) > 1 else ():
            self.plan(one)
        runs: Sequence[Run] = []
        for number, one in enumerate(plain):
            after = {"after": runs[-1].id} if runs else {}
            key = f"{idempotency_key} {number}" if idempotency_key else None
            try:
                runs = [*runs, self.create({**one, **after}, idempotency_key=key)]
            except RatchetError as error:
                if runs:
                    error.add_note(_begun([run.id for run in runs], idempotency_key))
                raise
        return runs

    def compare_evals(
        self,
        run_id: str,
        to: str | None = None,
        *,
        step: int | None = None,
        to_step: int | None = None,
        env: str | None = None,
        k: int | None = None,
    ) -> Page[EvalComparison]:
        """The last evals of this run, or those of `step`, against those of run `to`, by env, on the
        same examples: by mean rewards, or with a `k` by pass@k. Without `to` this run's own evals
        of step 0 are the other ones.
        """
        params = {"to": to, "step": step, "to_step": to_step, "env": env, "k": k}
        path = _path(run_id, "evals", "comparison")
        return page_of(self._transport, EvalComparison, path, params)

    def fork(
        self,
        run_id: str,
        *,
        step: int | None = None,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Run:
        """Starts a new run from the checkpoint of `step`, by default the newest sound one.

        `config` holds what differs. Sent again if it gets lost, as in `create`.
        """
        headers = {IDEMPOTENCY: idempotency_key}
        body = _fork_body(step, config, name, metadata)
        return self._transport.ask_for(
            Run, "POST", _path(run_id, "fork"), body=body, headers=headers
        )

    def plan_fork(
        self,
        run_id: str,
        *,
        step: int | None = None,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> ResolvedConfig:
        """A dry run of a fork."""
        body = _fork_body(step, config, name, metadata)
        params = {"dry_run": True}
        return self._transport.ask_for(
            ResolvedConfig, "POST", _path(run_id, "fork"), params=params, body=body
        )

    # -- reading ----------------------------------------------------------------------------

    def retrieve(self, run_id: str) -> Run:
        """One run, with live gauges while it runs."""
        return self._transport.ask_for(Run, "GET", _path(run_id))

    def list(
        self,
        *,
        after: str | None = None,
        limit: int = 20,
        status: RunStatus | None = None,
        metadata: Mapping[str, str] | None = None,
        archived: bool = False,
    ) -> Page[Run]:
        """Runs, the newest first; `after` is the `next_after` of the previous page. Archived runs
        are left out; with `archived` only they are listed.
        """
        pairs = {f"metadata[{name}]": value for name, value in (metadata or {}).items()}
        only = {"archived": True} if archived else {}
        params = {"after": after, "limit": limit, "status": status, **only, **pairs}
        return page_of(self._transport, Run, "/v1/runs", params, "after", lambda run: run.id)

    def list_events(
        self,
        run_id: str,
        *,
        after: str | None = None,
        limit: int = 100,
        order: Literal["asc", "desc"] = "asc",
        types: Sequence[str] | None = None,
    ) -> Page[Event]:
        """Events after the one with id `after`, oldest first; with `order` 'desc' newest first, and
        those before `after`. 'server' in `types` stands for 'server.down' and all other types that
        begin with 'server.'.
        """
        params = {"after": after, "limit": limit, "order": order, "types": _joined(types)}
        return page_of(
            self._transport, Event, _path(run_id, "events"), params, "after", lambda event: event.id
        )

    def stream_events(
        self,
        run_id: str,
        *,
        after: str | None = None,
        patience_s: float = PATIENCE_S,
        on_trouble: Callable[[str], None] = lambda why: None,
        silence_s: float = SILENCE_S,
    ) -> EventStream:
        """Events as they happen until the run has ended, over broken connections; see the class."""
        return EventStream(
            self._transport, _path(run_id, "events"), after, patience_s, on_trouble, silence_s
        )

    def logs(
        self,
        run_id: str,
        *,
        after: str | None = None,
        limit: int = 200,
        level: Level = "debug",
        source: str | None = None,
    ) -> Page[LogLine]:
        """The run's log, oldest first: lines of `level` or worse, after the one with id `after`.
        With a `source` ('orchestrator', 'env:NAME') the log of one process: its newest lines, or
        those after `after`.
        """
        params = {"after": after, "limit": limit, "level": level, "source": source}
        return page_of(
            self._transport, LogLine, _path(run_id, "logs"), params, "after", lambda line: line.id
        )

    def follow_logs(
        self,
        run_id: str,
        *,
        after: str | None = None,
        level: Level = "debug",
        source: str | None = None,
        every_s: float = FOLLOWED_EVERY_S,
    ) -> Iterator[LogLine]:
        """Lines as from `logs`, and new ones until the run has ended."""
        while True:
            # Checked first: everything that a run logged before it ended is then in the pages.
            ended = self.retrieve(run_id).status in ENDED
            page = self.logs(run_id, after=after, limit=1000, level=level, source=source)
            yield from page.data
            after = page.next_after or (page.data[-1].id if page.data else after)
            if not page.has_more:
                if ended:
                    return
                time.sleep(every_s)

    def metrics(
        self,
        run_id: str,
        *,
        names: Sequence[str] | None = None,
        after: str | None = None,
        after_step: int = -1,
        until_step: int | None = None,
        points: int | None = None,
        limit: int = 1000,
    ) -> Page[MetricsRow]:
        """Metrics by step; with `points` at most so many values of each, extremes kept."""
        params = {**_range(names, after_step, until_step, points, limit), "after": after}
        path = _path(run_id, "metrics")
        return page_of(
            self._transport, MetricsRow, path, params, "after_step", lambda row: row.step
        )

    def metrics_csv(
        self,
        run_id: str,
        *,
        names: Sequence[str] | None = None,
        after_step: int = -1,
        until_step: int | None = None,
        points: int | None = None,
        limit: int | None = None,
    ) -> str:
        """The same as CSV text, one line per step; all steps unless there is a `limit`."""
        params = {**_range(names, after_step, until_step, points, limit), "format": "csv"}
        return self._transport.ask("GET", _path(run_id, "metrics"), params=params).text

    def health(self, run_id: str) -> RunHealth:
        """The run's health, at a glance."""
        return self._transport.ask_for(RunHealth, "GET", _path(run_id, "health"))

    def evals(self, run_id: str) -> Page[EvalRecord]:
        """All evals, by step."""
        return page_of(self._transport, EvalRecord, _path(run_id, "evals"))

    def gauges(
        self,
        run_id: str,
        *,
        after: float = 0.0,
        limit: int = 1000,
        role: Literal[WorkerRole, "all"] = "rollout",
    ) -> Page[GaugeSample | LagSample]:
        """Gauges of the workers of a role, ascending, taken later than `after` (Unix seconds)."""
        params = {"after": after, "limit": limit, "role": role}
        path, model = _path(run_id, "gauges"), GaugeSample | LagSample
        return page_of(self._transport, model, path, params, "after", lambda sample: sample.time)

    def batches(
        self, run_id: str, *, after: str | None = None, after_step: int = -1, limit: int = 100
    ) -> Page[Batch]:
        """Batches that are kept, by step, and where their files lie."""
        params = {"after": after, "after_step": after_step, "limit": limit}
        path = _path(run_id, "batches")
        return page_of(self._transport, Batch, path, params, "after_step", lambda batch: batch.step)

    def checkpoints(self, run_id: str, *, verify: bool = False) -> Page[Checkpoint]:
        """Committed checkpoints, by step; `verify` reads all their bytes."""
        params = {"verify": verify or None}
        return page_of(self._transport, Checkpoint, _path(run_id, "checkpoints"), params)

    def model(
        self,
        run_id: str,
        *,
        step: int | None = None,
        best: str | None = None,
        merge: bool = False,
    ) -> Model:
        """A version of the policy: its files, evals and model card. It is the version of `step`, or
        the best one in the eval `best` ('': the config's first), or the last checkpoint. For a run
        that trains a LoRA adapter it is the adapter, or if `merge` the whole model.
        """
        params = {"step": step, "best": best, "merge": merge or None}
        return self._transport.ask_for(Model, "GET", _path(run_id, "model"), params=params)

    def export_model(
        self,
        run_id: str,
        to: str | Path,
        *,
        step: int | None = None,
        best: str | None = None,
        merge: bool = False,
        on_model: Callable[[Model], None] = lambda model: None,
        on_bytes: Callable[[int], None] = lambda done: None,
    ) -> Model:
        """Writes a version as a Hugging Face folder with a model card; `to` must not exist. For a
        run that trains a LoRA adapter that is the adapter, or if `merge` the whole model: where the
        run keeps the adapter alone, it is merged here, which takes the extra `trainer`.

        `on_model` is called with the model before it is written, `on_bytes` with the bytes written
        so far. Raises NotExported; after any exception `to` exists only if it is complete.
        """
        folder = Path(to)
        exports.require_absent(folder)
        try:
            model = self.model(run_id, step=step, best=best, merge=merge)
        except Refused as refused:
            alone = None
            if merge and not refused.transient:
                alone = self.model(run_id, step=step, best=best)
            if alone is None or alone.kind != "adapter":
                raise
            return self._export_merged(alone, folder, on_model, on_bytes)
        on_model(model)
        exports.write_model(model, folder, self._files_of(model, merge=merge), on_bytes)
        return model

    def _export_merged(
        self,
        adapter: Model,
        folder: Path,
        on_model: Callable[[Model], None],
        on_bytes: Callable[[int], None],
    ) -> Model:
        exports.require_merger()
        base = self.model(adapter.run_id, step=0)
        size = adapter.size + base.size
        on_model(adapter.model_copy(update={"kind": "model", "size": size}))
        fetches = (self._files_of(adapter), self._files_of(base))
        return exports.write_merged(adapter, base, folder, fetches, on_bytes)

    def _files_of(self, model: Model, *, merge: bool = False) -> exports.Fetch:
        def fetch(name: str, file: Path, progress: Callable[[int], None]) -> str:
            path = _path(model.run_id, "model", "files", *name.split("/"))
            params = {"step": model.step, **({"merge": True} if merge else {})}
            return self._transport.download(path, file, params=params, progress=progress)

        return fetch

    def config(self, run_id: str, *, revision: int | None = None) -> RunConfigView:
        """The resolved config as it is now, or as one revision."""
        params = {"revision": revision}
        return self._transport.ask_for(RunConfigView, "GET", _path(run_id, "config"), params=params)

    def config_toml(self, run_id: str, *, revision: int | None = None) -> str:
        """The same as TOML text, to start another run with."""
        params = {"revision": revision, "format": "toml"}
        return self._transport.ask("GET", _path(run_id, "config"), params=params).text

    def rollouts(
        self,
        run_id: str,
        *,
        step: int | None = None,
        env: str | None = None,
        group: str | None = None,
        kind: Literal["train", "eval"] | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        errored: bool | None = None,
        after: str | None = None,
        limit: int = 50,
    ) -> Page[RolloutItem]:
        """Finished rollouts in brief: of one step, or the newest first."""
        params = {
            "step": step,
            "env": env,
            "group": group,
            "kind": kind,
            "reward_min": reward_min,
            "reward_max": reward_max,
            "errored": errored,
            "after": after,
            "limit": limit,
        }
        return page_of(self._transport, RolloutItem, _path(run_id, "rollouts"), params, "after")

    def rollout(self, run_id: str, rollout_id: str) -> RolloutFull:
        """One rollout with all messages and sampled tokens."""
        return self._transport.ask_for(RolloutFull, "GET", _path(run_id, "rollouts", rollout_id))

    # -- steering ---------------------------------------------------------------------------

    def ask(self, run_id: str, verb: str, **body: Any) -> Run:
        """Requests a verb of `CONTROLS` by name; each has a method, too."""
        return self._transport.ask_for(Run, "POST", _path(run_id, verb), body=body)

    def pause(
        self, run_id: str, *, mode: Literal["drain", "cancel"] = "drain", reason: str = ""
    ) -> Run:
        """Pauses the run. 'drain' lets rollouts in flight finish first, 'cancel' does not."""
        return self.ask(run_id, "pause", mode=mode, reason=reason)

    def resume(self, run_id: str, *, reason: str = "") -> Run:
        """Resumes a paused run; one that ended continues from its newest sound checkpoint."""
        return self.ask(run_id, "resume", reason=reason)

    def stop(self, run_id: str, *, reason: str = "") -> Run:
        """Ends the run gracefully, with a final checkpoint."""
        return self.ask(run_id, "stop", reason=reason)

    def cancel(self, run_id: str, *, reason: str = "") -> Run:
        """Ends the run at once, without another checkpoint."""
        return self.ask(run_id, "cancel", reason=reason)

    def eval(self, run_id: str, *, envs: Sequence[str] = (), reason: str = "") -> Run:
        """Requests an eval of the version in the engines, of all eval envs or of those named."""
        return self.ask(run_id, "eval", envs=[*envs], reason=reason)

    def checkpoint(self, run_id: str, *, reason: str = "") -> Run:
        """Requests a checkpoint at the next step boundary."""
        return self.ask(run_id, "checkpoint", reason=reason)

    def update(
        self, run_id: str, changes: Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Run:
        """Changes the config of a running run, and its metadata (None removes a pair)."""
        headers = {IDEMPOTENCY: idempotency_key, "Content-Type": MERGE_PATCH}
        return self._transport.ask_for(
            Run, "PATCH", _path(run_id), body=dict(changes), headers=headers
        )

    def note(self, run_id: str, note: str) -> Run:
        """Replaces the run's note, at most 2,000 characters of plain text; '' removes it."""
        return self._transport.ask_for(Run, "PUT", _path(run_id, "note"), body={"note": note})

    # -- archiving --------------------------------------------------------------------------

    def archive(self, run_id: str) -> Run:
        """Removes a run that has ended from the list; all its data is kept."""
        return self._transport.ask_for(Run, "POST", _path(run_id, "archive"))

    def unarchive(self, run_id: str) -> Run:
        """Puts an archived run back into the list."""
        return self._transport.ask_for(Run, "POST", _path(run_id, "unarchive"))

    def delete(self, run_id: str) -> DeletedRun:
        """Deletes a run that has ended, with all its data, for good. Refused if another run needs
        it: a fork, or a run whose model is a version of it.
        """
        return self._transport.ask_for(DeletedRun, "DELETE", _path(run_id))


def _joined(names: Sequence[str] | None) -> str | None:
    return ",".join(names) if names is not None else None


def _fork_body(
    step: int | None,
    config: Mapping[str, Any] | None,
    name: str | None,
    metadata: Mapping[str, str] | None,
) -> dict[str, Any]:
    input = {"step": step, "config": config, "name": name, "metadata": metadata}
    return {key: value for key, value in input.items() if value is not None}


def _range(
    names: Sequence[str] | None,
    after_step: int,
    until_step: int | None,
    points: int | None,
    limit: int | None,
) -> dict[str, Any]:
    return {
        "keys": _joined(names),
        "after_step": after_step,
        "until_step": until_step,
        "points": points,
        "limit": limit,
    }


class Ratchet:
    """A client of one API; close it, or use it as a context manager.

    By default `base_url` is RATCHET_API, else the local stack's address, and `api_key`
    RATCHET_API_KEY. Requests that get lost are sent again up to `max_retries` times. Raises
    ValueError for an invalid address or key.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = 60.0,
        max_retries: int = 2,
    ) -> None:
        key = api_key if api_key is not None else os.environ.get("RATCHET_API_KEY", "")
        self._transport = Transport(
            base_url or default_address(),
            key.strip() or None,
            timeout_s=timeout_s,
            max_retries=max_retries,
        )
        self.address = self._transport.address
        self.runs = Runs(self._transport)

    def engines(self) -> Page[Engine]:
        """Inference engines of all runs, and their states."""
        return page_of(self._transport, Engine, "/v1/engines")

    def workers(self) -> Page[WorkerItem]:
        """Worker processes that polled Temporal in the last minutes, by role."""
        return page_of(self._transport, WorkerItem, "/v1/workers")

    def services(self) -> Page[ServiceItem]:
        """Processes of the local stack, if a supervisor runs it, and their states."""
        return page_of(self._transport, ServiceItem, "/v1/services")

    def health(self) -> Health:
        """Succeeds if the API's process is up, whatever it depends on."""
        return self._transport.ask_for(Health, "GET", "/healthz")

    def readiness(self) -> Health:
        """Succeeds if Temporal answers and the store is writable; Refused says what is away."""
        return self._transport.ask_for(Health, "GET", "/readyz")

    def prometheus(self) -> str:
        """Metrics of the API and of all runs, in Prometheus' text format."""
        return self._transport.ask("GET", "/metrics").text

    def close(self) -> None:
        """Closes all connections."""
        self._transport.close()

    def __enter__(self) -> "Ratchet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_json(value: BaseModel) -> dict[str, Any]:
    """A result as the API sent it."""
    return value.model_dump(mode="json")
