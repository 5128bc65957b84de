"""Which evals a run opens."""

from ratchet.workflows.protocol.messages import RunInput
from ratchet.workflows.protocol.state import EvalEpoch, EvalProgress
from ratchet.workflows.training_run import TrainingRun
from tests.unit.workflows.support import config


def evaluation() -> TrainingRun:
    """An evaluation of two envs, that would pause if all of an env's rollouts failed."""
    evals = {"env": [{"id": "a"}, {"id": "b"}], "num_examples": 3}
    alone = config(max_steps=0, train={"env": []}, eval=evals)
    assert alone.when_all_fail == "pause"
    run = TrainingRun(RunInput("run", alone.model_dump(mode="json"), examples={"eval/a": 3}))
    # Nothing is published outside of a workflow.
    run._log.publish_request = lambda: None  # type: ignore[method-assign]
    return run


def test_an_evaluation_that_wakes_repeats_no_eval_that_has_a_reward_or_is_open() -> None:
    run = evaluation()
    part = run._state.evals
    part.last = {"a": {"reward": 0.5}, "b": {"reward": None}}
    part.open = [EvalProgress(EvalEpoch("0-1/b", "b", 0, 3, 1))]
    run._news.take()
    run._evals.open_again()
    assert [progress.epoch.epoch for progress in part.open] == ["0-1/b"]
    assert not run._news.pending
