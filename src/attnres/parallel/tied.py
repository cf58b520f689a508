"""A head that is the embedding, when the first and the last stage of a pipeline are apart.

Each stage has the weight; after a step both hold the sum of both gradients, so the optimizer does the same to both.
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnres.parallel.part import StagePart
from attnres.parallel.plan import PipelinePlan


@final
class TiedWeight:
    """The embedding's weight on the ranks of the first and the last stage."""

    def __init__(self, owners: Sequence[StagePart], plan: PipelinePlan, group: dist.ProcessGroup | None):
        self._owners, self._plan, self._group = owners, plan, group
        if len(owners) == 2:  # one rank has both ends: each a tensor of its own, as on two ranks
            _own_weight(owners[1])
        weight = _weight(owners[0]) if owners else None
        self.names: tuple[str, ...] = tuple(
            name for name, parameter in (owners[0].decoder.named_parameters() if owners else ()) if parameter is weight
        )

    @classmethod
    def of(cls, parts: Sequence[StagePart], plan: PipelinePlan, group: dist.ProcessGroup | None) -> "TiedWeight | None":
        """The tied weight of a pipeline; None where one stage has both ends."""
        if plan.num_stages == 1:
            return None
        return cls([part for part in parts if part.is_first or part.is_last], plan, group)

    def add_gradients(self) -> None:
        """Give both stages the sum, first stage's gradient first."""
        if not self._owners:
            return
        own = [_local(_weight(part)) for part in self._owners]
        if len(own) == 2:
            total = own[0][1] + own[1][1]
            for _, gradient in own:
                gradient.copy_(total)
            return
        gradient = own[0][1]
        other = torch.empty_like(gradient)
        is_first = self._owners[0].is_first
        peer = self._plan.ranks[-1] if is_first else self._plan.ranks[0]
        send = dist.isend(gradient.contiguous(), group=self._group, group_dst=peer)
        dist.recv(other, group=self._group, group_src=peer)
        if send is not None:
            send.wait()
        gradient.copy_(gradient + other if is_first else other + gradient)


def _weight(part: StagePart) -> nn.Parameter:
    return part.decoder.get_input_embeddings().weight


def _own_weight(part: StagePart) -> None:
    weight = nn.Parameter(_weight(part).detach().clone())
    part.decoder.get_input_embeddings().weight = weight
    part.decoder.get_output_embeddings().weight = weight


def _local(weight: nn.Parameter) -> tuple[nn.Parameter, Tensor]:
    """A weight and this rank's part of its gradient, zeros where it has none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    gradient = weight.grad
    return weight, gradient.to_local() if isinstance(gradient, DTensor) else gradient
