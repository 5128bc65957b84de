"""The choice of a renderer, and its comparison with the tokenizer's chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.envs import rendering
from ratchet.activities.envs.rendering import difference, renderer_config, renderer_of, resolve
from ratchet.activities.storage.keys import POLICY_FILE
from ratchet.activities.training.prepare import agreeing_renderer
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


def test_a_version_of_another_run_has_the_renderer_of_its_base(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {"enable_thinking": False}
    asked: list[str] = []

    def noted(made: Any, config: Any, given: Any) -> str | None:
        asked.append(config["name"])
        return None

    monkeypatch.setattr(rendering, "difference", noted)
    made, order = tokenizer(CHAT_TEMPLATE), {"name": "run:reverse-1a2b3c@40"}
    based = agreeing_renderer({**order, "base": "Qwen/Qwen3-0.6B"}, made)
    assert based == {"renderer": {"name": "qwen3"}}
    assert agreeing_renderer(order, made) == {"renderer": CHATML}
    folder = saved(tmp_path / "v0", CHAT_TEMPLATE, base="Qwen/Qwen3-0.6B")
    model = ModelConfig(name="run:reverse-1a2b3c@40", renderer_options=options)
    assert renderer_of(model, folder) == {"name": "qwen3", **options}
    asked.clear()
    assert rendering.problem(model, folder) is None and asked == ["qwen3"]


def test_a_tokenizer_that_names_no_renderer_is_refused() -> None:
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


@pytest.mark.parametrize(
    ("conversation", "template", "place", "got", "expected"),
    [
        ("one turn", WITH_SYSTEM, 1, "u", "s"),
        ("system", WITH_SYSTEM.replace("!= 'system'", "== 'system'"), 8, "A", "Y"),
        (
            "several turns",
            "{{ 'late' if messages|length == 3 and messages[0].content }}",
            0,
            "<",
            "l",
        ),
        ("empty content", "{{ 'nothing' if not messages[0]['content'] }}", 0, "<", "n"),
        ("special tokens", "{{ 'special' if '</s>' in messages[0]['content'] }}", 0, "<", "s"),
    ],
)
def test_each_conversation_finds_what_it_is_for(
    conversation: str, template: str, place: int, got: str, expected: str
) -> None:
    if place == 0:
        template += CHAT_TEMPLATE
    found = difference(tokenizer(template), CHATML, {})
    shown = got.replace("<", "<|im_start|>")
    assert found == (
        f"conversation {conversation!r}: token {place} of the renderer is {shown!r}, that of the "
        f"model's chat template is {expected!r}"
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 'T' if tools and enable_thinking is not false }}", "T"),
        (
            "{{ 'C' if messages[1:] and messages[1].tool_calls and enable_thinking is not false }}",
            "C",
        ),
        ("{{ 'R' if messages[-1].role == 'tool' and enable_thinking is not false }}", "R"),
    ],
)
def test_tools_are_compared_where_renderer_and_template_know_them(
    template: str, expected: str
) -> None:
    made = tokenizer(template + CHAT_TEMPLATE + "{# tools #}")
    knows = {"name": "default", "tool_parser": "qwen3", "enable_thinking": False}
    assert difference(made, knows, {"enable_thinking": False}) is None
    found = difference(made, knows, {})
    assert found == (
        "conversation 'tools': token 0 of the renderer is '<|im_start|>', that of the model's chat "
        f"template is {expected!r}"
    )
    assert difference(made, {**knows, "tool_parser": None}, {}) is None, "it takes no tools"


def test_a_conversation_that_the_template_refuses_is_not_compared() -> None:
    raises = "{{% if messages[0].role == {role!r} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    no_system = raises.format(role="system") + CHAT_TEMPLATE
    assert resolve("some/model", tokenizer(no_system), {}) == CHATML
    with pytest.raises(ValueError, match="the chat template refuses a plain question: no"):
        difference(tokenizer(raises.format(role="user")), CHATML, {})


def test_options_reach_renderer_and_template() -> None:
    made, options = tokenizer(THINKING), {"enable_thinking": False}
    assert resolve("some/model", made, {}) == CHATML
    chosen = resolve("some/model", made, options)
    assert chosen == {"name": "default", "enable_thinking": False}
    ids = rendering.make_renderer(made, chosen).render_ids(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    assert made.decode(ids).endswith("(no thoughts)")


def test_options_are_the_templates_and_not_of_a_layout_that_has_none(tmp_path: Path) -> None:
    folder, options = saved(tmp_path / "policy", THINKING), {"enable_thinking": False}
    for fits in ("auto", "default"):
        model = ModelConfig(renderer=fits, renderer_options=options)
        assert rendering.problem(model, folder) is None
        assert renderer_of(model, folder) == {"name": "default", **options}
    found = rendering.problem(
        ModelConfig(renderer="ratchet-chatml", renderer_options=options), folder
    )
    assert found is not None and "enable_thinking" in found


def test_a_renderer_that_is_named_needs_no_template(tmp_path: Path) -> None:
    folder = saved(tmp_path / "chatml", None)
    assert rendering.problem(ModelConfig(renderer="ratchet-chatml"), folder) is None
    assert rendering.problem(ModelConfig(), folder) is None, "it has ChatML's tokens"
    found = rendering.problem(ModelConfig(renderer="default"), folder)
    assert found is not None and "no chat template; set model.renderer" in found
    found = rendering.problem(ModelConfig(renderer="qwen3"), folder)
    assert found is not None and "'<|endoftext|>' not found" in found

    made = tokenizer(None)
    tools = [f"<{end}tool_{what}>" for what in ("call", "response") for end in ("", "/")]
    made.add_special_tokens(
        {"additional_special_tokens": ["<|endoftext|>", *tools, "<think>", "</think>"]}
    )
    made.save_pretrained(tmp_path / "qwen")
    model = ModelConfig(renderer="qwen3")
    assert rendering.problem(model, tmp_path / "qwen") is None
    assert renderer_of(model, tmp_path / "qwen") == {"name": "qwen3"}


def test_version_0_is_made_without_a_renderer_that_agrees_if_the_run_names_one() -> None:
    order = {"name": "some/model"}
    assert agreeing_renderer(order, tokenizer(CHAT_TEMPLATE)) == {"renderer": CHATML}
    for named in ({}, {"renderer": "auto"}):
        with pytest.raises(ValueError, match="renderer made for the model"):
            agreeing_renderer(order | named, _without_markers())
    assert agreeing_renderer({**order, "renderer": "qwen3"}, _without_markers()) == {}


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
    assert found is not None and "does not match the model's chat template" in found
    assert "'one turn': token 1" in found and "set model.renderer to 'auto'" in found
    assert rendering.problem(ModelConfig(renderer="default"), folder) is None
    unknown = rendering.problem(ModelConfig(renderer="nosuch"), folder)
    assert unknown is not None and "nosuch" in unknown
