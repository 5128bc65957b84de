"""Adapters: nothing but them trains, merged weights are exact, files are the same each time."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ratchet.activities.inference import fingerprints
from ratchet.activities.storage.batch import encode_batch
from ratchet.activities.storage.keys import ADAPTER_CONFIG, ADAPTER_WEIGHTS, FINGERPRINTS_FILE
from ratchet.activities.training import adapters
from ratchet.activities.training import trainer as trainer_module
from ratchet.activities.training.check import check_model
from ratchet.activities.training.model import load_model
from ratchet.activities.training.trainer import Trainer
from ratchet.configs.trainer import LoraConfig
from tests.scoring import rescore
from tests.unit.activities.training.conftest import make_batch
from tests.unit.activities.training.test_check import config as check_config
from tests.unit.activities.training.test_process import CONFIG

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODEL, ADAPTER = "model.safetensors", f"adapter/{ADAPTER_WEIGHTS}"


def config(lora: Mapping[str, Any] | None, **trainer: Any) -> dict[str, Any]:
    # At the start B is 0, and A gets no gradient: the rate is one at which a step moves something.
    optim = {"lr": 1e-2, **trainer.pop("optim", {})}
    section = {**CONFIG["trainer"], "lora": lora, "optim": optim, **trainer}
    return {**CONFIG, "trainer": section}


def begun(policy: Path, lora: Mapping[str, Any] | None = None, **trainer: Any) -> Trainer:
    result = Trainer()
    result.load(policy, config(lora or {}, **trainer), checkpoint=False)
    return result


def train(trainer: Trainer, steps: range, out: Path) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step in steps:
        metrics = trainer.train(step, encode_batch(make_batch(step)), out / str(step))
    return metrics


def merged(base: Path, version: Path) -> dict[str, torch.Tensor]:
    """Base and adapter put together by the formula."""
    weights, adapter = load_file(base / MODEL), load_file(version / ADAPTER)
    about = json.loads((version / "adapter" / ADAPTER_CONFIG).read_text())
    for name, a in adapter.items():
        plain = name.removeprefix("base_model.model.")
        if ".lora_A." in plain:
            b = adapter[name.replace(".lora_A.", ".lora_B.")]
            scale = about["lora_alpha"] / about["r"]
            weights[plain.replace(".lora_A.", ".")] += (b @ a) * scale
        elif ".lora_B." not in plain:
            weights[plain] = a
    return weights


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 4, "alpha": 12},
        {"targets": ["q_proj", "down_proj"]},
        {"targets": ["lm_head", "v_proj"], "modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head", "norm"]},
        {"modules_to_save": ["mlp"]},
    ],
    ids=["all", "two", "embedding", "head", "layers"],
)
def test_the_adapter_alone_trains_and_the_merged_weights_are_exported(
    tmp_path: Path, policy: Path, lora: dict[str, Any]
) -> None:
    trainer = begun(policy, lora)
    train(trainer, range(1, 4), tmp_path)
    before, after = load_file(policy / MODEL), load_file(tmp_path / "3" / MODEL)
    expected = merged(policy, tmp_path / "3")
    assert after.keys() == before.keys() == expected.keys()
    assert all(torch.equal(after[name], expected[name]) for name in after)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    trained = {*lora.get("targets", LINEAR), *lora.get("modules_to_save", [])}
    assert changed == {name for name in after if trained & {*name.split(".")}}
    assert (tmp_path / "3" / "config.json").read_text() == (policy / "config.json").read_text()
    samples = make_batch(7)
    plain = rescore(load_model(tmp_path / "3"), samples, seq_len=32, micro_batch_tokens=256)
    adapted = rescore(trainer._model, samples, seq_len=32, micro_batch_tokens=256)
    for ours, theirs in zip(adapted, plain, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_an_adapter_begins_the_same_whatever_loading_draws(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawing(folder: Path) -> Any:
        torch.rand(3)
        return load_model(folder)

    plain = begun(policy)
    monkeypatch.setattr(trainer_module, "load_model", drawing)
    ours, theirs = (dict(one._model.named_parameters()) for one in (begun(policy), plain))
    drawn = [name for name in ours if ".lora_A." in name]
    assert drawn and all(torch.equal(ours[name], theirs[name]) for name in drawn)


def test_the_exported_adapter_loads_with_peft_on_the_base(tmp_path: Path, policy: Path) -> None:
    from peft import PeftModel

    train(begun(policy, {"modules_to_save": ["lm_head"]}), range(1, 3), tmp_path)
    about = json.loads((tmp_path / "2" / "adapter" / ADAPTER_CONFIG).read_text())
    assert about["inference_mode"] is True, "whoever loads it does not train it"
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "2" / "adapter"))
    whole = loaded.merge_and_unload().state_dict()
    exported = load_file(tmp_path / "2" / MODEL)
    assert all(torch.equal(whole[name], exported[name]) for name in exported)


def test_a_checkpoint_holds_adapter_and_moments_and_continues_to_the_same_bits(
    tmp_path: Path, policy: Path
) -> None:
    lora = {"dropout": 0.2, "modules_to_save": ["lm_head"]}
    trainer = begun(policy, lora)
    train(trainer, range(1, 3), tmp_path / "whole")
    trainer.save(2, tmp_path / "checkpoint")
    train(trainer, range(3, 5), tmp_path / "whole")
    files = {str(f.relative_to(tmp_path / "checkpoint")) for f in _files(tmp_path / "checkpoint")}
    assert files == {ADAPTER, f"adapter/{ADAPTER_CONFIG}", "optimizer.safetensors", "trainer.json"}
    names = load_file(tmp_path / "checkpoint" / "optimizer.safetensors")
    assert all("lora_" in n or "modules_to_save" in n for n in names if not n.startswith("rng/"))
    resumed = Trainer()
    told = resumed.load(tmp_path / "checkpoint", config(lora), checkpoint=True, base=policy)
    assert told["step"] == 2
    resumed.save(2, tmp_path / "again")
    train(resumed, range(3, 5), tmp_path / "parts")
    for name in (ADAPTER, f"adapter/{ADAPTER_CONFIG}", "optimizer.safetensors"):
        ours, theirs = (tmp_path / at / name for at in ("checkpoint", "again"))
        assert ours.read_bytes() == theirs.read_bytes(), name
    for name in (MODEL, ADAPTER, "canary.json", FINGERPRINTS_FILE):
        ours, theirs = (tmp_path / at / "4" / name for at in ("whole", "parts"))
        assert ours.read_bytes() == theirs.read_bytes(), name


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def test_the_base_keeps_its_bits(tmp_path: Path, policy: Path) -> None:
    trainer = begun(policy)
    frozen = {n: p.clone() for n, p in trainer._model.named_parameters() if not p.requires_grad}
    train(trainer, range(1, 3), tmp_path)
    held = dict(trainer._model.named_parameters())
    assert len(frozen) > 7 and all(torch.equal(held[name], frozen[name]) for name in frozen)
    assert all(held[name].grad is None for name in frozen)


def test_activation_checkpointing_gives_an_adapter_the_same_bits(
    tmp_path: Path, policy: Path
) -> None:
    for name, again in (("plain", False), ("again", True)):
        trainer = begun(policy, {"dropout": 0.1}, activation_checkpointing=again)
        train(trainer, range(1, 3), tmp_path / name)
    plain, again_ = ((tmp_path / name / "2" / MODEL).read_bytes() for name in ("plain", "again"))
    assert plain == again_


def test_dropout_is_of_training_passes_alone(tmp_path: Path, policy: Path) -> None:
    trainers = {rate: begun(policy, {"dropout": rate}) for rate in (0.0, 0.5)}
    for rate, trainer in trainers.items():
        train(trainer, range(1, 3), tmp_path / str(rate))
    none, half = (load_file(tmp_path / str(rate) / "2" / ADAPTER) for rate in trainers)
    assert any(not torch.equal(none[name], half[name]) for name in none)
    dropped = trainers[0.5]
    samples = make_batch(7)
    scores = [rescore(dropped._model, samples, seq_len=32, micro_batch_tokens=256) for _ in "ab"]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("optim", ["sgd", "muon", "signsgd"])
def test_every_optimizer_trains_an_adapter(tmp_path: Path, policy: Path, optim: str) -> None:
    train(begun(policy, optim={"type": optim}), range(1, 3), tmp_path)
    before, after = load_file(policy / MODEL), load_file(tmp_path / "2" / MODEL)
    assert {n.split(".")[-2] for n in after if not torch.equal(before[n], after[n])} == {*LINEAR}


def test_bfloat16_lowers_passes_and_not_the_merge(tmp_path: Path, policy: Path) -> None:
    train(begun(policy, compute_dtype="bfloat16"), range(1, 3), tmp_path)
    expected = merged(policy, tmp_path / "2")
    exported = load_file(tmp_path / "2" / MODEL)
    assert all(torch.equal(exported[name], expected[name]) for name in exported)


def test_a_lowered_pass_copies_no_input_to_float32(tmp_path: Path, policy: Path) -> None:
    trainer = begun(policy, compute_dtype="bfloat16")
    met = set()
    for name, module in trainer._model.named_modules():
        if name.endswith("down_proj.lora_A.default"):
            module.register_forward_pre_hook(lambda _, args: met.add(args[0].dtype))
    train(trainer, range(1, 2), tmp_path)
    assert met == {torch.bfloat16}


def test_a_checkpoint_goes_with_its_base_and_its_section(tmp_path: Path, policy: Path) -> None:
    trainer = begun(policy)
    train(trainer, range(1, 2), tmp_path)
    trainer.save(1, tmp_path / "checkpoint")
    other = tmp_path / "1"

    def load(lora: Mapping[str, Any] | None, base: Path | None) -> None:
        Trainer().load(tmp_path / "checkpoint", config(lora), checkpoint=True, base=base)

    with pytest.raises(ValueError, match=r"adapter of step 1 belongs to base weights .*restore"):
        load({}, other)
    with pytest.raises(ValueError, match=r"goes with the weights of version 0, and was loaded w"):
        load({}, None)
    with pytest.raises(ValueError, match=r"holds the adapter .*'rank': 16.* is .*'rank': 8"):
        load({"rank": 8}, policy)
    with pytest.raises(ValueError, match=r"trainer\.lora of the config is not set"):
        load(None, policy)
    plain = Trainer()
    plain.load(policy, config(None), checkpoint=False)
    plain.save(0, tmp_path / "plain")
    with pytest.raises(ValueError, match="holds all weights"):
        Trainer().load(tmp_path / "plain", config({}), checkpoint=True, base=policy)
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match="older build made that version 0"):
        adapters.identity(tmp_path / "old")


def test_a_change_of_the_adapter_is_refused_while_a_trainer_holds_it(
    tmp_path: Path, policy: Path
) -> None:
    trainer = begun(policy)
    with pytest.raises(ValueError, match="while a trainer holds its state"):
        batch = encode_batch(make_batch(1))
        trainer.train(1, batch, tmp_path / "1", config=config({"rank": 8}), revision=1)


# -- before a run ---------------------------------------------------------------------------------


def wrong(policy: Path, **lora: Any) -> dict[str, str]:
    return adapters.problems(load_model(policy), LoraConfig(**lora))


def test_what_can_be_adapted_is_right(policy: Path) -> None:
    assert wrong(policy) == {}
    names = ["self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head"]
    assert wrong(policy, targets=names, modules_to_save=["embed_tokens", "norm"]) == {}


@pytest.mark.parametrize(
    ("lora", "key", "said"),
    [
        ({"targets": ["q_proj", "c_attn"]}, "targets", r"named 'c_attn'; .*down_proj, gate_proj"),
        ({"targets": ["norm"]}, "targets", "no linear layer is named 'norm'"),
        ({"targets": ["proj"]}, "targets", "no linear layer is named 'proj'"),
        ({"modules_to_save": ["wte"]}, "modules_to_save", r"'wte'; .*embed_tokens.* lm_head"),
        ({"modules_to_save": ["rotary_emb"]}, "modules_to_save", "no module is named"),
        ({"targets": ["up_proj"], "modules_to_save": ["mlp"]}, "targets", r"peft cannot adapt"),
    ],
)
def test_what_cannot_be_adapted_names_what_can(
    policy: Path, lora: dict[str, Any], key: str, said: str
) -> None:
    found = wrong(policy, **lora)
    assert list(found) == [key] and re.search(said, found[key]), found


def test_experts_of_a_mixture_are_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    about = Qwen3MoeConfig(**sizes, num_experts=2, moe_intermediate_size=16, vocab_size=64)
    for targets, refused in (("all-linear", True), (["q_proj"], False)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(about)
        found = adapters.problems(model, LoraConfig(targets=targets))
        assert ("name the layers of attention" in found.get("targets", "")) == refused


@pytest.mark.timeout(180)
@pytest.mark.nightly
def test_the_preflight_refuses_targets_of_another_model(policy: Path) -> None:
    good = check_config({"name": str(policy)}, lora={"targets": ["q_proj"]})
    assert check_model(good) == []
    refuses_targets({"name": str(policy)})


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize("model", [{}, {"name": "ratchet/smollm2-135m"}], ids=["tiny", "smollm2"])
def test_the_preflight_refuses_targets_of_another_shipped_model(model: dict[str, str]) -> None:
    refuses_targets(model)


def refuses_targets(model: dict[str, str]) -> None:
    (problem,) = check_model(check_config(model, lora={"targets": ["c_attn"]}))
    assert problem.pointer == "/trainer/lora/targets" and problem.key == "trainer.lora.targets"
    assert "'c_attn'" in problem.message and "q_proj" in problem.message


def test_names_that_no_model_has_are_refused_with_the_config() -> None:
    for lora, said in (
        ({"targets": []}, "names no layer"),
        ({"targets": [""]}, "is not a name"),
        ({"targets": ["lm_head"], "modules_to_save": ["lm_head"]}, "both name lm_head"),
        ({"rank": 0}, "rank"),
    ):
        with pytest.raises(ValueError, match=said):
            LoraConfig.model_validate(lora)


def alone(lora: Mapping[str, Any]) -> dict[str, Any]:
    """A config by which engines get the adapter alone."""
    served = config(lora)
    return {**served, "inference": {**served.get("inference", {}), "transfer": "adapter"}}


def test_a_version_of_an_adapter_alone_has_its_bits_and_those_of_its_base(
    tmp_path: Path, policy: Path
) -> None:
    lora = {"rank": 4, "alpha": 6, "targets": ["q_proj", "down_proj"]}
    both = {}
    for kind, run in (("merged", config(lora)), ("alone", alone(lora))):
        trainer = Trainer()
        trainer.load(policy, run, checkpoint=False)
        train(trainer, range(1, 3), tmp_path / kind)
        both[kind] = tmp_path / kind / "2"
    files = {str(file.relative_to(both["alone"])) for file in _files(both["alone"])}
    about = f"adapter/{ADAPTER_CONFIG}"
    assert files == {ADAPTER, about, "canary.json", FINGERPRINTS_FILE}
    assert (both["alone"] / ADAPTER).read_bytes() == (both["merged"] / ADAPTER).read_bytes()
    found, base = fingerprints.read(both["alone"]), fingerprints.read(policy)
    assert found is not None and base is not None
    tensors = load_file(both["alone"] / ADAPTER)
    scaled = {name: t * (6 / 4) if ".lora_B." in name else t for name, t in tensors.items()}
    own = fingerprints.take(scaled.items(), ["float32"])
    assert found.shapes == base.shapes | own.shapes
    assert found.dtypes == {"float32": base.dtypes["float32"] | own.dtypes["float32"]}
    canaries = [json.loads((path / "canary.json").read_text()) for path in both.values()]
    for ours, theirs in zip(*(canary["sequences"] for canary in canaries), strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)


def test_a_checkpoint_goes_on_to_the_same_adapters(tmp_path: Path, policy: Path) -> None:
    trainer = Trainer()
    trainer.load(policy, alone({}), checkpoint=False)
    train(trainer, range(1, 3), tmp_path / "whole")
    trainer.save(2, tmp_path / "checkpoint")
    train(trainer, range(3, 4), tmp_path / "whole")
    resumed = Trainer()
    resumed.load(tmp_path / "checkpoint", alone({}), checkpoint=True, base=policy)
    train(resumed, range(3, 4), tmp_path / "resumed")
    whole, again = tmp_path / "whole" / "3", tmp_path / "resumed" / "3"
    assert all(
        (again / file.relative_to(whole)).read_bytes() == file.read_bytes()
        for file in _files(whole)
    )
