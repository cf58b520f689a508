"""What the tests of distributed checkpoints run on the ranks."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from attnres.parallel.config import ParallelConfig
from attnres.parallel.mesh import Mesh
from attnres.train import Checkpoints
from attnres.train.checkpoint import open_checkpoint
from parallel.work_train import fit, forget_groups
from train.tiny_run import killed_at

TENSORS = {
    "a": torch.arange(42.0).reshape(7, 6),  # rows that four ranks cannot share evenly
    "b": torch.arange(5.0),
    "experts": torch.arange(3 * 2 * 4, dtype=torch.bfloat16).reshape(3, 2, 4),  # fewer than there are ranks
    "one": torch.tensor([7.0]),
    "scalar": torch.tensor(2.5),
    "integers": torch.arange(6),
}
"""What is saved. Dimension 0 is sharded, but of the last two, which every rank has whole."""
WHOLE = {"scalar", "integers"}


def _on_ranks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    forget_groups()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: tensor if name in WHOLE else distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in tensors.items()
    }


def save_shards(root: str, fails: int | None = None) -> str:
    mesh = Mesh(ParallelConfig(data=dist.get_world_size()), device="cpu")
    model = _on_ranks(TENSORS)
    optimizer = {f"{name}/exp_avg": tensor for name, tensor in model.items()}
    full = OSError(28, "no room")
    breaks = mock.patch("torch.distributed.checkpoint.filesystem.os.fsync", side_effect=full)
    if mesh.rank == fails:
        breaks.start()
    try:
        return str(Checkpoints(Path(root)).save_sharded(mesh, model=model, optimizer=optimizer, state={"step": 3}))
    finally:
        mock.patch.stopall()


def load_shards(path: str) -> list[str]:
    """Names of the tensors whose shard on this rank is not what was saved."""
    opened = open_checkpoint(Path(path))
    wrong = []
    for stored, suffix in ((opened.model, ""), (opened.optimizer, "/exp_avg")):
        targets = _on_ranks({name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()})
        expected = _on_ranks(TENSORS)
        stored.copy_into((name + suffix, target) for name, target in targets.items())  # pyright: ignore[reportAttributeAccessIssue]
        wrong += [name for name in expected if not torch.equal(_local(targets[name]), _local(expected[name]))]
    return wrong


def fit_and_die(folder: str, parallel: dict[str, Any]) -> None:
    """Train until rank 1 is killed in the second save, after it has begun to write its shard."""
    if dist.get_rank() != 1:
        fit(folder, parallel)
        return
    with killed_at("torch.distributed.checkpoint.filesystem.os.fsync", 4):
        fit(folder, parallel)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
