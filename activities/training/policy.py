"""The default policy 'ratchet/tiny': a small Qwen3 model, warm-started in seconds, untied.

The warm start has two phases. Clean supervised steps teach the tasks. Then steps on demonstrations
with mostly random letters and digits flatten the distribution, while the policy still knows how to
do the task. The resulting policy can do the task but mostly does not, so that reinforcement
learning has something to find. (A policy whose supervised learning stopped early has not learnt the
task at all, and does not improve.) Conversations that begin with a system message, which shows how
the task is done, stay clean: with that message, the policy does the task.

Invariant: the weights are a function of the recipe, the environment, the seed and the code
(`SCHEMA`); the number of threads is part of the recipe. `digest` covers exactly that and never
needs torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import string
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ratchet.activities.training.memory import Shape
from ratchet.activities.training.tokenizer import IM_END, PAD, VOCAB_SIZE, vocabulary

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from ratchet.activities.envs.datasets import Message

SCHEMA = 1
"""Raised whenever code that shapes the weights changes."""


EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class Recipe:
    """Size, initialisation and warm start of the policy.

    The clean phase lasts until the policy is sure (probability above 1/2) of a share `mastery` of
    the learnt tokens, averaged over about ten steps, or for `clean_limit` steps; that depends on
    the seed. Then the learning rate falls to 0 over `cooldown` steps. Learning rates are AdamW's
    and rise over `rise` steps at the start of a phase.
    """

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    head_dim: int = 32
    feed_forward: int = 384
    max_positions: int = 4096
    init_std: float = 0.06
    batch: int = 32
    rise: int = 10
    clean_limit: int = 400
    mastery: float = 0.9
    cooldown: int = 40
    clean_lr: float = 3e-3
    noisy_steps: int = 60
    noisy_lr: float = 5e-4
    noise: float = 0.78
    betas: tuple[float, float] = (0.9, 0.95)
    max_norm: float = 1.0
    threads: int = 1

    @property
    def shape(self) -> Shape:
        """The sizes from which a trainer's memory is estimated."""
        width = self.heads * self.head_dim
        return Shape(self.layers, self.hidden, width, width, self.feed_forward, VOCAB_SIZE, True)


def recipe_of(env: str) -> Recipe:
    """The recipe of the default policy for a warm start on `env`.

    The noisy phase takes longer where half of the conversations stay clean.
    """
    return replace(Recipe(), noisy_steps=180) if env == "reverse-shown" else Recipe()


def digest(recipe: Recipe, env: str, seed: int) -> str:
    """Hex sha256 of all that determines the exported policy."""
    what = {"schema": SCHEMA, "recipe": asdict(recipe), "env": env, "seed": seed}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def build_model(recipe: Recipe, seed: int) -> Any:
    """A freshly initialised, untied model. Seeds torch's global generator."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    ids = vocabulary()
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim,
        initializer_range=recipe.init_std,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids[IM_END],
        pad_token_id=ids[PAD],
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD)
    model.generation_config = GenerationConfig(
        eos_token_id=ids[IM_END], pad_token_id=ids[PAD], do_sample=True
    )
    return model


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message]
) -> tuple[list[int], list[bool]]:
    """Token ids [T] of a conversation in the template's layout, and which of them to learn [T]: the
    content and the closing token of every assistant message.
    """
    token_ids: list[int] = []
    learn: list[bool] = []
    for message in messages:
        reply = message["role"] == "assistant"
        parts = (
            (f"<|im_start|>{message['role']}\n", False),
            (message["content"] + IM_END, reply),
            ("\n", False),
        )
        for text, wanted in parts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            token_ids += ids
            learn += [wanted] * len(ids)
    return token_ids, learn


def scramble(text: str, probability: float, rng: random.Random) -> str:
    """Replaces letters by random letters and digits by random digits, each with `probability`."""

    def one(character: str) -> str:
        for alphabet in (string.ascii_lowercase, string.ascii_uppercase, string.digits):
            if character in alphabet:
                return rng.choice(alphabet) if rng.random() < probability else character
        return character

    return "".join(one(character) for character in text)


def _scrambled(messages: list[Message], recipe: Recipe, rng: random.Random) -> list[Message]:
    if messages[0]["role"] == "system":
        return messages
    return [
        {**m, "content": scramble(m["content"], recipe.noise, rng)}
        if m["role"] == "assistant"
        else m
        for m in messages
    ]


def _supervised_batch(
    tokenizer: PreTrainedTokenizerFast, conversations: list[list[Message]]
) -> tuple[Tensor, Tensor]:
    import torch

    rows = [encode_conversation(tokenizer, messages) for messages in conversations]
    width = max(len(ids) for ids, _ in rows)
    pad = vocabulary()[PAD]
    token_ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    learn = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows])
    return token_ids, learn


class _Supervised:
    """Supervised steps of one phase, with their own optimizer."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, lr: float
    ) -> None:
        import torch

        self._model, self._tokenizer, self._recipe, self._lr = model, tokenizer, recipe, lr
        self._done = 0
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=recipe.betas, weight_decay=0.0
        )

    def step(self, conversations: list[list[Message]], factor: float) -> tuple[float, float]:
        """One step at `factor` times the learning rate.

        Returns the mean loss over learnt tokens, in nats, and the share of them that the policy is
        sure of.
        """
        import torch

        from ratchet.activities.training.model import token_scores

        token_ids, learn = _supervised_batch(self._tokenizer, conversations)
        logprobs, _ = token_scores(self._model, token_ids, torch.ones(len(conversations), 1))
        loss = -(logprobs * learn).sum() / learn.sum()
        sure = ((logprobs.detach() > -math.log(2)) & learn).sum() / learn.sum()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._recipe.max_norm)
        self._done += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * factor * min(1.0, self._done / self._recipe.rise)
        self._optimizer.step()
        return loss.item(), sure.item()


def warm_start(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: list[list[Message]],
    recipe: Recipe,
    seed: int,
    progress: Callable[[int, int, float], None] = lambda step, most, loss: None,
) -> None:
    """Trains `model` in place on the demonstrations, in order and cyclically.

    Calls `progress(step, most, loss)` after every step: `most` is the most steps that there can be
    in all, `loss` the mean over learnt tokens, in nats.
    """
    rng = random.Random(f"warm-start/{seed}")
    stream = itertools.cycle(demonstrations)
    done = 0

    def batch() -> list[list[Message]]:
        return list(itertools.islice(stream, recipe.batch))

    clean = _Supervised(model, tokenizer, recipe, recipe.clean_lr)
    most = recipe.clean_limit + recipe.cooldown + recipe.noisy_steps
    mastery = 0.0
    while mastery < recipe.mastery and done < recipe.clean_limit:
        loss, sure = clean.step(batch(), 1.0)
        mastery += 0.1 * (sure - mastery)
        done += 1
        progress(done, most, loss)
    most = done + recipe.cooldown + recipe.noisy_steps
    for step in range(recipe.cooldown):
        loss, _ = clean.step(batch(), 1.0 - step / recipe.cooldown)
        done += 1
        progress(done, most, loss)
    noisy = _Supervised(model, tokenizer, recipe, recipe.noisy_lr)
    for step in range(recipe.noisy_steps):
        scrambled = [_scrambled(messages, recipe, rng) for messages in batch()]
        loss, _ = noisy.step(scrambled, min(1.0, 3.0 * (1.0 - step / recipe.noisy_steps)))
        done += 1
        progress(done, most, loss)
