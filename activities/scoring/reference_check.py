"""The preflight of model references: is each available, and does it offer what a run needs?

Needs the network, and for models that score the policy's tokens the policy's tokenizer, if this
machine can load it: otherwise the check of the model itself reports the reason.
"""

import asyncio
import difflib
from typing import Any

from ratchet.activities.contracts.checks import CheckProblem
from ratchet.activities.scoring.algorithms.base import CreditError
from ratchet.activities.scoring.references import (
    Endpoint,
    ReferenceLost,
    References,
    key_of,
    read_json,
)
from ratchet.configs.algorithm import demo_tokens_of, source_of, teacher_of
from ratchet.configs.model import DEFAULT_POLICY
from ratchet.configs.pointers import pointer_to
from ratchet.configs.reference import DEFAULT_KEY_VAR, FrozenModelConfig
from ratchet.configs.run import RunConfig

LIMIT_S = 45.0
"""Time limit for all requests to one model."""

PROBE = "The quick brown fox jumps over 12345 lazy dogs;\n\tit's <b>(x + y) / 67.89</b>!"
"""Text that tokenizers of different vocabularies split differently."""


def _problem(key: str, message: str) -> CheckProblem:
    return CheckProblem(pointer_to(key), key, message)


async def check_references(config: RunConfig) -> list[CheckProblem]:
    """Problems with the frozen models that a run names; queries all of them at once."""
    references = References()
    references.bind()
    checks = []
    for key, algo in config.algorithm_sections().items():
        teacher, source = teacher_of(algo), source_of(algo)
        if isinstance(teacher, FrozenModelConfig):
            longest = config.trainer.seq_len + demo_tokens_of(algo)
            checks.append(_check(references, config, f"{key}.teacher", teacher, longest))
        if isinstance(source, FrozenModelConfig):
            checks.append(_check(references, config, f"{key}.source", source, None))
    try:
        result = await asyncio.gather(*checks)
    finally:
        await references.close()
    return [problem for problems in result for problem in problems]


async def _check(
    references: References,
    config: RunConfig,
    key: str,
    model: FrozenModelConfig,
    longest: int | None,
) -> list[CheckProblem]:
    """`longest`: the most tokens that it may have to score; None if it scores nothing."""
    try:
        key_is_set = bool(key_of(model.api_key_var))
    except CreditError as error:
        return [_problem(f"{key}.api_key_var", str(error))]
    if model.api_key_var != DEFAULT_KEY_VAR and not key_is_set:
        message = (
            f"the environment variable {model.api_key_var} is not set on a rollout worker; set it "
            "there and on env servers, or remove api_key_var if the endpoint has no key"
        )
        return [_problem(f"{key}.api_key_var", message)]
    for header, variable in model.headers_from_env.items():
        try:
            unset = "" if key_of(variable) else f"the environment variable {variable} is not set"
        except CreditError as error:
            unset = str(error)
        if unset:
            message = f"{unset}; set it on rollout workers and on env servers, or remove it"
            return [_problem(f"{key}.headers_from_env.{header}", message)]
    places = [f"{key}.base_url", *(f"{key}.more_urls.{n}" for n in range(len(model.more_urls)))]
    calls = [
        _check_url(references, config, key, place, model, url, longest)
        for place, url in zip(places, model.base_urls, strict=True)
    ]
    return [problem for problems in await asyncio.gather(*calls) for problem in problems]


async def _check_url(
    references: References,
    config: RunConfig,
    key: str,
    place: str,
    model: FrozenModelConfig,
    url: str,
    longest: int | None,
) -> list[CheckProblem]:
    """Problems with the model as served at one of its URLs, whose key is `place`."""
    served = model.model_copy(update={"base_url": url, "more_urls": []})
    try:
        async with asyncio.timeout(LIMIT_S):
            return await _ask(references, config, key, served, longest)
    except TimeoutError:
        return [_problem(place, f"{url} did not answer within {LIMIT_S:.0f} s")]
    except (ReferenceLost, CreditError) as error:
        return [_problem(place, str(error))]


async def _ask(
    references: References,
    config: RunConfig,
    key: str,
    model: FrozenModelConfig,
    longest: int | None,
) -> list[CheckProblem]:
    endpoint = Endpoint.frozen(model)
    served = await references.models(endpoint)
    if model.name not in served:
        near = difflib.get_close_matches(model.name, served, n=1, cutoff=0.5)
        known = ", ".join(repr(name) for name in list(served)[:8]) or "nothing"
        hint = f"did you mean {near[0]!r}?" if near else f"it serves {known}"
        message = f"{model.base_url} serves no model {model.name!r}; {hint}"
        return [_problem(f"{key}.name", message)]
    context = served[model.name]
    if longest is None:
        return []
    if context is not None and context < longest:
        shown = longest - config.trainer.seq_len
        parts = f"trainer.seq_len and {shown} of demo_tokens" if shown else "trainer.seq_len"
        message = (
            f"{model.name!r} has a context of {context} tokens there, and may have to score "
            f"{longest} ({parts}); serve it with a longer --max-model-len, or lower these"
        )
        return [_problem(f"{key}.name", message)]
    tokenizer = await asyncio.to_thread(_policy_tokenizer, config)
    if tokenizer is None:
        return []
    return await _check_vocabulary(references, key, model, tokenizer)


async def _check_vocabulary(
    references: References, key: str, model: FrozenModelConfig, tokenizer: Any
) -> list[CheckProblem]:
    """Whether the model reads token ids as the policy does, up to the highest of them."""
    endpoint = Endpoint.frozen(model)
    ids: list[int] = tokenizer.encode(PROBE, add_special_tokens=False)
    body = {"model": model.name, "prompt": PROBE, "add_special_tokens": False}
    answer = await references.ask(endpoint, "POST", "/tokenize", body)
    said = read_json(answer) if answer.status_code == 200 else {}
    theirs = said.get("tokens") if isinstance(said, dict) else None
    # Any other server may answer there, which says nothing about the vocabulary.
    if isinstance(theirs, list) and theirs != ids:
        message = (
            f"its tokenizer is not the policy's: the same text is {theirs[:6]}… to it and "
            f"{ids[:6]}… to the policy; token ids can only be scored by a model of the same "
            "vocabulary"
        )
        return [_problem(f"{key}.name", message)]
    highest = max(tokenizer.get_vocab().values())
    try:
        await references.frozen(model).logprobs([*ids[:8], highest])
    except CreditError as error:
        message = f"cannot score the policy's highest token id, {highest}: {error}"
        return [_problem(f"{key}.name", message)]
    return []


def _policy_tokenizer(config: RunConfig) -> Any:
    """The policy's tokenizer, or None if this machine cannot load it."""
    if config.model.name == DEFAULT_POLICY:
        from ratchet.activities.training.tokenizer import build_tokenizer

        return build_tokenizer(config.trainer.seq_len)
    from renderers.base import load_tokenizer

    try:
        return load_tokenizer(config.model.name)
    except (OSError, ValueError):
        return None
