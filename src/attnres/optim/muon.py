"""Muon for matrices that are sharded between ranks.

An orthogonalised matrix is a function of the whole matrix, and Newton-Schulz runs in bfloat16, where sums over shards
round visibly otherwise than sums over the matrix: PyTorch's Muon on sharded tensors moves the weights by percents of
what it should. So here the momentum stays sharded, and each update is gathered for as long as it takes to
orthogonalise it, which gives the single process's numbers at the price of one gathered matrix at a time.
"""

from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


@final
class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon`, also for parameters that are `DTensor`; the arguments and the state are the same."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; all ranks of a shard have to call it together."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        change = _orthogonal_change(_whole(update), group)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(_like(change, parameter))


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is spread over ranks."""
    return isinstance(parameter, DTensor)


def _orthogonal_change(update: Tensor, group: dict[str, Any]) -> Tensor:
    """What PyTorch's Muon adds to a matrix for an update: from zero, without momentum, it is what it leaves there."""
    change = torch.zeros_like(update)
    change.grad = update
    settings = {key: group[key] for key in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([change], lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    return change


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has, laid out as a parameter is."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, parameter.placements)
