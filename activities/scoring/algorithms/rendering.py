"""The policy's renderer, as env servers use it: messages to prompt tokens."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.activities.envs.rendering import load_tokenizer, make_renderer
from ratchet.activities.scoring.algorithms.base import Render


def load_renderer(folder: str, config: Mapping[str, Any]) -> Render:
    """A renderer over the tokenizer in `folder`, as a function; any thread may call it."""
    made, lock = make_renderer(load_tokenizer(Path(folder)), config), threading.Lock()

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
