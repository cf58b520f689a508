"""Depth attention as pure tensor functions: the direct read, its exact split into two phases, and their backends."""

from attnres.ops.backends import Backend, use_backend
from attnres.ops.depth_attention import depth_attention
from attnres.ops.partial_softmax import PartialSoftmax, inter_block, intra_block, partial_softmax

__all__ = [
    "Backend",
    "PartialSoftmax",
    "depth_attention",
    "inter_block",
    "intra_block",
    "partial_softmax",
    "use_backend",
]
