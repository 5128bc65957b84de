"""The trainer's refusals, and a policy gradient that points the right way."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from docs.step_metrics import undescribed
from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.training import determinism
from ratchet.activities.training.client import NonFinite, StateMismatch
from ratchet.activities.training.model import load_model
from ratchet.activities.training.trainer import Trainer
from tests.scoring import rescore
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_process import CONFIG


def loaded(policy: Path) -> Trainer:
    trainer = Trainer()
    result = trainer.load(policy, CONFIG, checkpoint=False)
    assert result["step"] == 0 and result["warnings"] == []
    return trainer


def test_a_load_seeds_what_a_model_draws(policy: Path) -> None:
    for seed in (3, 4):
        torch.manual_seed(17)
        Trainer().load(policy, {**CONFIG, "seed": seed}, checkpoint=False)
        assert torch.initial_seed() == seed


def test_a_version_is_not_mapped_once_it_is_loaded(policy: Path, tmp_path: Path) -> None:
    """Retention may delete it, and its space would stay taken."""
    folder = shutil.copytree(policy, tmp_path / "version")
    trainer = loaded(folder)
    assert trainer.step == 0 and str(folder) not in Path("/proc/self/maps").read_text()


def test_only_a_process_that_is_to_be_deterministic_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(determinism, "enable", lambda: asked.append(True))
    Trainer().prepare(deterministic=False)
    assert asked == []
    Trainer().prepare(deterministic=True)
    assert asked == [True]


def test_a_checkpoint_of_another_step_is_refused(tmp_path: Path, policy: Path) -> None:
    for trainer, at in ((Trainer(), None), (loaded(policy), 0)):
        with pytest.raises(StateMismatch, match=f"cannot save step 1: the trainer is at step {at}"):
            trainer.save(1, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_model_that_cannot_be_packed_is_padded_unless_it_must_be(
    tmp_path: Path, policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(policy, tmp_path / "windows")
    about = json.loads((folder / "config.json").read_text())
    about |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    about.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(about))

    def load(packing: bool | None) -> Trainer:
        section = {**CONFIG["trainer"], "packing": packing}
        trainer = Trainer()
        trainer.load(folder, {**CONFIG, "trainer": section}, checkpoint=False)
        return trainer

    assert not load(False)._packing and "sequences are padded" not in caplog.text
    assert not load(None)._packing and "sequences are padded" in caplog.text
    with pytest.raises(ValueError, match=r"packing is true.*set trainer\.packing to false"):
        load(True)


def test_a_checkpoint_of_other_threads_is_loaded_with_a_warning(
    tmp_path: Path, policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(policy).save(0, tmp_path / "state")
    section = {**CONFIG["trainer"], "threads": 2}
    result = Trainer().load(tmp_path / "state", {**CONFIG, "trainer": section}, checkpoint=True)
    warning = "torch_threads was 1 and is 2: the next steps may differ in their last bits"
    assert result["warnings"] == [warning] and warning in caplog.text


def test_a_batch_that_is_not_finite_changes_nothing(tmp_path: Path, policy: Path) -> None:
    trainer = loaded(policy)
    good = make_batch(0)
    bad = [replace(s, advantages=[float("nan")] * len(s.advantages)) for s in good]
    with pytest.raises(NonFinite, match=r"trainer\.optim\.lr"):
        trainer.train(1, encode_batch(bad), tmp_path / "bad")
    assert trainer.step == 0
    assert trainer.train(1, encode_batch(good), tmp_path / "good")["tokens"] > 0
    other = loaded(policy)
    other.train(1, encode_batch(good), tmp_path / "other")
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("good", "other")]
    assert weights[0] == weights[1]


def test_micro_batches_give_the_gradient_of_the_whole(tmp_path: Path, policy: Path) -> None:
    norms = []
    for tokens in (32, 4096):
        trainer = Trainer()
        section = {**CONFIG["trainer"], "micro_batch_tokens": tokens}
        trainer.load(policy, {**CONFIG, "trainer": section}, checkpoint=False)
        metrics = trainer.train(1, encode_batch(make_batch(0)), tmp_path / str(tokens))
        norms.append((metrics["grad_norm"], metrics["loss"], metrics["entropy"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_tokens_of_a_frozen_model_do_not_count_as_mismatch(tmp_path: Path, policy: Path) -> None:
    played = make_batch(0)
    alone = loaded(policy).train(1, encode_batch(played), tmp_path / "alone")
    learnt = [
        replace(
            s,
            logprobs=[0.0] * len(s.token_ids),
            rl_weights=[0.0] * len(s.token_ids),
            ce_weights=[float(on) for on in s.loss_mask],
        )
        for s in played
    ]
    mixed = loaded(policy).train(1, encode_batch([*played, *learnt]), tmp_path / "mixed")
    assert mixed["tokens"] == 2 * alone["tokens"]
    assert mixed["mismatch_kl"] == pytest.approx(alone["mismatch_kl"], rel=1e-4)


def test_rewarded_tokens_become_likelier(tmp_path: Path, policy: Path) -> None:
    model = load_model(policy)
    samples = make_batch(3)
    before = rescore(model, samples, seq_len=32, micro_batch_tokens=256)
    on_policy = [
        replace(s, logprobs=[lp if m else 0.0 for lp, m in zip(row, s.loss_mask, strict=True)])
        for s, row in zip(samples, before, strict=True)
    ]
    trainer = loaded(policy)
    metrics = trainer.train(1, encode_batch(on_policy), tmp_path / "v1")
    assert metrics["mismatch_kl"] < 1e-8 and metrics["is_masked"] == 0
    after = rescore(load_model(tmp_path / "v1"), samples, seq_len=32, micro_batch_tokens=256)
    gain = sum(
        a * (new - old)
        for s, rows in zip(samples, zip(before, after, strict=True), strict=True)
        for a, old, new in zip(s.advantages, *rows, strict=True)
    )
    assert gain > 0


def test_nll_of_ce_members_ignores_their_weights(tmp_path: Path, policy: Path) -> None:
    """Members are the first two tokens of each prompt but its first, which nothing predicts."""
    samples = [
        replace(s, ce_weights=[0.0, 0.1, 2.0, *[0.0] * (len(s.token_ids) - 3)])
        for s in make_batch(4)
    ]
    model = load_model(policy)
    scores = rescore(model, samples, seq_len=32, micro_batch_tokens=256)
    expected = -sum(row[1] + row[2] for row in scores) / (2 * len(samples))
    weighted = -sum(0.1 * row[1] + 2.0 * row[2] for row in scores) / (2 * len(samples))
    metrics = loaded(policy).train(1, encode_batch(samples), tmp_path / "v1")
    assert metrics["nll_ce"] == pytest.approx(expected, rel=1e-4)
    assert metrics["loss_ce"] == pytest.approx(weighted, rel=1e-4)
    assert metrics["tokens_ce"] == 2 * len(samples)
    assert not undescribed(metrics)
    assert "nll_ce" not in loaded(policy).train(1, encode_batch(make_batch(4)), tmp_path / "v2")


def test_a_step_reports_the_shares_that_it_masks_and_statistics_of_its_tokens(
    tmp_path: Path, policy: Path
) -> None:
    """Engines gave the tokens of two samples each far more, far less and the same probability."""
    samples = make_batch(2)
    scores = rescore(load_model(policy), samples, seq_len=32, micro_batch_tokens=256)
    apart = [[-0.5] * len(row) for row in scores[:2]] + [[-15.0] * len(row) for row in scores[2:4]]
    batch = [
        replace(s, logprobs=[lp if m else 0.0 for lp, m in zip(row, s.loss_mask, strict=True)])
        for s, row in zip(samples, [*apart, *scores[4:]], strict=True)
    ]
    trainer, section = Trainer(), {"loss": {"type": "ipo", "ipo_threshold": 1e-4}}
    trainer.load(policy, {**CONFIG, "trainer": {**CONFIG["trainer"], **section}}, checkpoint=False)
    metrics = trainer.train(1, encode_batch(batch), tmp_path / "v1")
    lower, higher, same = (sum(sum(s.loss_mask) for s in batch[n : n + 2]) for n in (0, 2, 4))
    tokens = lower + higher + same
    assert metrics["tokens"] == tokens
    assert metrics["is_masked_low"] == pytest.approx(lower / tokens)
    assert metrics["is_masked_high"] == pytest.approx(higher / tokens)
    assert metrics["is_masked"] == pytest.approx((lower + higher) / tokens)
    for name in ("entropy/all", "entropy/reverse-text", "mismatch_kl/all", "is_masked"):
        mean = metrics[name.partition("/")[0]]
        assert metrics[f"{name}/mean"] == pytest.approx(mean, rel=1e-4), name
        assert metrics[f"{name}/min"] < mean < metrics[f"{name}/max"], name
