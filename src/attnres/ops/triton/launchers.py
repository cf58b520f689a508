"""The operators' implementations by name, as `torch.library` knows them."""

from collections.abc import Callable
from typing import Any

from attnres.ops.triton.inter_block import inter_block
from attnres.ops.triton.inter_block_backward import inter_block_backward
from attnres.ops.triton.intra_block import intra_block
from attnres.ops.triton.intra_block_backward import intra_block_backward
from attnres.ops.triton.read import depth_attention
from attnres.ops.triton.read_backward import depth_attention_backward

OPERATORS: dict[str, Callable[..., Any]] = {
    "depth_attention": depth_attention,
    "depth_attention_backward": depth_attention_backward,
    "inter_block": inter_block,
    "inter_block_backward": inter_block_backward,
    "intra_block": intra_block,
    "intra_block_backward": intra_block_backward,
}
