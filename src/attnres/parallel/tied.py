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
        self._earlier: list[Tensor | None] = []
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

    def begin(self) -> None:
        """Before a step: put aside the gradients of earlier ones, which are sums already."""
        self._earlier = [_weight(part).grad for part in self._trained]
        for part in self._trained:
            _weight(part).grad = None

    def add_gradients(self) -> None:
        """After a step: give both stages the sum of its gradients, first stage's first, and those of earlier steps."""
        own = [_local_gradient(_weight(part)) for part in self._trained]
        if len(own) == 2:
            total = own[0] + own[1]
            for gradient in own:
                gradient.copy_(total)
        elif own:
            self._exchange(own[0], self._trained[0])
        for part, earlier in zip(self._trained, self._earlier, strict=True):
            weight = _weight(part)
            if earlier is not None and weight.grad is not None:
                weight.grad += earlier
        self._earlier = []

    @property
    def _trained(self) -> list[StagePart]:
        return [part for part in self._owners if _weight(part).requires_grad]

    def _exchange(self, gradient: Tensor, owner: StagePart) -> None:
        other = torch.empty_like(gradient)
        peer = self._plan.ranks[-1] if owner.is_first else self._plan.ranks[0]
        send = dist.isend(gradient.contiguous(), group=self._group, group_dst=peer)
        dist.recv(other, group=self._group, group_src=peer)
        if send is not None:
            send.wait()
        gradient.copy_(gradient + other if owner.is_first else other + gradient)


def _weight(part: StagePart) -> nn.Parameter:
    return part.decoder.get_input_embeddings().weight


def _own_weight(part: StagePart) -> None:
    shared = _weight(part)
    weight = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    part.decoder.get_input_embeddings().weight = weight
    part.decoder.get_output_embeddings().weight = weight


def _local_gradient(weight: nn.Parameter) -> Tensor:
    """This rank's part of a weight's gradient, zeros where it has none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    gradient = weight.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
