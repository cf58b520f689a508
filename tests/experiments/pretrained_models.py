"""A trained model of nobody's, in a Hugging Face folder: two layers, 257 byte tokens, weights of a useful size."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(*, seed: int = 0, vocab_size: int = 257, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def saved(folder: Path, model: LlamaForCausalLM) -> Path:
    model.save_pretrained(folder)
    return folder
