"""mHC-lite: the mixing matrix of the streams as an average of permutations, doubly stochastic by construction."""

from dataclasses import dataclass
from itertools import permutations
from math import factorial
from typing import ClassVar, final

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops.precision import without_autocast
from attnres.residual.rivals.constrained import UNLIKELY, ConstrainedStreams

MOST_STREAMS = 6
"""More would need thousands of permutations at each site."""


@final
@dataclass(frozen=True, kw_only=True)
class MHCLite(ConstrainedStreams):
    """mHC with ``res = sum_k softmax(.)_k P_k`` over all m! permutation matrices: exact, and without an iteration.

    All else is mHC: ``h = pre^T X``, ``X <- res X + post v^T``, ``pre = sigmoid(.)``, ``post = 2 sigmoid(.)``. The
    logits of ``res`` start at 0 for the identity and -8 for the others. The identity is the first of the permutations,
    which are in lexicographic order; ``P_k`` sends old stream s to new stream ``permutation[s]``.

    Parameters: m D (2m + m!) + 2m + m! + 3 a site. State: m tensors. Moves: 3m + 2 tensors a sublayer, fused.
    """

    short_name: ClassVar[str] = "mhc-lite"
    formula: ClassVar[str] = "h = pre^T X;  X <- res X + post v^T;  res = sum_k softmax_k(.) P_k of the streams"
    citation: ClassVar[str] = "mHC-lite, arXiv 2601.05732"

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.streams
        if not 1 <= count <= MOST_STREAMS:
            raise ConfigError(f"streams is {count!r}; allowed is a whole number from 1 to {MOST_STREAMS}")

    @property
    def label(self) -> str:
        """Name and streams, for tables and legends."""
        return f"mHC-lite ({self.streams} streams)"

    def initial_mixing(self) -> Tensor:
        """Logits of 0 for the identity and far less for every other permutation."""
        logits = torch.full((factorial(self.streams),), UNLIKELY, device="cpu")
        logits[0] = 0.0
        return logits

    def doubly_stochastic(self, logits: Tensor) -> Tensor:
        """The average of the permutation matrices with the softmax of the logits as weights."""
        identity = torch.eye(self.streams, device=logits.device, dtype=logits.dtype)
        places = torch.tensor(list(permutations(range(self.streams))), device=logits.device)
        with without_autocast(logits):
            return (logits.softmax(-1) @ identity[places].flatten(1)).unflatten(-1, (self.streams, self.streams))
