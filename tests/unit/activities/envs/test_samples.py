"""Traces to samples: alignment, branches, versions, and what counts as an error."""

from typing import Any

import pytest
from verifiers.v1.episode import WireEpisode

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import GroupWork
from ratchet.activities.envs.samples import (
    Reading,
    Rollout,
    Served,
    UnusableTrace,
    from_episode,
    served_by,
    to_document,
    version_of,
)
from ratchet.activities.rollouts import groups
from tests.groups import score_group

LOGPROB = -0.123456789012345
USAGE = {"prompt_tokens": 5, "completion_tokens": 7}


def _node(
    parent: int | None, ids: list[int], sampled: int = 0, content: str = "x"
) -> dict[str, Any]:
    """A message of `ids`, of which the policy sampled the last `sampled`."""
    return {
        "parent": parent,
        "message": {"role": "assistant" if sampled else "user", "content": content},
        "sampled": bool(sampled),
        "token_ids": ids,
        "mask": [False] * (len(ids) - sampled) + [True] * sampled,
        "logprobs": [LOGPROB - n for n in range(sampled)],
    }


def _episode(nodes: list[dict[str, Any]], **changes: Any) -> Any:
    """An episode of one trace over `nodes`, as it comes over the wire."""
    task = {"type": "T", "data": {"idx": 0, "prompt": "p"}}
    calls = [
        {"node": index, "finish_reason": "stop"}
        for index, node in enumerate(nodes)
        if node["sampled"]
    ]
    trace = {
        "task": task,
        "agent": {"config": {}},
        "nodes": nodes,
        "calls": calls,
        "rewards": {"r": {"score": 0.5, "weight": 1.0}},
        "metrics": {"m": 2.0},
        "ok": True,
        "is_completed": True,
        "stop_condition": "agent_completed",
        "info": _spans(
            *([("1.0", 0, sum(node.get("mask", ())))] for node in nodes if node["sampled"])
        ),
        **changes,
    }
    return WireEpisode.model_validate({"task": task, "ok": trace["ok"], "traces": [trace]})


def read(episode: Any, **reading: Any) -> Rollout:
    """The rollout of an episode in which the policy was asked by token ids."""
    return from_episode(episode, Reading(**reading))


def chatted(episode: Any, before: str, after: str) -> Rollout:
    """The rollout of an episode of chat completions, between two labels of the engine."""
    return served_by(read(episode, chat=True), Served(before, after))


def _spans(*calls: list[tuple[str, int, int]]) -> dict[str, Any]:
    named = [[dict(zip(("version", "start", "end"), s, strict=True)) for s in c] for c in calls]
    return {"weight_versions": named}


def test_linear_conversation_is_one_sample() -> None:
    nodes = [_node(None, [1, 2]), _node(0, [3, 4, 5], 2), _node(1, [6]), _node(2, [7, 8], 1)]
    info = _spans([("3.1", 0, 1), ("4.2", 1, 2)], [("4.2", 0, 1)])
    rollout = read(_episode(nodes, info=info))
    (sample,) = rollout.samples
    assert sample.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sample.loss_mask == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    assert sample.logprobs == [0, 0, 0, LOGPROB, LOGPROB - 1, 0, 0, LOGPROB]
    assert sample.versions == [-1, -1, -1, 3, 4, -1, -1, 4]
    assert rollout.labels == ["3.1", "4.2"]
    assert (rollout.reward, rollout.error, rollout.sampled_tokens) == (0.5, None, 3)
    document = to_document(rollout)
    assert document["turns"] == 2 and document["branches"] == 1
    assert document["samples"][0]["logprobs"][3] == LOGPROB


def test_shared_sampled_message_trains_once() -> None:
    """0 -> 1(sampled) forks into 2 -> 3(sampled) and 4 -> 5(sampled)."""
    nodes = [
        _node(None, [1]),
        _node(0, [2, 3], 1),
        _node(1, [4]),
        _node(2, [5], 1),
        _node(1, [6]),
        _node(4, [7, 8], 2),
    ]
    info = _spans(*([("9.0", 0, count)] for count in (1, 1, 2)))
    first, second = read(_episode(nodes, info=info)).samples
    assert (first.token_ids, second.token_ids) == ([1, 2, 3, 4, 5], [1, 2, 3, 6, 7, 8])
    assert first.loss_mask == [False, False, True, False, True]
    assert second.loss_mask == [False, False, False, False, True, True]
    assert second.versions == [-1, -1, -1, -1, 9, 9]
    assert second.logprobs[2] == 0.0


def test_branch_without_anything_fresh_is_dropped() -> None:
    nodes = [_node(None, [1]), _node(0, [2], 1), _node(1, [3]), _node(1, [4], content="y")]
    (only,) = read(_episode(nodes)).samples
    assert only.token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    "info",
    [
        _spans([("1.0", 0, 1)]),
        _spans([("1.0", 0, 3)]),
        _spans([("1.0", 0, 2)], [("1.0", 0, 2)]),
    ],
)
def test_versions_that_do_not_add_up_are_an_error(info: dict[str, Any]) -> None:
    rollout = read(_episode([_node(None, [1]), _node(0, [2, 3], 2)], info=info))
    assert rollout.error is not None and rollout.error["type"] == "UnusableTrace"
    assert rollout.samples == []


def test_missing_logprob_is_an_error() -> None:
    nodes = [_node(None, [1]), _node(0, [2, 3], 2)]
    nodes[1]["logprobs"] = [-1.0]
    rollout = read(_episode(nodes))
    assert rollout.error is not None and "log-probability" in rollout.error["message"]


@pytest.mark.parametrize(
    ("status", "provider"), [(503, True), (404, True), (500, True), (400, False)]
)
def test_who_is_to_blame(status: int, provider: bool) -> None:
    errors = [{"type": "ProviderError", "message": "gone", "status_code": status}]
    rollout = read(_episode([], ok=False, errors=errors))
    assert rollout.error == {"type": "ProviderError", "message": "gone"}
    assert rollout.provider is provider
    assert rollout.status == (status if provider else None)


@pytest.mark.parametrize(
    "said",
    [
        "Prompt length (300) exceeds maximum context length (256).",
        "This model's maximum context length is 256 tokens. However, your prompt contains 300",
    ],
)
def test_a_prompt_that_is_too_long_names_the_key(said: str) -> None:
    def ended_by(kind: str) -> str:
        errors = [{"type": kind, "message": said, "status_code": 400}]
        error = read(_episode([], ok=False, errors=errors), seq_len=256).error
        assert error is not None
        return str(error["message"])

    assert ended_by("ProviderError").startswith(
        "the prompt and a reply do not fit into trainer.seq_len (256); raise it, or shorten the "
        "prompt: "
    )
    assert ended_by("ProviderError").endswith(said)
    assert ended_by("TaskError") == said, "of another model, which the environment asked"


def test_other_bad_ends() -> None:
    task = _episode([], ok=False, errors=[{"type": "TaskError", "message": "boom"}])
    assert not read(task).provider
    late = read(_episode([_node(None, [1]), _node(0, [2], 1)], is_timeout=True))
    assert late.error is not None and late.error["type"] == "Timeout"
    nan = {"r": {"score": float("nan"), "weight": 1.0}}
    bad = read(_episode([_node(None, [1]), _node(0, [2], 1)], rewards=nan))
    assert bad.error is not None and bad.error["type"] == "BadReward" and bad.reward == 0.0
    empty = read(_episode([]))
    assert empty.error is not None and empty.error["type"] == "EmptyTrajectory"
    cut = _episode([_node(None, [1]), _node(0, [2], 1)], calls=[{"node": 1}])
    assert read(cut).provider, "the engine aborted the request"


def test_a_chat_whose_weights_did_not_change_has_their_version() -> None:
    nodes = [_node(None, []), _node(0, [1, 2, 3], 2)]
    rollout = chatted(_episode(nodes, info={}), "3.4a", "3.4a")
    (sample,) = rollout.samples
    assert sample.versions == [-1, 3, 3] and sample.logprobs == [0.0, LOGPROB, LOGPROB - 1]
    document = to_document(rollout)
    assert (document["labels"], document["mixed"]) == (["3.4a"], False)
    assert document["sampled_tokens"] == 2


def test_a_chat_whose_weights_changed_is_mixed_and_of_both() -> None:
    nodes = [_node(None, []), _node(0, [1, 2, 3], 2)]
    rollout = chatted(_episode(nodes, info={}), "3.4a", "5.6b")
    assert rollout.samples[0].versions == [-1, -1, -1]
    document = {**to_document(rollout), "temperature": 1.0}
    assert (document["labels"], document["mixed"]) == (["3.4a", "5.6b"], True)
    group = score_group(GroupWork("eval/0-0/e/0", "eval", "e", 0, 1), [document], 3, "")
    assert groups.served_versions(group) == {3, 5} and groups.mixed_of(group) == 1


def test_a_chat_may_lack_token_ids_and_logprobs() -> None:
    bare = _node(0, [1, 2, 3], 2)
    bare["logprobs"] = []
    rollout = chatted(_episode([_node(None, []), bare], info={}), "1.0", "1.0")
    assert rollout.error is None and rollout.samples[0].logprobs == [0.0] * 3
    nodes = [_node(None, []), {**_node(0, [], 0), "sampled": True}]
    calls = [{"node": 1, "finish_reason": "stop", "usage": USAGE}]
    rollout = chatted(_episode(nodes, info={}, calls=calls), "1.0", "1.0")
    assert rollout.error is None and rollout.samples == []
    assert to_document(rollout)["sampled_tokens"] == 7
    unnamed = chatted(_episode(nodes, info={}), "default", "default")
    assert unnamed.error is not None and "'default', which names no version" in str(unnamed.error)
    unnamed = chatted(_episode([_node(None, []), bare], info={}), "default", "default")
    assert unnamed.samples == [] and to_document(unnamed)["sampled_tokens"] == 2


def test_tokens_of_the_template_may_lie_between_those_that_were_sampled() -> None:
    node = _node(0, [1, 2, 3, 4, 5], 3)
    node["mask"] = [False, True, False, True, True]
    (sample,) = read(_episode([_node(None, [9]), node], info=_spans([("3.1", 0, 3)]))).samples
    assert sample.logprobs == [0, 0, LOGPROB, 0, LOGPROB - 1, LOGPROB - 2]
    assert sample.versions == [-1, -1, 3, -1, 3, 3]


def test_metrics_are_numbers_whatever_an_environment_wrote() -> None:
    episode = _episode([_node(None, [1]), _node(0, [2], 1)])
    episode.traces[0].metrics |= {"flag": True, "text": "1.5", "none": None}
    rollout = read(episode)
    metrics = rollout.record["metrics"]
    assert repr(metrics) == "{'m': 2.0, 'flag': 1.0, 'text': 1.5, 'none': None}"
    assert rollout.error is None
    episode.traces[0].metrics["bad"] = "n/a"
    rollout = read(episode)
    assert rollout.record["metrics"] == metrics and rollout.error is not None
    assert rollout.error["message"] == "metric 'bad' is 'n/a', which is no number"


def test_an_engine_that_failed_is_named_before_a_metric() -> None:
    errors = [{"type": "ProviderError", "message": "gone", "status_code": 503}]
    episode = _episode([], ok=False, errors=errors)
    episode.traces[0].metrics["bad"] = "n/a"
    assert read(episode).provider


def test_version_labels() -> None:
    assert version_of("12.a7") == version_of("12") == 12
    with pytest.raises(UnusableTrace, match="'default', which names no version"):
        version_of("default")


@pytest.mark.parametrize("info", [{}, {"weight_versions": [None]}, _spans([("default", 0, 2)])])
def test_tokens_of_no_version_never_train(info: dict[str, Any]) -> None:
    rollout = read(_episode([_node(None, [1]), _node(0, [2, 3], 2)], info=info))
    assert rollout.error is not None and rollout.error["type"] == "UnusableTrace"
    assert "weights" in rollout.error["message"] and rollout.samples == []


# -- groups ---------------------------------------------------------------------------------


def _document(reward: float, error: dict[str, str] | None = None) -> dict[str, Any]:
    nodes = [_node(None, [1]), _node(0, [2, 3], 2)]
    nodes_info = _spans([("5.0", 0, 2)])
    whole = read(_episode(nodes, info=nodes_info))
    rollout = Rollout(reward, whole.samples, whole.record, whole.labels, error)
    return {**to_document(rollout), "temperature": 1.0}


def test_group_scores_survivors_only() -> None:
    work = GroupWork("train/7", "train", "e", 0, 4)
    bad = _document(0.9, {"type": "TaskError", "message": "boom"})
    document = score_group(work, [_document(1.0), None, bad, _document(0.0)], 6, "stale")
    result = groups.result(document, ArtifactRef("k", "0" * 64, 1, "p"))
    assert (result.survivors, result.errored, result.samples, result.tokens) == (2, 2, 2, 6)
    assert (result.reward_mean, result.version_start, result.labels) == (0.5, 5, ["5.0"])
    assert result.error == "Abandoned: stale"
    rows = groups.batch_samples(document)
    assert [row.rollout for row in rows] == [0, 3]
    assert rows[0].advantages == [0.0, 0.5, 0.5]
    assert rows[1].advantages == [0.0, -0.5, -0.5]
    assert groups.batch_group(document).errored == 2


def test_group_without_survivors() -> None:
    work = GroupWork("train/8", "train", "e", 0, 2)
    document = score_group(work, [None, None], 6, "")
    result = groups.result(document, ArtifactRef("k", "0" * 64, 1, "p"))
    assert (result.survivors, result.samples, result.version_start) == (0, 0, 6)
    assert groups.batch_samples(document) == []


def test_eval_groups_get_no_advantages() -> None:
    work = GroupWork("eval/0-0/e/0", "eval", "e", 0, 2)
    document = score_group(work, [_document(1.0), _document(0.0)], 5, "")
    assert "advantage" not in document["rollouts"][0]
    assert groups.served_versions(document) == {5}
    assert [rollout.reward for rollout in groups.eval_rollouts(document)] == [1.0, 0.0]


def test_tokens_have_the_label_of_the_adapter_that_was_named() -> None:
    """Whatever weights the engine says that it has by now."""
    nodes = [_node(None, [1]), _node(0, [2, 3], 2), _node(1, [4]), _node(2, [5], 1)]
    info = _spans([("0.1a", 0, 2)], [("9.9a", 0, 1)])
    rollout = read(_episode(nodes, info=info), label="7.12b")
    (sample,) = rollout.samples
    assert sample.versions == [-1, 7, 7, -1, 7]
    assert rollout.labels == ["7.12b"]
    assert read(_episode(nodes, info={}), label="7.12b").labels == ["7.12b"]
