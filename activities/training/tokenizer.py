"""The character-level tokenizer of the default policy, with a ChatML template.

It has one token for each printable ASCII character and newline, so that a conversation's text and
tokens determine each other, and four special tokens. The rest of the vocabulary is reserved, and
decodes to nothing that looks like text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, IM_START, IM_END, UNK = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
SPECIALS = (PAD, IM_START, IM_END, UNK)
CHARACTERS = ("\n", *(chr(code) for code in range(0x20, 0x7F)))
VOCAB_SIZE = 128

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """Token to id, `VOCAB_SIZE` of them: specials, characters, reserved."""
    tokens = [*SPECIALS, *CHARACTERS]
    tokens += [f"<|reserved_{n}|>" for n in range(VOCAB_SIZE - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer; `max_length` is the longest sequence the policy was made for."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = vocabulary()
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    special = [token for token in vocab if token not in CHARACTERS]
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=IM_END,
        unk_token=UNK,
        additional_special_tokens=[IM_START, IM_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
