"""The trainer's log-probabilities of a step, token by token, against a direct scoring."""

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from ratchet.activities.storage.batch import Sample, encode_batch
from ratchet.activities.storage.token_logprobs import (
    TokenLogprobs,
    decode_token_logprobs,
    encode_token_logprobs,
)
from ratchet.activities.training.trainer import Trainer
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_process import CONFIG

SEQ_LEN = 18


def mixed() -> list[Sample]:
    """Several samples of one rollout, other temperatures, some longer than SEQ_LEN."""
    found = make_batch(7, 9)
    assert {len(s.token_ids) > SEQ_LEN for s in found} == {True, False}
    owners = [("train/1", 0), ("train/1", 0), ("train/1", 2), ("train/0", 0)]
    return [
        replace(s, group=group, rollout=rollout, temperature=0.5 + 0.25 * n)
        for n, s in enumerate(found)
        for group, rollout in [owners[n % 4]]
    ]


def trained(policy: Path, out: Path, *, packing: bool, kept: Path | None) -> dict[str, float]:
    section = {"seq_len": SEQ_LEN, "micro_batch_tokens": 40, "packing": packing}
    trainer = Trainer()
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], **section}}
    trainer.load(policy, config, checkpoint=False)
    return trainer.train(1, encode_batch(mixed()), out, token_logprobs=kept)


@pytest.mark.parametrize("packing", [True, False])
def test_every_token_has_its_own_score(tmp_path: Path, policy: Path, packing: bool) -> None:
    samples = mixed()
    metrics = trained(policy, tmp_path / "out", packing=packing, kept=tmp_path / "kept")
    assert metrics["micro_batches"] > 1
    rows = decode_token_logprobs((tmp_path / "kept").read_bytes())
    assert [(row.group, row.rollout) for row in rows] == [(s.group, s.rollout) for s in samples]
    assert [row.sample for row in rows] == [0, 1, 0, 0, 2, 3, 1, 1, 4]
    plain = AutoModelForCausalLM.from_pretrained(policy)
    mismatch, sampled = 0.0, 0
    for sample, row in zip(samples, rows, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([sample.token_ids])).logits[0] / sample.temperature
        expected = torch.log_softmax(logits, -1)
        assert len(row.trainer_logprobs) == len(sample.token_ids)
        for place, score in enumerate(row.trainer_logprobs):
            if place == 0 or place >= SEQ_LEN:
                assert score is None
                continue
            assert score is not None
            token = sample.token_ids[place]
            assert math.isclose(score, expected[place - 1, token].item(), abs_tol=2e-5)
            if sample.loss_mask[place]:
                ratio = score - sample.logprobs[place]
                mismatch += math.exp(ratio) - ratio - 1
                sampled += 1
    assert metrics["mismatch_kl"] == pytest.approx(mismatch / sampled, rel=1e-4)


def test_keeping_them_changes_no_bit_of_the_weights(tmp_path: Path, policy: Path) -> None:
    trained(policy, tmp_path / "a", packing=True, kept=tmp_path / "kept")
    trained(policy, tmp_path / "b", packing=True, kept=None)
    files = [{p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("a", "b")]
    assert files[0] == files[1]


def test_a_repeated_step_writes_them_again_and_a_restored_one_does_not(
    tmp_path: Path, policy: Path
) -> None:
    data, trainer = encode_batch(make_batch(0)), Trainer()
    trainer.load(policy, CONFIG, checkpoint=False)
    result = [tmp_path / name for name in ("first", "again", "restored")]
    for path in result[:2]:
        trainer.train(1, data, tmp_path / "out", token_logprobs=path)
    assert result[0].read_bytes() == result[1].read_bytes()
    trainer.save(1, tmp_path / "checkpoint")
    trainer.load(tmp_path / "checkpoint", CONFIG, checkpoint=True)
    trainer.train(1, data, tmp_path / "out", token_logprobs=result[2])
    assert not result[2].exists()


OWNERS = st.tuples(st.sampled_from(["train/1", "train/2.1"]), st.integers(0, 2))
SCORED = st.tuples(OWNERS, st.integers(1, 6), st.integers(1, 6))


@given(st.lists(SCORED, max_size=8))
def test_rows_come_back(drawn: list[tuple[tuple[str, int], int, int]]) -> None:
    base = make_batch(0, 1)[0]
    samples, scores, expected, counts = [], [], [], dict[tuple[str, int], int]()
    for owner, length, cut in drawn:
        lists = ("token_ids", "loss_mask", "logprobs", "advantages", "versions")
        short = {name: (getattr(base, name) * 2)[:length] for name in lists}
        samples.append(replace(base, group=owner[0], rollout=owner[1], **short))
        row = [-0.25 * (1 + len(samples) + n) for n in range(min(cut, length))]
        scores.append(np.array(row, np.float32))
        place = counts[owner] = counts.get(owner, -1) + 1
        expected.append(
            TokenLogprobs(*owner, place, [None, *row[1:], *[None] * (length - len(row))])
        )
    data = encode_token_logprobs(samples, scores)
    assert decode_token_logprobs(data) == expected
    assert encode_token_logprobs(samples, scores) == data
    own = [row for row in expected if (row.group, row.rollout) == ("train/1", 1)]
    assert decode_token_logprobs(data, "train/1", 1) == own


def test_a_file_of_a_later_schema_is_refused() -> None:
    data = encode_token_logprobs([], [])
    table = pq.read_table(io.BytesIO(data))
    sink = io.BytesIO()
    key = "ratchet.token_logprobs.schema"
    pq.write_table(table.replace_schema_metadata({key: "2"}), sink)
    with pytest.raises(ValueError, match="schema 2, and this build reads 1"):
        decode_token_logprobs(sink.getvalue())
