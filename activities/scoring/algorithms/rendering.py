"""The policy's renderer, as env servers use it: messages to prompt tokens."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.activities.scoring.algorithms.base import Render


def load_renderer(folder: str, config: Mapping[str, Any]) -> Render:
    """A renderer over the tokenizer in `folder`; `config` is the renderers package's own.

    Blocks while the tokenizer loads. The result may be called from any thread.
    """
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer
    from renderers.base import load_tokenizer

    parsed = TypeAdapter(RendererConfig).validate_python(dict(config))
    made = create_renderer(load_tokenizer(folder), parsed)
    # Tokenizers change their own state while they encode.
    lock = threading.Lock()

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
