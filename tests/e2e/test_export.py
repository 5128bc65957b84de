"""What a run trained, taken out of the stack: by transformers, and by another run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.activities.storage import keys
from ratchet.worker.stack import Addresses
from tests.e2e.driving import get, launch, wait_until
from tests.e2e.trained import STEPS, Trained

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.stack]

SMALL = ("eval.env=[]", "train.batch_size=16", "train.group_size=4")


def export(where: Addresses, *arguments: str) -> Any:
    """What `ratchet runs export` says, as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "ratchet.api.client", "runs", "export", *arguments, "--json"],
        env={**os.environ, "RATCHET_API": where.api},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_transformers_loads_what_was_exported(trained: Trained, tmp_path: Path) -> None:
    where, store, run_id = trained.where, trained.store, trained.id
    made = export(where, run_id, "--to", str(tmp_path / "mine"))
    assert (made["step"], made["chosen"]) == (STEPS, "checkpoint")
    kept = store.fetch_folder(store.require(keys.weights(run_id, STEPS)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mine", dtype=torch.float32).eval()
    served = load_file(kept / "model.safetensors")
    loaded = model.state_dict()
    assert loaded.keys() == served.keys()
    assert all(torch.equal(loaded[name], served[name]) for name in served)
    # The log-probabilities that the trainer itself had of that version.
    for one in json.loads((kept / "canary.json").read_text())["sequences"]:
        ids = torch.tensor([one["token_ids"]])
        with torch.no_grad():
            scores = model(ids).logits[:, :-1].log_softmax(-1)
        chosen = scores.gather(-1, ids[:, 1:, None])[0, :, 0]
        assert torch.allclose(chosen, torch.tensor(one["logprobs"]), atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "mine")
    talk = [{"role": "user", "content": "ab"}]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    card = (tmp_path / "mine" / "README.md").read_text()
    assert f"# {run_id}, step {STEPS}" in card and f"| reverse-text | {STEPS} | " in card


def test_the_best_is_that_of_the_evals(trained: Trained, tmp_path: Path) -> None:
    where, run_id = trained.where, trained.id
    evals = get(where, f"/v1/runs/{run_id}/evals")["data"]
    best = max(evals, key=lambda record: (record["reward_mean"], record["step"]))
    made = export(where, run_id, "--best", "--to", str(tmp_path / "best"))
    assert (made["step"], made["best_of"]) == (best["step"], "reverse-text")


@pytest.mark.nightly
def test_another_run_begins_with_it(trained: Trained) -> None:
    where, store, parent = trained.where, trained.store, trained.id
    name = f"model.name=run:{parent}@{STEPS}"
    child = launch(where, "reverse_text", "max_steps=1", name, *SMALL)
    run = wait_until(where, child, lambda run: run["status"] == "succeeded")
    assert run["lineage"] == {"source": parent, "step": STEPS, "kind": "model"}
    first, theirs = (
        load_file(store.fetch_folder(store.require(key)) / "model.safetensors")
        for key in (keys.weights(child, 0), keys.checkpoint(parent, STEPS))
    )
    assert all(torch.equal(first[name], theirs[name]) for name in theirs)
    steps = get(where, f"/v1/runs/{child}/metrics")["data"]
    assert [step["step"] for step in steps] == [1], "its curves are its own"
    card = get(where, f"/v1/runs/{child}/model")["card"]
    assert f"begun with version {STEPS} of run `{parent}`" in card
