"""The operators' implementations by name, as `torch.library` knows them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnres.ops.triton.inter_block import inter_block
from attnres.ops.triton.inter_block_backward import inter_block_backward
from attnres.ops.triton.intra_block import intra_block
from attnres.ops.triton.intra_block_backward import intra_block_backward
from attnres.ops.triton.read import depth_attention
from attnres.ops.triton.read_backward import depth_attention_backward


def read(
    sources: Sequence[Tensor],
    pseudo_query: Tensor,
    key_weight: Tensor | None,
    out_norm_weight: Tensor | None,
    eps: float,
    out_scale: float,
    out_norm_eps: float,
    dtype: torch.dtype | None,
) -> Tensor:
    """The operator `attnres::read`: the mix alone."""
    settings = (eps, out_scale, out_norm_eps, sources[0].dtype if dtype is None else dtype)
    return depth_attention(sources, pseudo_query, key_weight, out_norm_weight, *settings)[0]


def read_updated(sources: Sequence[Tensor], update: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator `attnres::read_updated`: an update of the last source, and the mix with it."""
    updated = (sources[-1] + update).to(sources[-1].dtype)
    return read([*sources[:-1], updated], *arguments), updated


OPERATORS: dict[str, Callable[..., Any]] = {
    "read": read,
    "read_updated": read_updated,
    "depth_attention": depth_attention,
    "depth_attention_backward": depth_attention_backward,
    "inter_block": inter_block,
    "inter_block_backward": inter_block_backward,
    "intra_block": intra_block,
    "intra_block_backward": intra_block_backward,
}
