"""Small random models of each supported family, with the shapes that break things: GQA, odd layer kinds, MoE."""

from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    KimiLinearConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    **SPECIAL,
}


def llama(layers=3, **changes):
    return LlamaConfig(**{**COMMON, "num_hidden_layers": layers, "num_key_value_heads": 2, **changes})


def qwen3(layers=3, **changes):
    return Qwen3Config(**{**COMMON, "num_hidden_layers": layers, "num_key_value_heads": 2, "head_dim": 8, **changes})


def kimi_linear(layers=5, **changes):
    """Layer 0 is KDA with a dense MLP, layers 1-3 KDA with MoE, layer 4 MLA with MoE."""
    sizes = {
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    }
    return KimiLinearConfig(**{**COMMON, **sizes, **changes})


def _grouped(cls, **sizes):
    """A config of a family that takes the usual names, with fewer key and value heads than query heads."""

    def config(layers=3, **changes):
        return cls(**{**COMMON, "num_hidden_layers": layers, "num_key_value_heads": 2, **sizes, **changes})

    return config


qwen3_moe = _grouped(
    Qwen3MoeConfig, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[0]
)
olmo2 = _grouped(Olmo2Config)
gemma = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "tie_word_embeddings": True}


def gpt_neox(layers=3, **changes):
    """Attention and MLP side by side, as the family does by default."""
    return GPTNeoXConfig(**{**COMMON, "num_hidden_layers": layers, "hidden_dropout": 0.0, **changes})


def gpt2(layers=3, **changes):
    sizes = {"n_embd": 32, "n_inner": 48, "n_head": 4, "n_layer": layers, "n_positions": 128, "vocab_size": 96}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(**{**sizes, **dropouts, **SPECIAL, "initializer_range": 0.2, **changes})


def deepseek_v3(layers=3, **changes):
    """Layer 0 has a dense MLP, the others experts; attention is MLA."""
    sizes = {
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    return DeepseekV3Config(**{**COMMON, **sizes, **changes})


CONFIGS = {"llama": llama, "qwen3": qwen3, "kimi_linear": kimi_linear}
"""Families that have always been here; the tests of strategies and training run on these."""

ALL_CONFIGS = {
    **CONFIGS,
    "mistral": _grouped(MistralConfig, sliding_window=6),
    "qwen2": _grouped(Qwen2Config),
    "qwen3_moe": qwen3_moe,
    "phi3": _grouped(Phi3Config, resid_pdrop=0.0),
    "smollm3": _grouped(SmolLM3Config),
    "olmo2": olmo2,
    "gemma2": _grouped(Gemma2Config, **gemma),
    "gemma3": _grouped(Gemma3TextConfig, **gemma),
    "gpt_neox": gpt_neox,
    "gpt_neox_sequential": lambda layers=3, **changes: gpt_neox(layers, use_parallel_residual=False, **changes),
    "gpt2": gpt2,
    "deepseek_v3": deepseek_v3,
}
"""Every family that has a description."""


def make(family, **changes):
    """A random plain model in evaluation mode."""
    return AutoModelForCausalLM.from_config(ALL_CONFIGS[family](**changes)).eval()
