"""The choice of a renderer, and its comparison with the tokenizer's chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.envs import rendering
from ratchet.activities.envs.rendering import difference, renderer_config, renderer_of, resolve
from ratchet.activities.storage.keys import POLICY_FILE
from ratchet.activities.training.tokenizer import CHAT_TEMPLATE, build_tokenizer
from ratchet.configs.model import ModelConfig

WITH_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}" + CHAT_TEMPLATE
)
THINKING = (
    CHAT_TEMPLATE
    + "{% if add_generation_prompt and enable_thinking is false %}{{ '(no thoughts)' }}{% endif %}"
)
CHATML = renderer_config("ratchet-chatml", {})


def tokenizer(template: str | None) -> Any:
    made = build_tokenizer(4096)
    made.chat_template = template
    return made


def saved(folder: Path, template: str | None, **about: Any) -> Path:
    tokenizer(template).save_pretrained(folder)
    (folder / POLICY_FILE).write_text(json.dumps({"parameters": 1, "origin": "here", **about}))
    return folder


def test_auto_extends_token_by_token_where_that_agrees() -> None:
    assert resolve("ratchet/tiny", tokenizer(CHAT_TEMPLATE), {}) == CHATML


def test_auto_asks_the_template_where_it_says_more() -> None:
    made = tokenizer(WITH_SYSTEM)
    assert resolve("some/model", made, {}) == {"name": "default"}
    ids = rendering.make_renderer(made, {"name": "default"}).render_ids(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    assert made.decode(ids).startswith("<|im_start|>system\nYou are helpful.<|im_end|>")


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "/models/Qwen3-0.6B"])
def test_a_known_model_whose_template_was_changed_is_not_known(model: str) -> None:
    assert resolve(model, tokenizer(CHAT_TEMPLATE), {}) == CHATML


def test_a_known_model_gets_its_own_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    agrees = {"name": "qwen3", "enable_thinking": False}

    def as_qwen(made: Any, config: Any, options: Any) -> str | None:
        return None if dict(config) == agrees else "another"

    monkeypatch.setattr(rendering, "difference", as_qwen)
    options = {"enable_thinking": False}
    for model in ("Qwen/Qwen3-0.6B", "/models/Qwen3-0.6B"):
        assert resolve(model, tokenizer(CHAT_TEMPLATE), options) == agrees
    assert resolve("other/model", tokenizer(CHAT_TEMPLATE), options)["name"] == "default"


def test_a_tokenizer_that_tells_nothing_is_refused() -> None:
    from transformers import PreTrainedTokenizerFast

    plain = build_tokenizer(64).backend_tokenizer
    bare = PreTrainedTokenizerFast(tokenizer_object=plain)
    assert resolve("some/model", bare, {}) == CHATML, "it has ChatML's tokens"
    with pytest.raises(ValueError, match="neither a chat template nor ChatML's tokens"):
        resolve("some/model", _without_markers(), {})


def _without_markers() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")


def test_the_first_token_that_differs_is_named() -> None:
    found = difference(tokenizer(WITH_SYSTEM), CHATML, {})
    assert found is not None
    assert found.startswith("conversation 'one turn': token 1 of the renderer is 'u'")
    assert found.endswith("that of the model's chat template is 's'")


@pytest.mark.parametrize(
    ("conversation", "template"),
    [
        ("system", WITH_SYSTEM.replace("!= 'system'", "== 'system'")),
        ("several turns", "{{ 'late' if messages|length == 3 and messages[0].content }}"),
        ("empty content", "{{ 'nothing' if not messages[0]['content'] }}"),
        ("special tokens", "{{ 'special' if '</s>' in messages[0]['content'] }}"),
    ],
)
def test_each_conversation_finds_what_it_is_for(conversation: str, template: str) -> None:
    if conversation != "system":
        template += CHAT_TEMPLATE
    found = difference(tokenizer(template), CHATML, {})
    assert found is not None and f"conversation {conversation!r}" in found


def test_options_reach_renderer_and_template() -> None:
    made, options = tokenizer(THINKING), {"enable_thinking": False}
    assert resolve("some/model", made, {}) == CHATML
    chosen = resolve("some/model", made, options)
    assert chosen == {"name": "default", "enable_thinking": False}
    ids = rendering.make_renderer(made, chosen).render_ids(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    assert made.decode(ids).endswith("(no thoughts)")


def test_a_run_takes_what_its_config_or_version_0_says(tmp_path: Path) -> None:
    resolved = {"name": "default"}
    folder = saved(tmp_path / "new", CHAT_TEMPLATE, renderer=resolved)
    assert renderer_of(ModelConfig(), folder) == resolved
    assert renderer_of(ModelConfig(renderer="ratchet-chatml"), folder) == CHATML
    options = {"enable_thinking": False}
    assert renderer_of(ModelConfig(renderer_options=options), folder) == {**resolved, **options}
    old = saved(tmp_path / "old", CHAT_TEMPLATE)
    assert renderer_of(ModelConfig(), old) == CHATML


def test_a_renderer_that_drops_the_system_message_is_a_problem(tmp_path: Path) -> None:
    folder = saved(tmp_path / "policy", WITH_SYSTEM)
    found = rendering.problem(ModelConfig(renderer="ratchet-chatml"), folder)
    assert found is not None and "does not do what the model's chat template does" in found
    assert "'one turn': token 1" in found and "set model.renderer to 'auto'" in found
    assert rendering.problem(ModelConfig(renderer="default"), folder) is None
    unknown = rendering.problem(ModelConfig(renderer="nosuch"), folder)
    assert unknown is not None and "nosuch" in unknown
