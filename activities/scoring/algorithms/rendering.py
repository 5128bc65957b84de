"""The policy's renderer, as env servers use it: messages to prompt tokens."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.activities.scoring.algorithms.base import Render


def make_renderer(folder: str, config: Mapping[str, Any]) -> Any:
    """A renderer over the tokenizer in `folder`; `config` is the renderers package's own. Blocks
    while the tokenizer loads. To be used by one thread at a time: encoding changes the state of a
    fast tokenizer.
    """
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer
    from renderers.base import load_tokenizer

    parsed = TypeAdapter(RendererConfig).validate_python(dict(config))
    return create_renderer(load_tokenizer(folder), parsed)


def load_renderer(folder: str, config: Mapping[str, Any]) -> Render:
    """What `make_renderer` makes, as a function; it may be called from any thread."""
    made, lock = make_renderer(folder, config), threading.Lock()

    def render(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        with lock:
            rendered = made.render(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=True,
            )
        return [int(token) for token in rendered.token_ids]

    return render
