"""Models that the planner knows by name: their Hugging Face config, or what is stated about them.

Sizes are public facts of the releases. Where a release does not say enough to build a model, only what it states is
here, and a plan says which of its numbers are missing for that reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import KimiLinearConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from attnres.errors import ConfigError
from attnres.models.given import config_of, read_settings
from attnres.residual import BlockAttnRes, Strategy

KIMI_LINEAR_FULL_ATTENTION = (4, 8, 12, 16, 20, 24, 27)
"""Decoder layers of Kimi Linear 48B with full attention (MLA), counted from 1; the others have Kimi Delta Attention."""


@dataclass(frozen=True, kw_only=True)
class StatedSizes:
    """A model of which only some sizes are public."""

    dim: int
    """Width D."""
    num_sublayers: int
    """Sublayers L."""
    parameters: float
    """All parameters, as stated."""
    active: float
    """Parameters that take part in one token, as stated."""
    unknown: str
    """What is not public, or what Transformers has no class for, in one line."""


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model by name."""

    shape: Callable[[], PreTrainedConfig] | StatedSizes
    """Makes its config; or what is stated about it."""
    residual: Strategy
    """Strategy that it is planned with where none is given."""
    source: str
    """Where the sizes are from."""


def _kimi_linear() -> PreTrainedConfig:
    layers = 27
    kinds = ["full_attention" if n + 1 in KIMI_LINEAR_FULL_ATTENTION else "linear_attention" for n in range(layers)]
    return KimiLinearConfig(
        vocab_size=163840,
        hidden_size=2304,
        intermediate_size=9216,
        moe_intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        num_local_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_head_dim=128,
        linear_num_heads=32,
        layer_types=kinds,
        rms_norm_eps=1e-5,
    )


def _llama(dim: int, intermediate: int, layers: int, heads: int) -> Callable[[], PreTrainedConfig]:
    return lambda: LlamaConfig(
        vocab_size=128256,
        hidden_size=dim,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    )


def _qwen3(dim: int, intermediate: int, layers: int, heads: int) -> Callable[[], PreTrainedConfig]:
    return lambda: Qwen3Config(
        vocab_size=151936,
        hidden_size=dim,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
    )


_EIGHT_BLOCKS = BlockAttnRes(num_blocks=8)

MODELS: dict[str, KnownModel] = {
    "kimi-linear-48b": KnownModel(
        shape=_kimi_linear,
        residual=BlockAttnRes(sublayers_per_block=6),
        source="config of Kimi Linear 48B A3B (arXiv 2510.26692); blocks as in Attention Residuals, section 5.2",
    ),
    "kimi-k3": KnownModel(
        shape=StatedSizes(
            dim=7168,
            num_sublayers=186,
            parameters=2.78e12,
            active=104e9,
            unknown=(
                "Kimi K3: its report states 93 layers, width 7168, blocks of 12 layers, 2.78T parameters, 104B active; "
                "Transformers has no class that builds it. Weights are taken as spread evenly over the sublayers; "
                "attention over the context, activations inside sublayers and the KV cache are not counted"
            ),
        ),
        residual=BlockAttnRes(sublayers_per_block=24),
        source="Kimi K3 report (arXiv 2607.24653)",
    ),
    "llama-3.1-8b": KnownModel(
        shape=_llama(4096, 14336, 32, 32), residual=_EIGHT_BLOCKS, source="config of Llama 3.1 8B"
    ),
    "llama-3.1-70b": KnownModel(
        shape=_llama(8192, 28672, 80, 64), residual=_EIGHT_BLOCKS, source="config of Llama 3.1 70B"
    ),
    "llama-3.1-405b": KnownModel(
        shape=_llama(16384, 53248, 126, 128),
        residual=BlockAttnRes(num_blocks=8, remainder="balanced"),
        source="config of Llama 3.1 405B",
    ),
    "qwen3-8b": KnownModel(shape=_qwen3(4096, 12288, 36, 32), residual=_EIGHT_BLOCKS, source="config of Qwen3 8B"),
}
"""By the word on the command line."""


def known_model(name: str) -> KnownModel:
    """The model of a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in MODELS:
        raise ConfigError(f"model is {name!r}; allowed: {', '.join(MODELS)}, or --config with a config.json")
    return MODELS[name]


def read_config(path: Path) -> PreTrainedConfig:
    """The Hugging Face config in a file.

    Raises:
        ConfigError: It is missing or is not a config.
    """
    return config_of(read_settings(str(path), name="config"))


def as_stated(shape: Any) -> StatedSizes | None:
    """The stated sizes, if that is all there is."""
    return shape if isinstance(shape, StatedSizes) else None
