"""What measurements of pipelines share: processes of this machine as ranks, the arms, and what they are fed."""

import json
import tempfile
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from attnres.parallel.formulas import comm_cached, comm_naive, comm_own_reused
from attnres.parallel.pipeline import Batch
from attnres.parallel.plan import Cache

FORMULAS: dict[Cache, Callable[..., Fraction]] = {"off": comm_naive, "received": comm_cached, "all": comm_own_reused}
"""What is sent of block sums, by what ranks keep."""
ARMS: tuple[Cache, ...] = tuple(FORMULAS)
"""What is measured in turn."""
TIMEOUT = timedelta(minutes=10)
"""Of a transfer."""


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on processes of this machine with one thread each, as the ranks of a gloo group.

    Args:
        ranks: Processes.
        function: Of a module, so that they find it.
        *arguments: For it.

    Returns:
        What it returns on rank 0; JSON values.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, args=(ranks, folder, function, arguments), nprocs=ranks)
        return json.loads((Path(folder) / "result.json").read_text())


def _on_rank(rank: int, ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        result = function(*arguments)
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()


def random_batches(microbatches: int, rows: int, context: int, vocab: int) -> list[Batch]:
    """Token ids and targets ``[rows, context]`` of the micro-batches of a step, always the same."""
    shape = (microbatches, rows, context + 1)
    ids = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))
    return [(row[:, :-1], row[:, 1:]) for row in ids]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens, in nats."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
