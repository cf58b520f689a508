"""A model as numbers, one row for each sublayer: parameters, arithmetic for a token, what is kept for it.

The model is built on the meta device through Transformers' classes and `attnres.models.build`, so nothing is allocated
and no size is written down twice. A weight's part in the arithmetic follows from its shape: a matrix multiplies every
token, a stack of expert matrices only where the router sends it, a vector costs next to nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from attnres.models import build
from attnres.models.given import told_in_one_line
from attnres.models.install import family_of_converted
from attnres.parallel.planning.divisions import Width, attention_kind, tensor_widths
from attnres.parallel.planning.models import StatedSizes
from attnres.residual import Strategy

CHUNK = 64
"""Tokens that a chunked kernel of Kimi Delta Attention takes together."""


@dataclass(frozen=True, kw_only=True)
class SublayerSize:
    """One sublayer."""

    kind: str
    """Class name of its module, or ``"stated"``."""
    parameters: float
    """All of its parameters, with its norms."""
    matrices: float
    """Those that are two-dimensional, which Muon would take."""
    active: float
    """Parameters that take part in one token: all but the experts it is not sent to."""
    multiplied: float
    """Weights that multiply one token: `active` without vectors."""
    mixing_flops: float
    """Operations forward that take the token together with others, per token, the mean over a context."""
    kept_numbers: float | None
    """Numbers per token that a backward pass without checkpointing needs; None if unknown."""
    cache_numbers: float | None
    """Numbers per token that decoding keeps; None if unknown."""
    cache_parts: int = 1
    """Among how many tensor ranks these can be divided: key and value heads, or 1 for a latent that all heads share."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model."""

    name: str
    """For people."""
    dim: int
    """Width D."""
    sublayers: tuple[SublayerSize, ...]
    """In order; L of them."""
    embedding: float
    """Parameters before the first layer: of tokens, and of positions where these are learned; 0 if unknown."""
    head: float
    """Parameters of the output projection, also where it is the embedding's; 0 if unknown."""
    is_tied: bool
    """Whether the head is the embedding."""
    vocabulary: int | None
    """Tokens; None if unknown."""
    final_norm: float
    """Parameters of the norm before the head."""
    residual: float
    """Parameters of the residual path, by itself."""
    residual_matrices: float
    """Those of them that multiply a token, as a variant's projected queries do."""
    residual_per_site: tuple[float, ...]
    """The same by site: each sublayer's, then the output's."""
    widths: tuple[Width, ...] = ()
    """What tensor ranks have to divide; none if unknown."""
    notes: tuple[str, ...] = ()
    """What is not public and was not guessed."""

    @property
    def num_sublayers(self) -> int:
        """Sublayers L."""
        return len(self.sublayers)

    @property
    def parameters(self) -> float:
        """All parameters, tied ones once."""
        ends = self.embedding + self.final_norm + (0 if self.is_tied else self.head)
        return ends + self.residual + sum(sublayer.parameters for sublayer in self.sublayers)

    @property
    def active(self) -> float:
        """Parameters that take part in one token; of the embedding one row, so none."""
        return self.residual + self.final_norm + self.head + sum(sublayer.active for sublayer in self.sublayers)


def mean_keys(context: int, window: int | None = None) -> float:
    """Positions that a token attends to, itself among them: the mean over a context, with or without a window.

    Examples:
        >>> mean_keys(4096), mean_keys(4, window=2)
        (2048.5, 1.75)
    """
    if window is None or window >= context:
        return (context + 1) / 2
    return (window * (window + 1) / 2 + (context - window) * window) / context


def built_size(name: str, config: PreTrainedConfig, strategy: Strategy, context: int) -> ModelSize:
    """Build a model on the meta device and count.

    Args:
        name: For people.
        config: Of a supported family.
        strategy: The residual strategy.
        context: Tokens of a sequence.

    Raises:
        ConfigError: Transformers cannot use the config, or the strategy does not fit it.
        UnsupportedModelError: The family is not supported.
    """
    with told_in_one_line(), torch.device("meta"):
        model = build(config, strategy, dtype=torch.bfloat16)
    base = model.base_model
    family = family_of_converted(base)
    sublayers: list[SublayerSize] = []
    for index, layer in enumerate(getattr(base, family.layers)):
        groups = (family.attention, family.mlp)
        modules = [[getattr(layer, name) for name in sorted(part.names)] for part in groups]
        mains = [getattr(layer, part.module) for part in groups]
        mixing, (cache, parts) = _mixing(config, index, context), _cache(config, index)
        attention = replace(_sublayer(mains[0], modules[0], config), mixing_flops=mixing, cache_numbers=cache)
        attention = replace(attention, cache_parts=parts)
        mlp = _sublayer(mains[1], modules[1], config)
        sublayers += [_joined(attention, mlp)] if family.is_parallel(layer) else [attention, mlp]
    head = model.get_output_embeddings().weight
    is_tied = head is base.get_input_embeddings().weight
    norm = sum(p.numel() for p in getattr(base, family.norm).parameters())
    sites = [sum(p.numel() for p in site.parameters()) for site in base.residual.sites]
    rest = norm + sum(sites) + sum(row.parameters for row in sublayers) + (0 if is_tied else head.numel())
    return ModelSize(
        name=name,
        dim=base.get_input_embeddings().weight.shape[-1],
        sublayers=tuple(sublayers),
        embedding=sum(p.numel() for p in model.parameters()) - rest,
        head=head.numel(),
        is_tied=is_tied,
        vocabulary=head.shape[0],
        final_norm=norm,
        residual=sum(sites),
        residual_matrices=sum(p.numel() for p in base.residual.parameters() if _is_matrix(p)),
        residual_per_site=tuple(float(size) for size in sites),
        widths=tensor_widths(base, family),
    )


def stated_size(name: str, stated: StatedSizes, residual_per_site: Sequence[float]) -> ModelSize:
    """What is stated about a model, its weights spread evenly over the sublayers.

    Args:
        name: For people.
        stated: The public sizes.
        residual_per_site: Parameters of each site; part of what is stated.
    """
    residual, count = sum(residual_per_site), stated.num_sublayers
    sublayer = SublayerSize(
        kind="stated",
        parameters=(stated.parameters - residual) / count,
        matrices=0.0,
        active=(stated.active - residual) / count,
        multiplied=(stated.active - residual) / count,
        mixing_flops=0.0,
        kept_numbers=None,
        cache_numbers=None,
    )
    return ModelSize(
        name=name,
        dim=stated.dim,
        sublayers=(sublayer,) * count,
        embedding=0,
        head=0,
        is_tied=False,
        vocabulary=None,
        final_norm=0,
        residual=residual,
        residual_matrices=0,
        residual_per_site=tuple(residual_per_site),
        notes=(stated.unknown,),
    )


def _is_matrix(parameter: nn.Parameter) -> bool:
    return sum(length > 1 for length in parameter.shape) > 1


def _sublayer(main: nn.Module, modules: Sequence[nn.Module], config: Any) -> SublayerSize:
    filters = {p for m in main.modules() if isinstance(m, nn.modules.conv._ConvNd) for p in m.parameters(recurse=False)}
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    counts = dict.fromkeys(("parameters", "matrices", "active", "multiplied"), 0.0)
    for parameter in {p: None for module in modules for p in module.parameters()}:
        is_stack = parameter.ndim > 2 and _is_matrix(parameter) and parameter not in filters
        share = min(1.0, chosen / parameter.shape[0]) if is_stack else 1.0
        size = parameter.numel()
        counts["parameters"] += size
        counts["active"] += size * share
        counts["matrices"] += size * (_is_matrix(parameter) and parameter.ndim == 2)
        counts["multiplied"] += size * share * (_is_matrix(parameter) or parameter in filters)
    kept = _kept(main, chosen, config.hidden_size)
    kind = type(main).__name__
    return SublayerSize(kind=kind, mixing_flops=0.0, kept_numbers=kept, cache_numbers=0.0, **counts)


def _joined(attention: SublayerSize, mlp: SublayerSize) -> SublayerSize:
    """Attention and MLP side by side, which are one sublayer."""
    numbers = ("parameters", "matrices", "active", "multiplied", "mixing_flops", "kept_numbers", "cache_numbers")
    sums: dict[str, Any] = {name: getattr(attention, name) + getattr(mlp, name) for name in numbers}
    return SublayerSize(kind=f"{attention.kind} | {mlp.kind}", cache_parts=attention.cache_parts, **sums)


def _kept(main: nn.Module, chosen: int, dim: int) -> float:
    """What reads and norm leave, and what each matrix puts out; attention weights are not kept by fused kernels."""
    outputs = sum(module.out_features for module in main.modules() if isinstance(module, nn.Linear))
    outputs += sum(module.nf for module in main.modules() if isinstance(module, Conv1D))
    stacks = [p for p in main.parameters() if p.ndim == 3 and p.shape[1] > 1]
    return 2.0 * dim + outputs + sum(chosen * stack.shape[1] for stack in stacks)


def _mixing(config: Any, layer: int, context: int) -> float:
    """Operations of attention itself, per token; see the formulas in the report."""
    kind = attention_kind(config, layer)
    if kind == "linear_attention":
        width = config.linear_head_dim
        return config.linear_num_heads * (6.0 * width**2 + 3.0 * CHUNK * width + CHUNK**2)
    window = config.sliding_window if kind == "sliding_attention" else None
    return 2.0 * config.num_attention_heads * sum(_head_widths(config)) * mean_keys(context, window)


def _cache(config: Any, layer: int) -> tuple[float, int]:
    """Numbers per token in a cache, and their parts; a recurrent state does not grow with the tokens."""
    if attention_kind(config, layer) == "linear_attention":
        return 0.0, 1
    if getattr(config, "kv_lora_rank", None):
        return float(config.kv_lora_rank + config.qk_rope_head_dim), 1
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return float(heads * sum(_head_widths(config))), heads


def _head_widths(config: Any) -> tuple[int, int]:
    if getattr(config, "kv_lora_rank", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width, width
