"""Residual strategies, their immutable state, and the schedule of reads and writes."""

from attnres.residual.block import BlockAttnRes
from attnres.residual.full import FullAttnRes
from attnres.residual.prenorm import PreNorm
from attnres.residual.residual import OUTPUT, Listener, Residual
from attnres.residual.schedule import EMBEDDING, Source, reads
from attnres.residual.state import History, RunningSum, State
from attnres.residual.strategy import DepthAttentionStrategy, DepthSite, ReadScale, Site, Strategy

STRATEGIES: dict[str, type[Strategy]] = {cls.short_name: cls for cls in (PreNorm, FullAttnRes, BlockAttnRes)}
"""Every strategy by its word on the command line."""

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
    "reads",
]
