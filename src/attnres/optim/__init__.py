"""Which parameter gets which optimizer and learning rate, and how the rate moves over a run."""

from attnres.optim.build import (
    GroupedOptimizer,
    build_optimizer,
    local_groups,
    optimizer_groups,
    optimizer_of_groups,
)
from attnres.optim.config import OptimConfig
from attnres.optim.groups import DEPTH_PARAMETERS, ParamGroup, freeze_base, is_depth_parameter, param_groups
from attnres.optim.schedule import lr_multiplier

__all__ = [
    "DEPTH_PARAMETERS",
    "GroupedOptimizer",
    "OptimConfig",
    "ParamGroup",
    "build_optimizer",
    "freeze_base",
    "is_depth_parameter",
    "local_groups",
    "lr_multiplier",
    "optimizer_groups",
    "optimizer_of_groups",
    "param_groups",
]
