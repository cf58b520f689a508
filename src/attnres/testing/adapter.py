"""What the suite needs to know of an implementation: a read, and whatever else it has.

An adapter is a class of about twenty lines. What it leaves out is reported as not applicable, never as passed; a limit
that it declares is reported as declared, and a limit that it does not declare is a failure.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from attnres.testing.definition import KIMI, Definition, Sublayer

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class NotApplicable(Exception):
    """What was asked for does not exist in this implementation; the message says why."""


class Model(ABC):
    """A stack of sublayers joined by Attention Residuals, its sublayers still to be given."""

    queries: Sequence[Tensor | None]
    """Pseudo-query of each site, the output read's last; None where there is none. Checks write to them in place and
    differentiate by them, so they are the parameters (leaf tensors) themselves, or views of packed ones."""
    key_weights: Sequence[Tensor | None] = ()
    """Key weight of each site likewise; empty if the implementation has none."""

    @abstractmethod
    def run(self, embedding: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """Call each sublayer once, in order, with its read (before any norm); return the output read (before any norm).

        ``embedding`` is ``[batch, tokens, dim]``, and so is what a sublayer takes and returns.
        """


class Adapter(ABC):
    """An implementation as the suite sees it. Only `read` and `name` have to be given."""

    name: ClassVar[str]
    """How it is called in tables."""
    version: str = ""
    """Of the implementation."""
    definition: Definition = KIMI
    """The formula it is meant to compute."""
    device: str = "cpu"
    """Where the inputs of the checks are made."""
    dtypes: Sequence[torch.dtype] = ALL_DTYPES
    """Dtypes of sources that it takes, most precise first."""
    max_sources: int | None = None
    """The most sources a read takes."""
    power_of_two_width: bool = False
    """Whether the width has to be a power of two."""
    fixed_eps: float | None = None
    """Eps of the key norm where it cannot be chosen."""
    has_key_weight: bool = True
    """Whether a read takes a key weight. Without one, ``read`` is always given None."""
    has_gradient: bool = True
    """Whether reads can be differentiated."""
    parameters_as_sources: bool = False
    """Whether query and key weight have to have the dtype of the sources."""
    is_interpreted: bool = False
    """Whether GPU kernels run in an interpreter here, so that the order of operations says nothing of a GPU."""
    max_sublayers: int = 186
    """Depth from which a whole model takes too long here."""

    @abstractmethod
    def read(self, sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, *, eps: float) -> Tensor:
        """One read: sources ``[*batch, dim]``, oldest first; vectors ``[dim]``; returns ``[*batch, dim]``."""

    def read_many(
        self, sources: Sequence[Tensor], queries: Tensor, key_weights: Tensor | None, *, eps: float
    ) -> Sequence[Tensor]:
        """Several reads of the same sources at once: queries and key weights ``[reads, dim]``."""
        raise NotApplicable("no form for several queries")

    def two_phase(
        self,
        finished: Sequence[Tensor],
        partials: Sequence[Tensor | None],
        queries: Tensor,
        key_weights: Tensor | None,
        *,
        eps: float,
    ) -> Sequence[Tensor]:
        """All reads of a block: one pass over the finished sources, then one merge per read with its partial sum."""
        raise NotApplicable("no two-phase form")

    def model(self, num_sublayers: int, sublayers_per_block: int, dim: int, *, eps: float, dtype: torch.dtype) -> Model:
        """A new model as the implementation makes it, with its own initial values."""
        raise NotApplicable("no model")

    @property
    def precise(self) -> torch.dtype:
        """The most precise dtype that it takes."""
        return self.dtypes[0]

    @property
    def takes_key_weight(self) -> bool:
        """Whether the checks hand over a key weight: the implementation and the definition both have one."""
        return self.has_key_weight and self.definition.has_key_weight

    def vector_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of query and key weight beside sources of a dtype: float32, unless it has to be that of the sources."""
        return dtype if self.parameters_as_sources or dtype == torch.float64 else torch.float32

    def check_limits(self, count: int, dim: int, dtype: torch.dtype) -> None:
        """Raise `NotApplicable` if a read lies beyond a limit that is declared."""
        if dtype not in self.dtypes:
            raise NotApplicable(f"declared: takes {', '.join(str(one)[6:] for one in self.dtypes)}")
        if self.max_sources is not None and count > self.max_sources:
            raise NotApplicable(f"declared: at most {self.max_sources} sources")
        if self.power_of_two_width and dim & (dim - 1):
            raise NotApplicable("declared: the width is a power of two")
