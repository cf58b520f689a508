"""What a pipeline really sent, tensor by tensor: noted where a transfer is started, not worked out afterwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from attnres.parallel.layout import Kind, Leaf
from attnres.parallel.plan import Hop

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One tensor on its way from one rank to another."""

    direction: Direction
    """``"forward"``: a tensor of the state. ``"backward"``: its gradient."""
    stage: int
    """The stage that a forward transfer leads to, and a backward one comes from."""
    sender: int
    """Rank in the pipeline that sends."""
    receiver: int
    """Rank in the pipeline that receives."""
    micro_batch: int
    """Index in the step."""
    key: str
    """Name of the tensor, see `attnres.parallel.layout.Leaf`."""
    kind: Kind
    """What it is."""
    bytes: int
    """Its size."""


class Ledger:
    """The transfers that one rank has started, in its last step or evaluation."""

    def __init__(self) -> None:
        self.rows: list[Transfer] = []

    def note(self, direction: Direction, hop: Hop, micro_batch: int, leaf: Leaf, tensor: Tensor) -> None:
        """Write down a transfer over a hop."""
        sender, receiver = (hop.sender, hop.receiver) if direction == "forward" else (hop.receiver, hop.sender)
        self.rows.append(
            Transfer(
                direction=direction,
                stage=hop.stage,
                sender=sender,
                receiver=receiver,
                micro_batch=micro_batch,
                key=leaf.key,
                kind=leaf.kind,
                bytes=tensor.numel() * tensor.element_size(),
            )
        )

    def clear(self) -> None:
        """Begin anew."""
        self.rows.clear()

    def total(self, direction: Direction | None = None, *kinds: Kind) -> int:
        """Bytes sent by this rank; in one direction and of some kinds, where these are given."""
        return sum(row.bytes for row in self._chosen(direction, kinds))

    def _chosen(self, direction: Direction | None, kinds: tuple[Kind, ...]) -> Iterator[Transfer]:
        for row in self.rows:
            if direction in (None, row.direction) and (not kinds or row.kind in kinds):
                yield row
