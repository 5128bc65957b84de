"""Watches a run until it ends: live on a terminal, otherwise one line per event.

A thread of its own receives events, so that the picture moves, and Ctrl-C works, while nothing
happens. Watching only reads; however it ends, the run is left alone.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ratchet.activities.contracts.health import REWARD
from ratchet.activities.contracts.statuses import ENDED
from ratchet.api.client import printing
from ratchet.api.client.assignments import one_line
from ratchet.api.client.client import Ratchet, as_json
from ratchet.api.client.errors import RatchetError, Refused
from ratchet.api.client.streams import LATEST
from ratchet.api.schemas.events import Event
from ratchet.api.schemas.health import RunHealth
from ratchet.api.schemas.run import Run

HISTORY = 400
SHOWN_EVENTS = 6
TICK_S = 0.25
RENEW_S = 3.0
"""How often gauges are requested; after an event at once, but not twice a second."""
RENEW_SOON_S = 0.5
END_WITHIN_S = 10.0
QUIET = frozenset({"run.waiting", "work.done"})
"""Left out of the picture and of lines, unless they are warnings."""


@dataclass
class View:
    """What is known about a run, watched at `address`; `rewards` are by step, ascending."""

    run: Run
    address: str
    rewards: dict[int, float] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=SHOWN_EVENTS))
    trouble: str = ""
    health: RunHealth | None = None
    on_interrupt: str = "stops watching, not the run"

    def take(self, event: Event) -> None:
        """Updates the view with an event."""
        step, reward = event.data.get("step"), event.data.get("reward")
        if event.type == "run.step" and isinstance(step, int) and reward is not None:
            if self.rewards and step <= next(reversed(self.rewards)):
                # A step that is repeated after a restore replaces the abandoned ones.
                self.rewards = {s: r for s, r in self.rewards.items() if s < step}
            self.rewards[step] = float(reward)
        if shows(event):
            self.events.append(event)

    def picture(self, width: int) -> RenderableType:
        """The run as it is at this moment, for a terminal `width` columns wide."""
        run = self.run
        head = Text.assemble((run.id, "bold"), "  ", (run.status, _style(run.status)))
        if run.attempt > 1:
            head.append(f"  attempt {run.attempt}")
        rows: list[tuple[str, RenderableType | None]] = []
        if run.kind == "train":
            rows.append(("steps", self._bar(width)))
        if self.health is not None:
            rows += printing.health_rows(self.health, self.address)
        if self.rewards:
            values = [*self.rewards.values()]
            line = printing.sparkline(values, max(width - 32, 8))
            rows.append(("reward", f"{line} {printing.number(values[-1])}"))
        rows += [
            ("eval", printing.clean(printing.evals_line(run))),
            ("in flight", _gauges(run)),
            ("waits for", _waits(run)),
        ]
        reported = [
            Text(printing.event_line(e), _style(e.level), no_wrap=True) for e in self.events
        ]
        trouble = f"connection lost ({self.trouble}); trying again" if self.trouble else ""
        foot = trouble or f"Ctrl-C {self.on_interrupt}"
        style = "yellow" if trouble else "dim"
        return Group(head, printing.pairs_table(rows), *reported, Text(foot, style, no_wrap=True))

    def _bar(self, width: int) -> RenderableType:
        run = self.run
        bar = ProgressBar(total=run.max_steps, completed=run.step, width=max(width - 40, 10))
        row = Table.grid(padding=(0, 1))
        row.add_row(bar, f"{run.step}/{run.max_steps}" if run.max_steps else f"step {run.step}")
        return row


class Connection:
    """Reports on standard error, once each, that the connection was lost and that it is back."""

    def __init__(self) -> None:
        self._lost_at: float | None = None

    def hear(self, why: str) -> None:
        """Called with the reason why nothing arrives, or with '' once something does again."""
        err = printing.console(stderr=True)
        if why and self._lost_at is None:
            self._lost_at = time.monotonic()
            err.print(f"connection lost ({why}); trying again", soft_wrap=True)
        elif not why and self._lost_at is not None:
            err.print(f"back after {time.monotonic() - self._lost_at:.0f} s", soft_wrap=True)
            self._lost_at = None


def shows(event: Event) -> bool:
    """Whether an event gets a line while watching."""
    return event.level != "info" or event.type not in QUIET


def _style(word: str) -> str:
    return printing.STYLES.get(word, "")


def _gauges(run: Run) -> str:
    reported = run.progress
    if reported is None:
        return ""
    flight = (
        f"{reported.rollouts_inflight_train} train, {reported.rollouts_inflight_eval} eval rollouts"
    )
    return f"{flight}; {reported.tokens_per_s:.0f} tokens/s"


def _waits(run: Run) -> str:
    if run.silent:
        return printing.silent_line(run)
    if run.paused_because:
        return printing.clean(f"paused because {run.paused_because}")
    return printing.waits_line(run)


def health_of(client: Ratchet, run_id: str) -> RunHealth | None:
    """A run's health; None while it cannot be judged, for example while the store is away."""
    try:
        return client.runs.health(run_id)
    except Refused as error:
        if not error.transient:
            raise
        return None


def ending(run: Run) -> str:
    """How a run ended, in a sentence."""
    reward = f", reward {printing.number(run.reward)}" if run.reward is not None else ""
    why = printing.error_line(run) or printing.clean(run.end_reason or "")
    said = "was cancelled" if run.status == "cancelled" else run.status
    return f"{run.id} {said} at step {run.step}{reward}{f': {why}' if why else ''}"


class Watch:
    """One watch of one run. `from_start` shows all earlier events, too; `until` ends it before the
    run ends.
    """

    def __init__(
        self,
        client: Ratchet,
        run: Run,
        out: Console,
        *,
        from_start: bool,
        lines_of_json: bool,
        until: Callable[[Run], bool] | None = None,
        on_interrupt: str = View.on_interrupt,
    ) -> None:
        self._client = client
        self._out = out
        self._lines_of_json = lines_of_json
        self._until = until
        self._news: queue.SimpleQueue[Event | str | RatchetError | None] = queue.SimpleQueue()
        """Events; why nothing arrives, '' once something does; an error, or None, at the end."""
        self._view = View(run, client.address, on_interrupt=on_interrupt)
        self._live = out.is_terminal and not lines_of_json
        self._after = None if from_start else LATEST
        self._renewed = time.monotonic()
        self._stale = False
        self._connection = Connection()

    def follow(self) -> Run:
        """Watches until the run has ended; returns it. Raises RatchetError, KeyboardInterrupt."""
        threading.Thread(target=self._listen, daemon=True).start()
        if not self._live:
            self._until_over(None)
        else:
            self._load_rewards()
            with Live(
                get_renderable=lambda: self._view.picture(self._out.width),
                console=self._out,
                auto_refresh=False,
                transient=True,
            ) as live:
                self._until_over(live)
        return self._ended()

    def _listen(self) -> None:
        stream = self._client.runs.stream_events(
            self._view.run.id,
            after=self._after,
            on_trouble=self._news.put,
        )
        try:
            for event in stream:
                self._news.put(event)
            self._news.put(None)
        except RatchetError as error:
            self._news.put(error)

    def _until_over(self, live: Live | None) -> None:
        drawn = 0.0
        while True:
            if (live or self._until) and time.monotonic() - drawn >= TICK_S:
                self._renew()
                if self._over(self._view.run):
                    return
                if live is not None:
                    live.refresh()
                drawn = time.monotonic()
            try:
                item = self._news.get(timeout=TICK_S)
            except queue.Empty:
                continue
            if item is None:
                return
            if isinstance(item, RatchetError):
                raise item
            if isinstance(item, str):
                self._view.trouble = item
                if live is None:
                    self._connection.hear(item)
                continue
            self._view.take(item)
            self._stale = True
            if self._lines_of_json:
                print(one_line(as_json(item)), flush=True)
            elif live is None and shows(item):
                self._out.print(printing.event_line(item), soft_wrap=True)

    def _over(self, run: Run) -> bool:
        return self._until is not None and self._until(run)

    def _renew(self) -> None:
        age_s = time.monotonic() - self._renewed
        if age_s < (RENEW_SOON_S if self._stale else RENEW_S) or self._view.trouble:
            return
        try:
            self._view.run = self._client.runs.retrieve(self._view.run.id)
            if self._live:
                self._view.health = health_of(self._client, self._view.run.id)
            self._stale = False
        except RatchetError as error:
            # The stream finds out whether the outage lasts, and how long to tolerate it.
            if isinstance(error, Refused) and not error.transient:
                raise
        self._renewed = time.monotonic()

    def _load_rewards(self) -> None:
        run_id = self._view.run.id
        try:
            page = self._client.runs.metrics(run_id, names=[REWARD], points=HISTORY)
        except Refused as refused:
            if refused.status != 404:
                raise
            # Nothing has been recorded yet.
            return
        result = {row.step: row.metrics.get(REWARD) for row in page.data}
        self._view.rewards = {step: value for step, value in result.items() if value is not None}

    def _ended(self) -> Run:
        """The run once it reports that it has ended, which is a moment after its last event."""
        deadline = time.monotonic() + END_WITHIN_S
        while True:
            run = self._client.runs.retrieve(self._view.run.id)
            if run.status in ENDED or self._over(run) or time.monotonic() > deadline:
                return run
            time.sleep(TICK_S)
