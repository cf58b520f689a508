"""Depth attention as pure tensor functions: the direct read, and its exact split into two phases."""

from attnres.ops.depth_attention import depth_attention
from attnres.ops.partial_softmax import PartialSoftmax, inter_block, intra_block, partial_softmax

__all__ = ["PartialSoftmax", "depth_attention", "inter_block", "intra_block", "partial_softmax"]
