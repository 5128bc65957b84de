"""`make bench-batches`: CPU seconds that the tokens of a step cost between engine and trainer.

TOKENS (1000000) in rollouts of LENGTH (1000), of which the engine samples half, SIZE (8) a group,
go the whole way by the code that takes them along in a run: the engine's reply becomes a trace in
the env server and then samples, is sent to the rollout worker, becomes a stored rollout, is scored
as part of a stored group, and becomes part of a batch, and the trainer's samples. What the engine,
tokenizers, environments and the trainer compute is not in it.

The last line of stdout is one JSON object: CPU seconds of each leg, by all threads, their sum, and
`per_million_s`; `bytes` is what the store takes of each kind of artifact.
"""

import asyncio
import functools
import gc
import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
from renderers.base import ParsedResponse, RenderedTokens
from renderers.client import generate
from verifiers.v1.clients.train import response_from_generate, serialize_completion
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import ModelCall, Reward, WireTrace
from verifiers.v1.types import UserMessage

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import GroupWork, ShipBatchInput
from ratchet.activities.envs.client import Reply
from ratchet.activities.envs.playing import encode
from ratchet.activities.envs.samples import Reading, Rollout, from_episode, to_document
from ratchet.activities.envs.shipped import ratchet_compat
from ratchet.activities.rollouts import groups, shipping
from ratchet.activities.scoring import filters
from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.filters import FiltersConfig
from tests.groups import score_group

RUN, ENV, LABEL, VOCABULARY = "bench", "reverse-text", "7.1a", 50_000
TASK = {"type": "T", "data": {"idx": 0, "prompt": "p"}}


@dataclass(frozen=True)
class Turn:
    """A prompt and what an engine answers to it."""

    prompt: list[int]
    reply: bytes


class _Engine:
    """The client of an engine that has answered."""

    base_url = "http://engine/v1"

    def __init__(self, reply: bytes) -> None:
        self._reply = reply

    async def post(self, path: str, **request: Any) -> Any:
        return SimpleNamespace(content=self._reply)


class _Renderer:
    """Text is the environment's business."""

    supports_tools = True

    def get_stop_token_ids(self) -> list[int]:
        return [0]

    def parse_response(self, token_ids: Sequence[int], **_: Any) -> ParsedResponse:
        return ParsedResponse(content="x")


def turns(tokens: int, length: int) -> list[Turn]:
    """Half of each is prompt. An engine answers like vLLM 0.32."""
    rng = random.Random(0)
    made = []
    for _ in range(tokens // length):
        ids = [rng.randrange(VOCABULARY) for _ in range(length)]
        entries = []
        for token in ids[length // 2 :]:
            one = {"token_id": token, "logprob": -rng.random(), "rank": 1}
            entries.append({**one, "top_logprobs": [one]})
        choice = {
            "index": 0,
            "logprobs": {"content": entries},
            "finish_reason": "stop",
            "token_ids": ids[length // 2 :],
            "weight_versions": [{"version": LABEL, "start": 0, "end": len(entries)}],
        }
        reply = {"request_id": "r", "choices": [choice]}
        made.append(Turn(ids[: length // 2], json.dumps(reply, separators=(",", ":")).encode()))
    return made


async def _received(turn: Turn) -> WireTrace:
    """The trace of a rollout of one turn, in the env server."""
    count = len(turn.prompt)
    message = UserMessage(content="x")
    trace = WireTrace.model_validate({"task": TASK, "agent": {"config": {}}})
    pending = prepare_turn(trace, [message])
    rendered = RenderedTokens(
        token_ids=turn.prompt,
        message_indices=[0] * (count - 1) + [-1],
        sampled_mask=[False] * count,
        is_content=[True] * (count - 1) + [False],
        message_roles=["user"],
    )
    result = await generate(
        client=_Engine(turn.reply),
        renderer=_Renderer(),
        messages=[],
        model="m",
        prompt_ids=turn.prompt,
        prompt_attribution=rendered,
        max_prompt_len=10**9,
    )
    response = response_from_generate(result, "m")
    response.raw = serialize_completion(response, "m")
    node = pending.commit(response)
    # As `ratchet_compat` does around the client's call.
    spans = ratchet_compat._spans.get()
    trace.info.setdefault(ratchet_compat.WEIGHT_VERSIONS, []).append(spans)
    trace.calls.append(ModelCall(node=node, finish_reason="stop"))
    trace.rewards["r"] = Reward(score=float(turn.prompt[0] % 2))
    trace.ok = trace.is_completed = True
    return trace


def _read(trace: WireTrace) -> Rollout:
    """The rollout that the env server makes of a trace."""
    episode = WireEpisode.model_validate({"task": TASK, "ok": True})
    episode.traces.append(trace)
    return from_episode(episode, Reading())


def _document(rollout: Rollout, group: str, index: int) -> dict[str, Any]:
    about = {"group": group, "index": index, "kind": "train", "env": ENV, "example": 0}
    return {**about, "temperature": 1.0, "version": 7, **to_document(rollout)}


def _commit(store: ArtifactStore, keyed: Sequence[tuple[str, bytes]]) -> list[ArtifactRef]:
    return [documents.commit(store, key, data, attempt="bench") for key, data in keyed]


class Legs:
    """Measures legs one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` gives; notes the CPU seconds that it took."""
        # Legs are in several processes: none scans for garbage what the ones before have made.
        gc.collect()
        gc.freeze()
        began = time.process_time()
        result = work()
        self.seconds[name] = time.process_time() - began
        return result


def measure(tokens: int, length: int, size: int, store: ArtifactStore) -> dict[str, Any]:
    """The result."""
    ratchet_compat.apply()
    legs, made = Legs(), turns(tokens, length)

    async def receive() -> list[WireTrace]:
        return [await _received(turn) for turn in made]

    traces = legs.time("env_receives_reply_s", lambda: asyncio.run(receive()))
    read = legs.time("env_samples_s", lambda: [_read(trace) for trace in traces])
    sent = legs.time("env_sends_samples_s", lambda: [encode(Reply(rollout=one)) for one in read])
    replies = legs.time(
        "worker_receives_samples_s",
        lambda: [msgspec.msgpack.decode(one, type=Reply) for one in sent],
    )
    rollouts = [reply.rollout for reply in replies]
    failed = [rollout.error for rollout in rollouts if rollout.error is not None]
    assert not failed, failed[0]
    places = [(f"train/{number // size}", number % size) for number in range(len(rollouts))]
    pairs = list(zip(rollouts, places, strict=True))
    found = legs.time("rollout_document_s", lambda: [_document(one, *at) for one, at in pairs])
    encoded = legs.time("rollout_encode_s", lambda: [documents.encode(one) for one in found])
    keyed = [(keys.rollout(RUN, *at), data) for at, data in zip(places, encoded, strict=True)]
    refs = legs.time("rollout_commit_s", lambda: _commit(store, keyed))
    stored = [documents.read(store, ref) for ref in refs]
    assert [one["samples"] for one in stored] == [one["samples"] for one in found]
    judge = functools.partial(filters.judge, vocab_size=VOCABULARY)
    slots = FiltersConfig()
    names = sorted({group for group, _ in places}, key=lambda name: int(name.split("/")[1]))

    def score(name: str) -> dict[str, Any]:
        # Who rolls a group out scores it from the documents that it has.
        own = [one for one in found if one["group"] == name]
        return score_group(
            GroupWork(name, "train", ENV, 0, len(own)),
            own,
            7,
            "",
            judge=functools.partial(judge, slots.pre_batch),
            post_batch=functools.partial(judge, slots.post_batch),
        )

    scored = legs.time("group_score_s", lambda: [score(name) for name in names])
    encoded = legs.time("group_encode_s", lambda: [documents.encode(one) for one in scored])
    keyed = [(keys.group(RUN, name), data) for name, data in zip(names, encoded, strict=True)]
    written = legs.time("group_commit_s", lambda: _commit(store, keyed))
    legs.time(
        "group_result_s",
        lambda: [groups.result(one, ref) for one, ref in zip(scored, written, strict=True)],
    )
    digest = hashlib.sha256("".join(ref.sha256 for ref in written).encode()).hexdigest()
    input = ShipBatchInput(RUN, 8, names, digest)
    post = functools.partial(judge, slots.post_batch)
    batch = legs.time(
        "batch_ship_s", lambda: shipping.ship(store, input, post, slots, attempt="bench")
    )
    assert batch.ref is not None, "the filters left nothing"
    samples = legs.time("trainer_reads_batch_s", lambda: decode_batch(store.get(batch.ref)))
    assert sum(len(sample.token_ids) for sample in samples) == batch.tokens
    total = sum(legs.seconds.values())
    return {
        "tokens": tokens,
        "trained": batch.tokens,
        **legs.seconds,
        "total_s": total,
        "per_million_s": total * 1e6 / tokens,
        # What a file costs, whatever it holds: syncs, names and markers.
        "commits_s": legs.seconds["rollout_commit_s"] + legs.seconds["group_commit_s"],
        "bytes": {
            "rollouts": sum(ref.size for ref in refs),
            "groups": sum(ref.size for ref in written),
            "batch": batch.ref.size,
        },
    }


def main() -> None:
    """Prints the result."""
    tokens, length, size = (
        int(os.environ.get(name, default))
        for name, default in (("TOKENS", "1000000"), ("LENGTH", "1000"), ("SIZE", "8"))
    )
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
        # Imports count for no token.
        measure(2 * length, length, size, ArtifactStore(f"{folder}/warm"))
        print(json.dumps(measure(tokens, length, size, ArtifactStore(f"{folder}/store"))))


if __name__ == "__main__":
    main()
