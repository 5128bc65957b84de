"""From a verifiers episode to training samples and a rollout record.

Invariants: token ids, masks and log-probabilities are the engine's own, never rounded and never
tokenized again. Each message, sampled or from the env, trains exactly once, in the first sample
that holds it. Each sampled token that may train carries the policy version that sampled it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

from ratchet.activities.contracts.redact import LONGEST, redacted_all
from ratchet.activities.contracts.rollouts import POLICY_AGENT
from ratchet.activities.envs import failures
from ratchet.activities.envs.failures import frames_of, is_theirs

if TYPE_CHECKING:
    from collections.abc import Callable

    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Trace

WEIGHT_VERSIONS = "weight_versions"
UNLABELLED = (
    "the engine did not say which weights sampled a reply; that takes vLLM 0.32 or newer, and an "
    "env server that imports ratchet_compat"
)
UNNAMED_AGENT = "agent"
"""verifiers' name for the only agent of an env."""


class UnusableTrace(Exception):
    """A trace whose tokens are inconsistent; its rollout counts as errored."""


@dataclass(frozen=True)
class Reading:
    """What decides how an episode is read. `chat`: chat completions, for which the engine reports
    no versions; nothing of them trains, so they may lack token ids and log-probabilities. `label`:
    what has all weights of its tokens, if its requests named that, whatever the engine reports.
    `seq_len` is named where the policy's engine holds no more.
    """

    chat: bool = False
    label: str = ""
    seq_len: int | None = None


@dataclass(frozen=True)
class Served:
    """The engine's weight labels before and after a rollout of chat completions."""

    before: str
    after: str

    @property
    def mixed(self) -> bool:
        """Whether it is unknown which weights sampled which tokens."""
        return self.before != self.after

    @property
    def version(self) -> int:
        """Version of all sampled tokens, -1 if it is unknown; raises UnusableTrace for a label
        without one.
        """
        before, _ = version_of(self.before), version_of(self.after)
        return -1 if self.mixed else before


@dataclass(frozen=True)
class RolloutSample:
    """One sequence of T tokens before scoring; token_ids to versions have length T.

    `versions` is -1 and `logprobs` 0.0 where `loss_mask` is False. The first `prompt_tokens` tokens
    are prompt number `prompt` of the rollout. `observations` are spans (role, start, stop) of the
    text of the env's messages after the policy's first reply, without the template around it; None
    if the renderer does not distinguish the two.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    prompt: int = 0
    prompt_tokens: int = 0
    observations: list[tuple[str, int, int]] | None = None


@dataclass(frozen=True)
class Rollout:
    """One finished rollout, as stored. `record` is for people: messages, and how it went.

    `error` is one of `failures` or None. `provider` says that the engine, not the environment,
    ended it; such a rollout is not stored. `status` is then the engine's HTTP status, if known.
    """

    reward: float
    samples: list[RolloutSample]
    record: dict[str, Any]
    labels: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    provider: bool = False
    status: int | None = None

    @property
    def sampled_tokens(self) -> int:
        """Tokens the policy sampled."""
        return sum(sample.loss_mask.count(True) for sample in self.samples)


def version_of(label: str) -> int:
    """The policy version of a weight label '<version>.<push>'; raises UnusableTrace for others."""
    head = label.split(".", 1)[0]
    if not head.isdigit():
        raise UnusableTrace(f"the engine labels its weights {label!r}, which names no version")
    return int(head)


def _spans(trace: "Trace[Any, Any, Any]") -> list[list[dict[str, Any]] | None]:
    """Version spans of each sampled node, in node order; None where the engine reported none."""
    sampled = [node for node in trace.nodes if node.sampled]
    if sampled and hasattr(sampled[0], WEIGHT_VERSIONS):
        return [_plain(getattr(node, WEIGHT_VERSIONS)) for node in sampled]
    calls = trace.info.get(WEIGHT_VERSIONS)
    if calls is None:
        return [None] * len(sampled)
    if len(calls) != len(sampled):
        raise UnusableTrace(f"{len(calls)} calls have versions and {len(sampled)} were sampled")
    return [_plain(spans) for spans in calls]


def _plain(spans: Any) -> list[dict[str, Any]] | None:
    if spans is None:
        return None
    return [
        span
        if isinstance(span, dict)
        else {"version": span.version, "start": span.start, "end": span.end}
        for span in spans
    ]


def _node_versions(sampled: int, spans: list[dict[str, Any]] | None) -> tuple[list[int], set[str]]:
    """Version of each sampled token [sampled] of one node, and its labels."""
    if spans is None:
        raise UnusableTrace(UNLABELLED)
    versions = [-1] * sampled
    for span in spans:
        start, end = span["start"], span["end"]
        if start >= end:
            continue
        if end > sampled:
            raise UnusableTrace("a weight version spans more tokens than were sampled")
        versions[start:end] = [version_of(str(span["version"]))] * (end - start)
    if -1 in versions:
        raise UnusableTrace("a sampled token has no weight version")
    return versions, {str(span["version"]) for span in spans if span["end"] > span["start"]}


def _prompt(nodes: Sequence["MessageNode"]) -> tuple[dict[str, Any], int]:
    """The start of a branch up to the policy's first reply: {'messages', 'tools'} in the form in
    which an engine gets them, and its length in tokens.
    """
    from verifiers.v1.clients.train import tool_to_wire
    from verifiers.v1.dialects.chat import message_to_wire

    before = list(takewhile(lambda node: not node.sampled, nodes))
    reply = nodes[len(before)]
    tools = [tool_to_wire(tool) for tool in nodes[0].tools]
    opening = len(list(takewhile(lambda on: not on, reply.mask)))
    messages = [message_to_wire(node.message) for node in before]
    length = sum(len(node.token_ids) for node in before) + opening
    return {"messages": messages, "tools": tools or None}, length


def _observations(
    nodes: Sequence["MessageNode"], seen: set[int]
) -> list[tuple[str, int, int]] | None:
    """Spans of the env's text on a branch after the policy's first reply; see RolloutSample.

    Messages in `seen` (ids of nodes) are left out.
    """
    spans: list[tuple[str, int, int]] = []
    replied, place = False, 0
    for node in nodes:
        replied = replied or node.sampled
        if replied and not node.sampled and node.token_ids and id(node) not in seen:
            if len(node.is_content) != len(node.token_ids):
                return None
            start = place
            for said, run in groupby(node.is_content):
                stop = start + len(list(run))
                spans += [(node.message.role, start, stop)] * said
                start = stop
        place += len(node.token_ids)
    return spans


def trace_samples(
    trace: "Trace[Any, Any, Any]", prompts: list[dict[str, Any]], reading: Reading
) -> tuple[list[RolloutSample], set[str]]:
    """Samples of one trace, one a branch, and the weight labels of its sampled tokens. Chats get
    versions and labels from `served_by`.

    Adds to `prompts` those that samples begin with and that it lacks. Branches with nothing left to
    train are dropped. Raises UnusableTrace.
    """
    chat, label = reading.chat, reading.label
    spans = iter([None] * len(trace.nodes) if chat or label else _spans(trace))
    by_node = {id(node): next(spans) for node in trace.nodes if node.sampled}
    trained: set[int] = set()
    held: set[int] = set()
    samples: list[RolloutSample] = []
    labels: set[str] = set()
    for branch in trace.branches:
        if not branch.trainable:
            continue
        ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for node in branch.nodes:
            fresh = node.sampled and id(node) not in trained
            node_mask = _node_mask(node, fresh, strict=not chat)
            count = sum(node_mask)
            result: list[int] = []
            if fresh:
                trained.add(id(node))
                spans_of = by_node[id(node)]
                if label:
                    spans_of = [{"version": label, "start": 0, "end": count}]
                known = ([-1] * count, set()) if chat else _node_versions(count, spans_of)
                result, names = known
                labels |= names
            ids += node.token_ids
            mask += node_mask
            logprobs += _spread(list(map(float, node.logprobs)) if count else [], node_mask, 0.0)
            versions += _spread(result, node_mask, -1)
        if any(mask):
            prompt, prompt_tokens = _prompt(branch.nodes)
            if prompt not in prompts:
                prompts.append(prompt)
            place = prompts.index(prompt)
            observations = _observations(branch.nodes, held)
            held.update(id(node) for node in branch.nodes)
            samples.append(
                RolloutSample(ids, mask, logprobs, versions, place, prompt_tokens, observations)
            )
    return samples, labels


def _spread(values: list[Any], mask: list[bool], absent: float) -> list[Any]:
    """`values` in order where `mask` is on, and `absent` elsewhere and if there are none."""
    if not values:
        return [absent] * len(mask)
    start = mask.index(True)
    stop = start + len(values)
    if all(mask[start:stop]):
        return [absent] * start + values + [absent] * (len(mask) - stop)
    left = iter(values)
    return [next(left) if on else absent for on in mask]


def _node_mask(node: "MessageNode", fresh: bool, *, strict: bool) -> list[bool]:
    if len(node.mask) != len(node.token_ids):
        raise UnusableTrace("a message's mask is not aligned with its tokens")
    if not fresh:
        return [False] * len(node.token_ids)
    if len(node.logprobs) != sum(node.mask) and (strict or node.logprobs):
        raise UnusableTrace("a sampled token has no log-probability")
    return list(node.mask)


# -- the whole rollout ----------------------------------------------------------------------


def _messages(trace: "Trace[Any, Any, Any]") -> list[dict[str, Any]]:
    """Messages of the last branch; `sampled` marks the policy's own."""
    branches = trace.branches
    nodes = branches[-1].nodes if branches else []
    return [
        {
            **node.message.model_dump(mode="json", exclude_none=True),
            "sampled": node.sampled,
            "tokens": len(node.token_ids),
        }
        for node in nodes
    ]


def _timing(trace: "Trace[Any, Any, Any]") -> dict[str, float]:
    """Seconds spent in each phase, and when the rollout started and ended (Unix time)."""
    timing = trace.timing
    phases = (timing.boot, timing.setup, timing.agent, timing.finalize, timing.scoring)
    return {
        "start": timing.start,
        "end": max(timing.start, *(phase.end for phase in phases)),
        "setup": timing.setup.duration,
        "generation": timing.agent.duration,
        "model": timing.agent.model.duration,
        "scoring": timing.scoring.duration,
    }


def _agent(trace: "Trace[Any, Any, Any]") -> str:
    """The agent of a trace."""
    name: str = trace.agent.name
    return POLICY_AGENT if name == UNNAMED_AGENT else name


def _is_provider(error: Any) -> bool:
    """Whether the engine failed. A 4xx answer is about the request, so it is the task's fault."""
    return error.type == "ProviderError" and error.status_code not in (400, 413, 422)


def _status_of(episode: Any) -> int | None:
    """HTTP status of the error that ended the first trace that failed; None if it has none."""
    failed = next((trace for trace in episode.traces if not trace.ok), None)
    status = failed.last_error.status_code if failed and failed.last_error else None
    return None if status is None else int(status)


def _error(error: Any, trace: Any = None) -> dict[str, Any]:
    """An error that an episode or one of its traces recorded."""
    message, frames = error.message, frames_of(error.traceback)
    scores = {**trace.metrics, **trace.rewards} if trace else {}
    unset = [name for name, score in scores.items() if score is None]
    if unset and not any(map(is_theirs, frames)):
        # The function's frames are gone when its return value is read; those of verifiers would
        # send the reader to the wrong file.
        message, frames = f"{message} (without a value: {', '.join(unset)})", []
    found: dict[str, Any] = {"type": error.type, "message": message}
    return {**found, "frames": frames} if frames else found


def _bad_reward(traces: Sequence[Any]) -> dict[str, Any] | None:
    """Which reward of which function is not a finite number, if any."""
    rewards = [trace.reward for trace in traces]
    if all(map(math.isfinite, rewards)):
        return None
    culprits = [
        f"reward {name!r} returned {reward.value}"
        for trace in traces
        for name, reward in trace.rewards.items()
        if reward is not None and not math.isfinite(reward.value)
    ]
    which = f": {'; '.join(culprits)}" if culprits else f": {rewards}"
    return {"type": "BadReward", "message": f"a reward is not a finite number{which}"}


def _metrics(
    traces: Sequence[Any],
) -> tuple[dict[str, float | None], dict[str, Any] | None]:
    """The metrics of all traces, and which of them is no number, if any: environments may write
    them past verifiers' own methods.
    """
    metrics: dict[str, float | None] = {}
    error = None
    for name, value in (item for trace in traces for item in trace.metrics.items()):
        try:
            metrics[name] = None if value is None else float(value)
        except (TypeError, ValueError):
            message = f"metric {name!r} is {value!r}, which is no number"
            error = error or {"type": "BadMetric", "message": message}
    return metrics, error


def _error_of(episode: Any) -> tuple[dict[str, Any] | None, bool]:
    """The rollout's error, if any, and whether the engine caused it."""
    for trace in episode.traces:
        if not trace.ok:
            last = trace.last_error
            if last is None:
                return {"type": "Unfinished", "message": trace.stop_condition or ""}, False
            return _error(last, trace), _is_provider(last)
        if any(call.node is not None and call.finish_reason is None for call in trace.calls):
            # Only an engine that aborts a request ends a reply without a reason.
            return {"type": "Aborted", "message": "the engine cut a reply off"}, True
        if trace.is_timeout:
            return {"type": "Timeout", "message": trace.stop_condition or ""}, False
    if not episode.ok:
        last = episode.last_error
        nameless = {"type": "EnvError", "message": "episode not ok"}
        return _error(last) if last else nameless, False
    if not any(node.sampled for trace in episode.traces for node in trace.nodes):
        return {"type": "EmptyTrajectory", "message": "the policy was never called"}, False
    return None, False


def from_episode(
    episode: Any,
    reading: Reading,
    lay_out: "Callable[[Trace[Any, Any, Any]], list[RolloutSample]] | None" = None,
) -> Rollout:
    """The rollout of a served episode, from the traces whose tokens train the policy.

    Its reward is the mean over those traces. `lay_out` makes the samples of a trace without tokens;
    it raises UnusableTrace.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    error, provider = _error_of(episode)
    if error is not None and reading.seq_len is not None:
        error = failures.with_limit(error, reading.seq_len)
    samples: list[RolloutSample] = []
    labels: set[str] = set()
    prompts: list[dict[str, Any]] = []
    by_agent: list[dict[str, Any]] = []
    if error is None:
        try:
            for trace in traces:
                own, names = (
                    (lay_out(trace), set()) if lay_out else trace_samples(trace, prompts, reading)
                )
                samples += own
                labels |= names
                tokens = sum(sample.loss_mask.count(True) for sample in own)
                about = {"agent": _agent(trace), "reward": trace.reward, "sampled_tokens": tokens}
                by_agent.append(about)
        except UnusableTrace as unusable:
            samples, error = [], {"type": "UnusableTrace", "message": str(unusable)}
        else:
            if not samples and not reading.chat:
                error = {"type": "EmptyTrajectory", "message": "no sampled token came back"}
    rewards = [trace.reward for trace in traces]
    error = error or _bad_reward(traces)
    metrics, bad = _metrics(traces)
    error = error or bad
    finite = [reward for reward in rewards if math.isfinite(reward)]
    replies = [message for trace in traces for message in trace.assistant_messages]
    record: dict[str, Any] = {
        "messages": [message for trace in traces for message in _messages(trace)],
        "prompts": prompts,
        "traces": by_agent,
        "rewards": {
            name: None if reward is None else reward.value
            for trace in traces
            for name, reward in trace.rewards.items()
        },
        "metrics": metrics,
        "truncated": any(trace.is_truncated for trace in traces),
        "stop": traces[-1].stop_condition if traces else None,
        "turns": sum(trace.num_turns for trace in traces),
        "branches": sum(trace.num_branches for trace in traces),
        "responded": any((message.content or "").strip() for message in replies),
        "timing": _timing(traces[0]) if traces else {},
    }
    if reading.chat and not samples:
        record["sampled_tokens"] = sum(trace.num_output_tokens for trace in traces)
    return Rollout(
        reward=sum(finite) / len(finite) if finite else 0.0,
        samples=samples,
        record=record,
        labels=sorted(labels),
        error=error,
        provider=provider,
        status=_status_of(episode) if provider else None,
    )


def served_by(rollout: Rollout, served: Served) -> Rollout:
    """A rollout of chat completions with the versions and labels of the weights behind it."""
    rollout = replace(rollout, record={**rollout.record, "mixed": served.mixed})
    if rollout.error is not None and not rollout.samples:
        return rollout
    try:
        version = served.version
    except UnusableTrace as unusable:
        error = {"type": "UnusableTrace", "message": str(unusable)}
        record = {"sampled_tokens": rollout.sampled_tokens, **rollout.record}
        return replace(rollout, samples=[], error=error, record=record)
    samples = [
        replace(sample, versions=[version if on else -1 for on in sample.loss_mask])
        for sample in rollout.samples
    ]
    return replace(rollout, samples=samples, labels=sorted({served.before, served.after}))


def failed(kind: str, message: str) -> Rollout:
    """A rollout that ended without an episode."""
    return Rollout(0.0, [], {}, error={"type": kind, "message": message})


def to_document(rollout: Rollout) -> dict[str, Any]:
    """The rollout as JSON, in full precision; its error without secrets."""
    return {
        "reward": rollout.reward,
        "error": redacted_all(rollout.error, LONGEST),
        "labels": rollout.labels,
        "tokens": sum(len(sample.token_ids) for sample in rollout.samples),
        "sampled_tokens": rollout.sampled_tokens,
        # A deep copy would visit every token.
        "samples": [dict(vars(sample)) for sample in rollout.samples],
        **rollout.record,
    }
