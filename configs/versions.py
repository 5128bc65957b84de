"""Schema numbers: how one build reads the data that another one wrote.

Data that outlives a process carries the number of its schema under the key `schema`; without one it
has schema 0. Invariants:

- A build reads every older schema, by one named function for each step to the next number. These
  are pure, take and return plain JSON objects, and are never changed once released.
- A newer schema is refused, never guessed at.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = "schema"

Document = dict[str, Any]


def unchanged(document: Document) -> Document:
    """For a schema that is the first with a number, and has the keys of data without one."""
    return document


class NewerSchema(Exception):
    """Data of a newer build.

    Not a ValueError: in a workflow it fails the task and not the run, and an activity reports it as
    work that waits, so that both continue once a worker of the newer build takes over.
    """


@dataclass(frozen=True)
class Versions:
    """The schemas of one kind of data. `upgrades` maps each older number, from `oldest` on, to the
    function that takes data of that schema to the next one. `keys` are those of the current schema,
    for data that no class decodes.
    """

    what: str
    upgrades: Mapping[int, Callable[[Document], Document]]
    oldest: int = 0
    keys: frozenset[str] = frozenset()

    @property
    def current(self) -> int:
        """The number that this build writes."""
        return self.oldest + len(self.upgrades)

    def upgraded(self, data: Document, where: str = "") -> Document:
        """`data` in the current schema, number included. `where` says what is read, for errors.

        Raises NewerSchema; ValueError for a number that never existed, or where keys are known,
        for one that is missing or unknown.
        """
        what, number = where or self.what, data.get(SCHEMA, 0)
        if not isinstance(number, int) or number < self.oldest:
            known = f"{self.oldest} to {self.current}"
            raise ValueError(f"{what} has schema {number!r}; the schemas read here are {known}")
        if number > self.current:
            raise NewerSchema(
                f"{what} has schema {number}, which a newer build of Ratchet wrote; this build "
                f"reads {self.oldest} to {self.current}. Start a worker of the newer build "
                "(RATCHET_BUILD_ID names builds; docs/production.md, 'Upgrading workers'): work "
                "continues there"
            )
        for older in range(number, self.current):
            data = {**self.upgrades[older](data), SCHEMA: older + 1}
        if self.keys and (odd := (self.keys | {SCHEMA}) ^ data.keys()):
            lost, unknown = sorted(odd & self.keys), sorted(odd - self.keys)
            raise ValueError(f"{what} has lost keys {lost} and unknown ones {unknown}")
        return data
