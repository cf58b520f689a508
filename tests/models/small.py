"""Small random models of each supported family, with the shapes that break things: GQA, odd layer kinds, MoE."""

from transformers import AutoModelForCausalLM, KimiLinearConfig, LlamaConfig, Qwen3Config

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


CONFIGS = {"llama": llama, "qwen3": qwen3, "kimi_linear": kimi_linear}


def make(family, **changes):
    """A random plain model in evaluation mode."""
    return AutoModelForCausalLM.from_config(CONFIGS[family](**changes)).eval()
