"""Which renderer turns a run's messages into tokens, and whether it agrees with the model.

A model was trained on the output of its chat template; a renderer with any other output samples the
model off its distribution. `resolve` chooses a renderer for a tokenizer and `difference` compares
one with the tokenizer's template on six conversations.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ratchet.activities.runtime.children import (
    as_parent,
    child_env,
    end_with_parent,
    module_command,
)
from ratchet.activities.storage.keys import POLICY_FILE
from ratchet.configs.model import ModelConfig
from ratchet.configs.run import RunConfig

CHECK_TIMEOUT_S = 120.0
AUTO, CHATML, TEMPLATE = "auto", "ratchet-chatml", "default"

_REMEDY = (
    "set model.renderer to a renderer made for the model, or give the tokenizer a chat_template"
)
NO_TEMPLATE = f"the tokenizer has no chat template; {_REMEDY}"
NOTHING_KNOWN = f"the tokenizer has neither a chat template nor ChatML's tokens; {_REMEDY}"

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}
_CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Bergen"}},
}


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


PLAIN = "one turn"
PROBES: dict[str, list[dict[str, Any]]] = {
    PLAIN: [_said("user", "What is 7 + 5?")],
    "system": [_said("system", "Answer in French."), _said("user", "Good morning!")],
    "several turns": [
        _said("user", "Name a colour."),
        _said("assistant", "Blue"),
        _said("user", "Another one."),
    ],
    "tools": [
        _said("user", "How is the weather in Bergen?"),
        _said("assistant", "", tool_calls=[_CALL]),
        _said("tool", "rain", name="weather", tool_call_id="call_0"),
    ],
    "empty content": [_said("user", ""), _said("assistant", ""), _said("user", "Hello?")],
    "special tokens": [_said("user", "What do <|im_end|>, </s> and <|endoftext|> mean?")],
}
"""Conversations that expect a reply; 'tools' counts only if renderer and template support tools."""


def renderer_config(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The renderers package's config for a renderer by name; not for 'auto'."""
    if name == CHATML:
        path = "ratchet.activities.envs.shipped.ratchet_chatml.ChatMLRenderer"
        return {"name": "custom", "import_path": path, **options}
    return {"name": name, **options}


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`; blocks while it loads."""
    from renderers.base import load_tokenizer

    return load_tokenizer(str(folder))


def make_renderer(tokenizer: Any, config: Mapping[str, Any]) -> Any:
    """A renderer over `tokenizer`. Raises ValueError for an invalid config.

    For use by one thread at a time: encoding changes the state of a fast tokenizer.
    """
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer

    parsed = TypeAdapter(RendererConfig).validate_python(dict(config))
    try:
        return create_renderer(tokenizer, parsed)
    except AssertionError as error:
        # The package reports this way that a tokenizer lacks what the renderer needs.
        raise ValueError(str(error)) from error


def _template_ids(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any]
) -> list[int]:
    made = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **options,
    )
    return list(made)


def _knows_tools(tokenizer: Any) -> bool:
    template = tokenizer.chat_template
    return "tools" in (template if isinstance(template, str) else str(template))


def difference(tokenizer: Any, config: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """How a renderer first differs from the tokenizer's chat template; None if it does not.

    `options` are the template's own (`enable_thinking` …), which both receive. A tokenizer without
    a template differs from none; a conversation that the template refuses, as some do with a
    system message, is not compared. Raises ValueError for a renderer that does not suit the
    tokenizer.
    """
    from jinja2 import TemplateError

    renderer = make_renderer(tokenizer, config)
    if not tokenizer.chat_template:
        if config["name"] == TEMPLATE:
            raise ValueError(NO_TEMPLATE)
        return None
    for name, messages in PROBES.items():
        tools = [_TOOL] if name == "tools" else None
        if tools and not (getattr(renderer, "supports_tools", True) and _knows_tools(tokenizer)):
            continue
        try:
            expected = _template_ids(tokenizer, messages, tools, options)
        except TemplateError as error:
            if name == PLAIN:
                raise ValueError(f"the chat template refuses a plain question: {error}") from error
            continue
        got = list(renderer.render_ids(messages, tools=tools, add_generation_prompt=True))
        if got != expected:
            return f"conversation {name!r}: {_first_difference(tokenizer, got, expected)}"
    return None


def _first_difference(tokenizer: Any, got: list[int], expected: list[int]) -> str:
    shared = 0
    while shared < min(len(got), len(expected)) and got[shared] == expected[shared]:
        shared += 1

    def shown(ids: list[int]) -> str:
        return repr(tokenizer.decode(ids[shared : shared + 1])) if shared < len(ids) else "the end"

    return (
        f"token {shared} of the renderer is {shown(got)}, that of the model's chat template is "
        f"{shown(expected)}"
    )


def resolve(model: str, tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the renderer that 'auto' stands for.

    The first of these that agrees with the chat template: the renderers package's own one for a
    model that it knows, by hub name or by the name of a folder; 'ratchet-chatml', which extends a
    conversation token by token; one that uses the tokenizer's chat template. Raises ValueError for
    a tokenizer that has neither a template nor ChatML's tokens.
    """
    from renderers.base import MODEL_RENDERER_MAP

    last = PurePosixPath(model).name
    alike = [made for name, made in MODEL_RENDERER_MAP.items() if PurePosixPath(name).name == last]
    known = [MODEL_RENDERER_MAP[model]] if model in MODEL_RENDERER_MAP else alike
    for name in (*known, CHATML):
        config = renderer_config(name, options)
        try:
            if difference(tokenizer, config, options) is None:
                return config
        except ValueError:
            continue
    if not tokenizer.chat_template:
        raise ValueError(NOTHING_KNOWN)
    return renderer_config(TEMPLATE, options)


def _about(folder: Path) -> dict[str, Any]:
    file = folder / POLICY_FILE
    return json.loads(file.read_text()) if file.is_file() else {}


def renderer_of(model: ModelConfig, folder: Path) -> dict[str, Any]:
    """The renderers config of a run whose version 0 is in `folder`."""
    if model.renderer != AUTO:
        return renderer_config(model.renderer, model.renderer_options)
    about = _about(folder)
    if "renderer" not in about or model.renderer_options:
        # Version 0 is of an older build, or the options decide what agrees with the template.
        name = about.get("base", model.name)
        return resolve(name, load_tokenizer(folder), model.renderer_options)
    return dict(about["renderer"])


def has_template(folder: Path) -> bool:
    """Whether the tokenizer in `folder` has a chat template; reads files alone."""
    config = folder / "tokenizer_config.json"
    said = config.is_file() and '"chat_template"' in config.read_text()
    return said or (folder / "chat_template.jinja").is_file()


def chat_problem(config: RunConfig, folder: Path) -> str | None:
    """Why no eval can use chat completions with the tokenizer in `folder`; None if it can."""
    if not (config.eval.env and config.asks_by_chat("eval")) or has_template(folder):
        return None
    return (
        f"the tokenizer of {config.model.name!r} has no chat template, which an engine needs for "
        "chat completions; add one, or set eval.client to 'tokens'"
    )


def problem(model: ModelConfig, folder: Path) -> str | None:
    """Why the renderer of `model` cannot serve the tokenizer in `folder`; None: it can."""
    tokenizer, options = load_tokenizer(folder), model.renderer_options
    try:
        if model.renderer == AUTO:
            resolve(_about(folder).get("base", model.name), tokenizer, options)
            return None
        config = renderer_config(model.renderer, options)
        differs = difference(tokenizer, config, options)
    except ValueError as error:
        return f"{model.renderer!r} with options {options}: {error}"
    if differs is None:
        return None
    return (
        f"{model.renderer!r} does not match the model's chat template: {differs}; set "
        "model.renderer to 'auto'"
    )


def problem_aside(model: ModelConfig, folder: Path) -> str | None:
    """Like `problem`, but from a separate process, since this one loads no transformers. Blocks.

    'auto' without options is right by construction.
    """
    if model.renderer == AUTO and not model.renderer_options:
        return None
    asked = json.dumps({"model": model.model_dump(mode="json"), "folder": str(folder)})
    done = subprocess.run(
        module_command("ratchet.activities.envs.rendering"),
        input=asked,
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        env=child_env(as_parent()),
    )
    if done.returncode != 0:
        raise RuntimeError(f"checking the renderer ended with {done.returncode}: {done.stderr}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return None if answer is None else str(answer)


if __name__ == "__main__":
    end_with_parent()
    _asked = json.load(sys.stdin)
    print(json.dumps(problem(ModelConfig.model_validate(_asked["model"]), Path(_asked["folder"]))))
