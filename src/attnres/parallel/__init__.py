"""More than one device: pipeline with cross-stage cache, sequence sharding, data parallelism, and what they cost.

PyTorch's own engine does the work; this package has what a residual path that remembers needs there. Names are imported
when they are asked for, so that a look at a mesh's settings does not load every model.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnres.parallel.formulas import comm_cached, comm_naive, comm_own_reused
    from attnres.parallel.ledger import Ledger, Transfer
    from attnres.parallel.pipeline import Pipeline
    from attnres.parallel.plan import PipelinePlan, plan_pipeline
    from attnres.parallel.schedules import SCHEDULES, check_pipeline
    from attnres.parallel.tensor import TensorParallel, parallelize

_PLACES = {
    "Ledger": "ledger",
    "Pipeline": "pipeline",
    "PipelinePlan": "plan",
    "SCHEDULES": "schedules",
    "TensorParallel": "tensor",
    "Transfer": "ledger",
    "check_pipeline": "schedules",
    "comm_cached": "formulas",
    "comm_naive": "formulas",
    "comm_own_reused": "formulas",
    "parallelize": "tensor",
    "plan_pipeline": "plan",
}

__all__ = [
    "SCHEDULES",
    "Ledger",
    "Pipeline",
    "PipelinePlan",
    "TensorParallel",
    "Transfer",
    "check_pipeline",
    "comm_cached",
    "comm_naive",
    "comm_own_reused",
    "parallelize",
    "plan_pipeline",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
