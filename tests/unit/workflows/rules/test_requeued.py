"""Requeued groups go in the order of their places, each once, whatever is heard in between."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.rollouts import GroupWork
from ratchet.workflows.protocol.messages import EnvTarget
from ratchet.workflows.protocol.state import EvalEpoch, Lease
from ratchet.workflows.rules.requeued import Requeued
from ratchet.workflows.rules.scheduler import Scheduler
from tests.unit.workflows.support import ENVS, control, scheduler

ENDED, OPEN, OTHER = "0-0/a", "4-0/a", "4-0/b"
EPOCHS = [EvalEpoch(OPEN, "a", 4, 9, 2), EvalEpoch(OTHER, "b", 4, 9, 2)]


@dataclass
class Walked:
    """What walking over the whole list gives: the rule that the lines must follow."""

    put_backs: list[str]
    below: int
    ahead: set[int]
    envs: dict[str, EnvTarget]

    def next(self, s: Scheduler, kind: str) -> str | None:
        """The first group of `kind` whose env is up; evals that are over are crossed off."""
        for place, group in enumerate(self.put_backs):
            if place < self.below or place in self.ahead or not group.startswith(f"{kind}/"):
                continue
            if group.startswith(f"eval/{ENDED}/"):
                self.take(group)
                continue
            work = s._requeued_work(group)
            assert isinstance(work, GroupWork)
            if work.env in self.envs:
                return group
        return None

    def take(self, group: str) -> bool:
        """Crosses off the first place of a group."""
        left = [
            place
            for place, name in enumerate(self.put_backs)
            if name == group and place >= self.below and place not in self.ahead
        ]
        if not left:
            return False
        self.ahead.add(left[0])
        while self.below in self.ahead:
            self.ahead.discard(self.below)
            self.below += 1
        return True


groups = st.one_of(
    st.builds("train/{}.{}".format, st.integers(0, 12), st.integers(1, 2)),
    st.builds("eval/{}/{}".format, st.sampled_from([ENDED, OPEN, OTHER]), st.integers(0, 4)),
)


@given(st.data())
def test_lines_give_what_a_walk_over_the_list_gives(data: st.DataObject) -> None:
    listed = data.draw(st.lists(groups, max_size=12))
    below = data.draw(st.integers(0, len(listed)))
    ahead = data.draw(st.sets(st.integers(below + 1, below + 4), max_size=3))
    ahead = {place for place in ahead if place < len(listed)}
    walked = Walked(listed, below, set(ahead), dict(ENVS))
    s = scheduler(Lease(put_backs=below, ahead=sorted(ahead)), evals=EPOCHS)
    dropped = 0
    for seq in range(1, data.draw(st.integers(1, 6))):
        listed += data.draw(st.lists(groups, max_size=4))
        dropped = data.draw(st.integers(dropped, walked.below))
        walked.envs = {name: ENVS[name] for name in data.draw(st.sets(st.sampled_from("ab")))}
        told = {"put_backs": listed[dropped:], "put_backs_before": dropped}
        s.on_control(control(seq, evals=EPOCHS, envs=walked.envs, **told))
        for kind in data.draw(st.lists(st.sampled_from(["eval", "train"]), max_size=6)):
            work = s.next_requeued(kind)
            assert (work and work.group) == walked.next(s, kind)
            if work is not None and data.draw(st.booleans()):
                assert s.requeued.take(work.group) and walked.take(work.group)
            lease = s.cursor()
            assert (lease.put_backs, set(lease.ahead)) == (walked.below, walked.ahead)


class Counted(list[str]):
    """A list that counts how often it is looked at."""

    looks = 0

    def __getitem__(self, place: object) -> str:  # type: ignore[override]
        self.looks += 1
        return super().__getitem__(place)  # type: ignore[index, return-value]


def test_thousands_that_wait_are_looked_at_once() -> None:
    waiting = Counted(f"train/{number}.1" for number in range(4000))
    requeued = Requeued(Lease(), lambda group: "b" if group.endswith("7.1") else "a")
    for seq in range(3):
        requeued.on_control(control(seq, put_backs=waiting))
    for number in range(2000):
        (first, other) = requeued.heads("train")
        assert first == f"train/{number}.1" or other == f"train/{number}.1"
        assert requeued.take(f"train/{number}.1")
    assert waiting.looks == 4000 and requeued.below == 2000
    assert not requeued.take("train/0.1") and requeued.heads("eval") == []


@pytest.mark.parametrize("away", ["a", "b"])
def test_groups_of_an_env_that_is_away_hold_up_no_others(away: str) -> None:
    up = {name: target for name, target in ENVS.items() if name != away}
    put_backs = [f"train/{number}.1" for number in range(6)]
    s = scheduler(put_backs=put_backs, envs=up)
    work = s.next_requeued("train")
    assert work is not None and work.env != away
    assert s.cursor().put_backs == 0
