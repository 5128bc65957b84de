"""A random policy for tests of engines: small, untied, with the project's tokenizer."""

from typing import Any

from ratchet.activities.training.tokenizer import build_tokenizer


def random_policy(seed: int, seq_len: int, **changes: Any) -> tuple[Any, Any]:
    """A Qwen3 in float32 with random weights, and its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    tokenizer = build_tokenizer(seq_len)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=seq_len,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **changes,
    )
    return Qwen3ForCausalLM(config).to(torch.float32).eval(), tokenizer
