"""The cross-stage cache of one rank: what its stages keep for each other while a micro-batch is under way.

For each micro-batch it holds tensors of the state, without their graphs, and what later stages of the rank owe to these
by way of gradient, summed up in the order of the backward pass. Both are gone when the micro-batch is through.
"""

from collections import defaultdict
from typing import final

from torch import Tensor

from attnres.errors import AttnResError


class ProtocolError(AttnResError):
    """Stages of a rank ran in an order that the cross-stage cache does not allow."""


@final
class RankStore:
    """Kept tensors and deposited gradients, by micro-batch and key."""

    def __init__(self) -> None:
        self._values: dict[int, dict[str, Tensor]] = defaultdict(dict)
        self._deposits: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def keep(self, micro_batch: int, key: str, value: Tensor) -> None:
        """Keep a tensor for later stages of this rank."""
        self._values[micro_batch][key] = value.detach()

    def value(self, micro_batch: int, key: str) -> Tensor:
        """A kept tensor.

        Raises:
            ProtocolError: It is not here: an earlier stage has not run, or its backward pass is through already.
        """
        try:
            return self._values[micro_batch][key]
        except KeyError:
            raise ProtocolError(
                f"{key} of micro-batch {micro_batch} is not in this rank's cache; allowed: stages forward in ascending "
                "order, and none forward again once an earlier one is through with its backward pass"
            ) from None

    def deposit(self, micro_batch: int, key: str, gradient: Tensor) -> None:
        """Leave the gradient of a kept tensor, in place of what was left before (which it has to include)."""
        self._deposits[micro_batch][key] = gradient

    def collect(self, micro_batch: int, key: str) -> Tensor | None:
        """Take out what later stages have left for a tensor; None where they left nothing."""
        return self._deposits[micro_batch].pop(key, None)

    def release(self, micro_batch: int, key: str) -> None:
        """Forget a tensor whose first stage on this rank is through.

        Raises:
            ProtocolError: A gradient is still there, which would be lost.
        """
        self._values[micro_batch].pop(key, None)
        if key in self._deposits[micro_batch]:
            raise ProtocolError(f"the gradient of {key} of micro-batch {micro_batch} was deposited but not collected")
        if not self._values[micro_batch]:
            del self._values[micro_batch]
        if not self._deposits[micro_batch]:
            del self._deposits[micro_batch]

    def drop(self, micro_batch: int) -> None:
        """Forget all of a micro-batch that has no backward pass."""
        self._values.pop(micro_batch, None)

    def clear(self) -> None:
        """Forget everything, as after a step that broke off."""
        self._values.clear()
        self._deposits.clear()

    def tensors(self) -> list[Tensor]:
        """What is kept now."""
        return [tensor for kept in self._values.values() for tensor in kept.values()]

    def gradients(self) -> list[Tensor]:
        """What is deposited now."""
        return [tensor for left in self._deposits.values() for tensor in left.values()]
