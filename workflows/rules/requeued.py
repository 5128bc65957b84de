"""Groups to be rolled out again, and which of them goes next. Pure.

A place is the number of a group in the run's list of them, counted since the run began. Invariants:

- A group is admitted once for each place that it has.
- What is asked for costs the same however many groups wait: after a pause that may be thousands.
  So they wait in lines, each of groups that need the same env server, and only heads are looked at.
"""

from collections import deque
from collections.abc import Callable

from ratchet.workflows.protocol.messages import Control
from ratchet.workflows.protocol.state import Lease


class Requeued:
    """All places below `below` were admitted, and those `ahead` of it."""

    def __init__(self, lease: Lease, line_of: Callable[[str], str]) -> None:
        """`line_of` names the line of a group."""
        self.below = lease.put_backs
        self.ahead = set(lease.ahead)
        self._line_of = line_of
        self._known = lease.put_backs
        self._lines: dict[str, dict[str, deque[tuple[int, str]]]] = {"train": {}, "eval": {}}
        self._places: dict[str, deque[int]] = {}

    def on_control(self, control: Control) -> None:
        """Takes in what was requeued since the last control."""
        before = control.put_backs_before
        end = before + len(control.put_backs)
        for place in range(max(self._known, before), end):
            if place not in self.ahead:
                group = control.put_backs[place - before]
                lines = self._lines[group.partition("/")[0]]
                lines.setdefault(self._line_of(group), deque()).append((place, group))
                self._places.setdefault(group, deque()).append(place)
        self._known = max(self._known, end)

    def heads(self, kind: str) -> list[str]:
        """The groups of `kind` that wait longest in their lines, the longest of all first."""
        lines, heads = self._lines[kind], []
        for name in list(lines):
            line = lines[name]
            while line and (line[0][0] < self.below or line[0][0] in self.ahead):
                line.popleft()
            if line:
                heads.append(line[0])
            else:
                del lines[name]
        return [group for _, group in sorted(heads)]

    def take(self, group: str) -> bool:
        """Crosses a group off, at its first place; False if it has none."""
        if not (places := self._places.get(group)):
            return False
        self.ahead.add(places.popleft())
        if not places:
            del self._places[group]
        while self.below in self.ahead:
            self.ahead.discard(self.below)
            self.below += 1
        return True
