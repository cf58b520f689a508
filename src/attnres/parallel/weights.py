"""One process makes the weights of a run; every other is sent what it keeps of them.

If each process made the whole model, a machine with eight of them would need its memory eight times. So only the first
does. The others build the model without values and give it memory that nobody has touched, which the system does not
hand out before it is written to: what belongs to other ranks never is.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnres.parallel.checkpoint import local_shard


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, those that are not saved among them; one with several names under the first."""
    found: dict[int, tuple[str, Tensor]] = {}
    every = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in chain(*every):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def allocate(model: nn.Module) -> bool:
    """Give a model on the meta device memory on the host, in place, without values. Weights that are tied stay so.

    Returns:
        Whether that was possible: not where a module has a tensor that is neither parameter nor buffer, whose value
        nobody could send. The model is as it was then.
    """
    modules = list(model.modules())
    if any(isinstance(value, Tensor) and value.is_meta for module in modules for value in vars(module).values()):
        return False
    new: dict[int, Any] = {}
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in new:
                        new[id(tensor)] = _untouched(tensor)
                    tensors[key] = new[id(tensor)]
    return True


class FirstWeights:
    """The weights of rank 0, kept until all ranks have what they need of them.

    Args:
        model: The whole model, before anything is divided; its values matter on rank 0 only.
        device: Where collectives take their tensors from.
    """

    def __init__(self, model: nn.Module, device: torch.device | str):
        self._device = torch.device(device)
        tensors = named_tensors(model)
        self._shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self._values: Mapping[str, Tensor] = tensors if dist.get_rank() == 0 else {}

    @torch.no_grad()
    def send(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite tensors of this rank; all ranks call this together, each with its own.

        Args:
            targets: By their names in the whole model; whole or sharded, and a name may come twice.
        """
        wanted: dict[str, list[Tensor]] = {}
        for name, tensor in targets:
            wanted.setdefault(name, []).append(tensor)
        for name, (shape, dtype) in self._shapes.items():
            if name in self._values:
                value = self._values[name].detach().to(self._device).contiguous()
            else:
                value = torch.empty(shape, dtype=dtype, device=self._device)
            dist.broadcast(value, src=0)
            for target in wanted.get(name, ()):
                local, offsets = local_shard(target)
                local.copy_(value[tuple(slice(at, at + size) for at, size in zip(offsets, local.shape, strict=True))])
        self._values = {}


def _untouched(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
