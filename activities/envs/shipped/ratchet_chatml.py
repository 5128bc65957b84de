"""ratchet-chatml: messages to tokens and back, in the ChatML layout, exact over many turns.

A message is '<|im_start|>{role}\\n{content}<|im_end|>\\n', and the prompt for a reply is
'<|im_start|>assistant\\n'. Sampled tokens are never tokenized again: the next turn extends the
exact ids that the engine saw (`bridge_to_next_turn`), so a conversation stays one sequence. A reply
cut off by its token limit is closed with an <|im_end|> that belongs to the next message.
"""

from typing import Any

from renderers.base import (
    ParsedResponse,
    RenderedTokens,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import BaseRendererConfig

START = "<|im_start|>"
END = "<|im_end|>"


class ChatMLRendererConfig(BaseRendererConfig):
    """No options: the layout is fixed."""


class _Tokens:
    """Token ids under construction, each with its message's index and whether it is content."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.owners: list[int] = []
        self.content: list[bool] = []

    def add(self, ids: list[int], owner: int, *, content_from: int | None = None) -> None:
        """Appends `ids`; those from `content_from` on are content."""
        start = len(ids) if content_from is None else content_from
        self.ids += ids
        self.owners += [owner] * len(ids)
        self.content += [place >= start for place in range(len(ids))]


class ChatMLRenderer:
    """ChatML for any tokenizer that has <|im_start|> and <|im_end|> as single tokens."""

    config_class = ChatMLRendererConfig
    is_prefix_stable = True
    supports_tools = False
    effective_thinking_retention = "all"

    def __init__(self, tokenizer: Any, config: ChatMLRendererConfig | None = None) -> None:
        """Raises ValueError for a tokenizer without the two markers."""
        self.tokenizer = tokenizer
        self.config = config or ChatMLRendererConfig()
        self.start = self._marker(START)
        self.end = self._marker(END)
        self.newline = self._encode("\n")
        self.special = frozenset(tokenizer.all_special_ids)

    def _marker(self, text: str) -> int:
        token = self.tokenizer.convert_tokens_to_ids(text)
        if token is None or self.tokenizer.convert_ids_to_tokens(token) != text:
            raise ValueError(
                f"the tokenizer has no token {text!r}; renderer 'ratchet-chatml' needs a ChatML "
                "tokenizer, set model.renderer to the one your model uses"
            )
        return int(token)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _add_messages(self, out: _Tokens, messages: list[Any], reply: bool) -> None:
        for index, message in enumerate(messages):
            content = message.get("content") or ""
            if not isinstance(content, str):
                raise ValueError("renderer 'ratchet-chatml' takes text messages only")
            # Header and content are encoded together, as by a chat template.
            head = self._encode(f"{message['role']}\n")
            ids = self._encode(f"{message['role']}\n{content}")
            shared = 0
            while shared < min(len(head), len(ids)) and head[shared] == ids[shared]:
                shared += 1
            out.add([self.start], index)
            out.add(ids, index, content_from=shared)
            out.add([self.end, *self.newline], index)
        if reply:
            out.add([self.start, *self._encode("assistant\n")], -1)

    @staticmethod
    def _rendered(out: _Tokens, messages: list[Any]) -> RenderedTokens:
        return RenderedTokens(
            token_ids=out.ids,
            message_indices=out.owners,
            sampled_mask=[False] * len(out.ids),
            is_content=out.content,
            message_roles=[message["role"] for message in messages],
        )

    def render(
        self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Tokens of a whole conversation."""
        out = _Tokens()
        self._add_messages(out, messages, add_generation_prompt)
        return self._rendered(out, messages)

    def render_ids(
        self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Token ids of a whole conversation."""
        rendered = self.render(messages, add_generation_prompt=add_generation_prompt)
        return list(rendered.token_ids)

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """The text of sampled tokens, without special tokens."""
        text = self.tokenizer.decode([t for t in token_ids if t not in self.special])
        return ParsedResponse(content=text, reasoning_content=None, tool_calls=[])

    def get_stop_token_ids(self) -> list[int]:
        """The token that ends a reply."""
        return [self.end]

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: Any = None,
    ) -> RenderedTokens | None:
        """The next turn's prompt, extending the ids of the last turn token by token."""
        if not previous_prompt_ids or not new_messages:
            return None
        if reject_assistant_in_extension(new_messages):
            return None
        previous = trim_to_turn_close(
            previous_prompt_ids, previous_completion_ids, {self.end}, synthesize_close=self.end
        )
        if previous is None:
            return None
        out = _Tokens()
        out.add([*previous, *self.newline], -1)
        self._add_messages(out, new_messages, True)
        return self._rendered(out, new_messages)
