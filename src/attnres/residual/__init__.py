"""Residual strategies, their immutable state, and the schedule of reads and writes."""

from attnres.residual.block import BlockAttnRes
from attnres.residual.depth_attention import DepthAttentionStrategy
from attnres.residual.full import FullAttnRes
from attnres.residual.prenorm import PreNorm
from attnres.residual.registry import STRATEGIES
from attnres.residual.residual import OUTPUT, Listener, Residual
from attnres.residual.schedule import EMBEDDING, Source, reads
from attnres.residual.site import DepthSite, Site
from attnres.residual.state import History, RunningSum, State, Streams
from attnres.residual.strategy import ReadScale, Strategy

__all__ = [
    "EMBEDDING",
    "OUTPUT",
    "STRATEGIES",
    "BlockAttnRes",
    "DepthAttentionStrategy",
    "DepthSite",
    "FullAttnRes",
    "History",
    "Listener",
    "PreNorm",
    "ReadScale",
    "Residual",
    "RunningSum",
    "Site",
    "Source",
    "State",
    "Strategy",
    "Streams",
    "reads",
]
