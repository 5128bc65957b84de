"""The ChatML renderer: its layout is the tokenizer's template, its bridge extends exactly."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.envs.shipped.ratchet_chatml import ChatMLRenderer
from ratchet.activities.training.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(256)
RENDERER = ChatMLRenderer(TOKENIZER)
TEXT = st.text(alphabet=st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=12)


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@given(TEXT, TEXT, st.booleans())
def test_layout_is_the_template(first: str, second: str, reply: bool) -> None:
    talk = [_said("system", first), _said("user", second)]
    expected = TOKENIZER.apply_chat_template(
        talk, add_generation_prompt=reply, tokenize=True, return_dict=False
    )
    rendered = RENDERER.render(talk, add_generation_prompt=reply)
    assert list(rendered.token_ids) == list(expected)
    text = TOKENIZER.decode(
        [t for t, c in zip(rendered.token_ids, rendered.is_content, strict=True) if c]
    )
    assert text == first + second


@given(TEXT, st.lists(st.integers(4, 127), max_size=10), TEXT, st.booleans())
def test_bridge_extends_the_sampled_ids(
    first: str, sampled: list[int], hint: str, closed: bool
) -> None:
    """Any ids, even ones that do not survive decoding; a cut-off reply gets its end."""
    prompt = RENDERER.render_ids([_said("user", first)], add_generation_prompt=True)
    completion = [*sampled, RENDERER.end] if closed else sampled
    bridged = RENDERER.bridge_to_next_turn(prompt, completion, [_said("user", hint)])
    assert bridged is not None
    ids = list(bridged.token_ids)
    assert ids[: len(prompt) + len(completion)] == [*prompt, *completion]
    rest = TOKENIZER.decode(ids[len(prompt) + len(completion) :])
    end = "" if closed else "<|im_end|>"
    assert rest == f"{end}\n<|im_start|>user\n{hint}<|im_end|>\n<|im_start|>assistant\n"
    assert len(bridged.message_indices) == len(bridged.is_content) == len(ids)


def test_no_bridge_over_an_assistant_message() -> None:
    prompt = RENDERER.render_ids([_said("user", "a")], add_generation_prompt=True)
    assert RENDERER.bridge_to_next_turn(prompt, [9], [_said("assistant", "b")]) is None


def test_reply_is_text_without_markers() -> None:
    ids = [*TOKENIZER.encode("dcba", add_special_tokens=False), RENDERER.end]
    assert RENDERER.parse_response(ids).content == "dcba"
    assert RENDERER.get_stop_token_ids() == [RENDERER.end]


def test_other_tokenizers_are_refused() -> None:
    class Plain:
        all_special_ids: tuple[int, ...] = ()

        def convert_tokens_to_ids(self, text: str) -> int:
            return 0

        def convert_ids_to_tokens(self, token: int) -> str:
            return "<unk>"

    with pytest.raises(ValueError, match=r"set model\.renderer"):
        ChatMLRenderer(Plain())
