"""Transformers' Inkling-2: the read of its decoder and the schedule of its text model.

It is another definition under the same name (normalised values, no key weight, scores over sqrt(dim)), and is held to
that one; `AsKimi` shows what is left of it when it is held to the paper's.
"""

import importlib
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from attnres.testing.adapter import Adapter, Model, NotApplicable
from attnres.testing.definition import INKLING_2, KIMI, Sublayer


class Inkling2(Adapter):
    """`Inkling2BlockAttentionResidual`, and `Inkling2TextModel` with the suite's sublayers."""

    name = "transformers inkling2"
    definition = INKLING_2
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    has_key_weight = False

    def __init__(self) -> None:
        self.version = metadata.version("transformers")
        self.module: Any = importlib.import_module("transformers.models.inkling2.modeling_inkling2")
        self.config: Any = importlib.import_module("transformers.models.inkling2.configuration_inkling2")

    def read(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, *, eps: float) -> Tensor:
        """One query; the last source is its partial sum."""
        return self.read_many(sources, query[None], key_weight, eps=eps)[0]

    def read_many(
        self, sources: Sequence[Tensor], queries: Tensor, key_weights: Tensor | None, *, eps: float
    ) -> Sequence[Tensor]:
        """All queries of one module, as its full-attention layers have three."""
        del key_weights
        dim = queries.shape[-1]
        module = self.module.Inkling2BlockAttentionResidual(self._config(dim, 1, 1), num_queries=len(queries))
        del module.query
        module.query, module.norm.eps = queries, eps
        rows = [source.reshape(1, -1, dim) for source in sources]
        earlier = torch.stack(rows[:-1], -2) if rows[:-1] else rows[0].new_zeros(1, rows[0].shape[1], 0, dim)
        return [mixed.reshape(sources[0].shape) for mixed in module(earlier, rows[-1])]

    def model(self, num_sublayers: int, sublayers_per_block: int, dim: int, *, eps: float, dtype: torch.dtype) -> Model:
        """Its text model counts layers, of two sublayers each."""
        if num_sublayers % 2 or sublayers_per_block % 2:
            raise NotApplicable("its blocks are whole decoder layers")
        config = self._config(dim, num_sublayers // 2, sublayers_per_block // 2)
        return _Stack(self.module.Inkling2TextModel(config).to(dtype), eps)

    def _config(self, dim: int, layers: int, layers_per_block: int) -> Any:
        sizes = {"vocab_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "d_rel": 2}
        sizes |= {"swa_num_attention_heads": 1, "swa_num_key_value_heads": 1, "swa_head_dim": 2, "rel_extent": 2}
        sizes |= {"moe_intermediate_size": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "eos_token_id": 3}
        config = self.config.Inkling2TextConfig(
            hidden_size=dim,
            num_hidden_layers=layers,
            n_layers_per_attn_res_block=layers_per_block,
            layer_types=["hybrid_sliding"] * layers,  # one read before attention; the other kind has three
            **sizes,
        )
        config._attn_implementation = "eager"
        return config


class AsKimi(Inkling2):
    """The same implementation, held to the paper's definition."""

    name = "transformers inkling2 as kimi"
    definition = KIMI


class _Sublayer(nn.Module):
    """In place of its attention (which returns a pair) or its mixture of experts."""

    def __init__(self, function: Sublayer, *, is_attention: bool):
        super().__init__()
        self.function, self.is_attention = function, is_attention

    def forward(self, read: Tensor | None = None, hidden_states: Tensor | None = None, **_: Any) -> Any:
        given = hidden_states if read is None else read
        assert given is not None
        output = self.function(given)
        return (output, None) if self.is_attention else output


class _Same(nn.Module):
    """In place of norms and convolutions."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class _Stack(Model):
    def __init__(self, model: Any, eps: float):
        self.inner, self.queries = model, []
        for layer in model.layers:
            reads = [layer.attention_input, layer.mlp_input]
            self.queries += [None if read is None else read.query for read in reads]
            for name in ("input_layernorm", "post_attention_layernorm"):
                setattr(layer, name, _Same())
            layer.post_attention_convolution = layer.post_mlp_convolution = _Same()
        self.queries.append(model.final_input.query)
        model.norm = _Same()
        for module in model.modules():
            if isinstance(getattr(module, "query", None), nn.Parameter):
                module.norm.eps = eps

    def run(self, embedding: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """Its forward pass from embeddings to what it hands to its final norm."""
        for at, layer in enumerate(self.inner.layers):
            layer.self_attn = _Sublayer(sublayers[2 * at], is_attention=True)
            layer.mlp = _Sublayer(sublayers[2 * at + 1], is_attention=False)
        return self.inner(inputs_embeds=embedding, use_cache=False).last_hidden_state
