"""attn-res (PyPI): its operator and its transformer, whose attention and MLPs are replaced by the suite's sublayers."""

import importlib
from collections.abc import Sequence
from importlib import metadata
from typing import Any, final

import torch
from torch import Tensor, nn

from attnres.testing.adapter import Adapter, Model, NotApplicable
from attnres.testing.definition import Sublayer


@final
class AttnRes(Adapter):
    """`attn_res.main`."""

    name = "attn-res"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    has_key_weight = False
    parameters_as_sources = True

    def __init__(self) -> None:
        self.version = metadata.version("attn-res")
        self.module: Any = importlib.import_module("attn_res.main")

    def read(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, *, eps: float) -> Tensor:
        """`AttnResOperator`, with sources stacked as its model stacks them."""
        del key_weight
        operator = self.module.AttnResOperator(query.shape[-1], eps=eps)
        del operator.pseudo_query
        operator.pseudo_query = query
        rows = torch.stack([source.reshape(1, -1, source.shape[-1]) for source in sources])
        return operator(rows).reshape(sources[0].shape)

    def two_phase(
        self,
        finished: Sequence[Tensor],
        partials: Sequence[Tensor | None],
        queries: Tensor,
        key_weights: Tensor | None,
        *,
        eps: float,
    ) -> Sequence[Tensor]:
        """Its phase 1 over the finished sources, and over each partial sum as a source by itself, then its merge."""
        del key_weights
        norm = self.module.RMSNormNoWeight(eps)
        phase, merge = self.module.two_phase_block_attnres_inference, self.module.online_softmax_merge
        mixed, largest, total = phase(queries, torch.stack(tuple(finished)), norm)
        reads = []
        for at, partial in enumerate(partials):
            if partial is None:
                reads.append(mixed[at] / total[at].unsqueeze(-1))
                continue
            near = phase(queries[at : at + 1], partial[None], norm)
            reads.append(merge(mixed[at], largest[at], total[at], *(part[0] for part in near)))
        return reads

    def model(self, num_sublayers: int, sublayers_per_block: int, dim: int, *, eps: float, dtype: torch.dtype) -> Model:
        """`AttnResTransformer`; it counts blocks, and rounds the sublayers per block down."""
        size = min(sublayers_per_block, num_sublayers)
        blocks = next((n for n in range(1, num_sublayers + 1) if num_sublayers // n == size), None)
        if blocks is None:
            raise NotApplicable(f"no n_blocks makes blocks of {size} out of {num_sublayers} sublayers")
        config = self.module.TransformerConfig(
            d_model=dim, n_layers=num_sublayers, n_heads=1, n_kv_heads=1, vocab_size=2, n_blocks=blocks, eps=eps,
            max_seq_len=64, ffn_mult=1.0,
        )  # fmt: skip
        with torch.device("cpu"):
            return _Stack(self.module.AttnResTransformer(config).to(dtype))


class _Sublayer(nn.Module):
    """In place of its attention or MLP."""

    def __init__(self, function: Sublayer):
        super().__init__()
        self.function = function

    def forward(self, read: Tensor, *_: Tensor) -> Tensor:
        return self.function(read)


class _Stack(Model):
    def __init__(self, model: Any):
        self.inner = model
        self.queries = [*(layer.attn_res.pseudo_query for layer in model.layers), None]
        for layer in model.layers:
            layer.norm = nn.Identity()

    def run(self, embedding: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """Its block forward pass, from embedding to what it hands to its final norm."""
        for layer, sublayer in zip(self.inner.layers, sublayers, strict=True):
            layer.fn = _Sublayer(sublayer)
        nothing = torch.empty(0)
        return self.inner._forward_block_attnres(embedding, nothing, nothing)
