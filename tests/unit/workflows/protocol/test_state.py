"""What the run's state says of itself."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ratchet.workflows.protocol.state import EvalEpoch, EvalProgress, EvalsState

results = st.lists(
    st.tuples(
        st.sampled_from("ab"), st.integers(0, 9), st.none() | st.sampled_from([0.0, 0.5, 1.0])
    )
)


@given(results)
def test_the_best_of_an_env_is_the_highest_and_the_later_one_at_a_tie(
    told: list[tuple[str, int, float | None]],
) -> None:
    evals = EvalsState()
    for env, step, reward in told:
        evals.note(env, step, reward)
    for env in "ab":
        scored = [
            (reward, step) for name, step, reward in told if name == env and reward is not None
        ]
        best = evals.best.get(env)
        assert (best and (best.reward, best.step)) == max(scored, default=None)


def test_versions_of_open_evals_and_the_best_are_needed() -> None:
    evals = EvalsState()
    evals.note("a", 4, 0.5)
    evals.note("b", 2, 0.25)
    evals.open = [EvalProgress(EvalEpoch(f"{step}-0/a", "a", step, 8, 1)) for step in (6, 4)]
    assert evals.needed == [2, 4, 6]
    evals.note("a", 6, math.nextafter(0.5, 1.0))
    evals.open, evals.finalizing = [], [8]
    assert evals.needed == [2, 6, 8]
