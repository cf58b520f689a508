"""What a residual strategy is: where a sublayer gets its input from, and where its output goes.

A strategy holds settings only. What it learns lives in one `Site` per place where the history is read, and what flows
is an immutable state, so a strategy can be printed, compared, written to a file and used by several models at once.

Every strategy is linear in what it moves, once its weights are known: a read is a weighted sum of the state's tensors,
a write replaces them by weighted sums of themselves and the new output. `read_weights` and `write_weights` say with
which weights; from them alone the mixing matrix of any strategy follows (paper, section 6).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from attnres.ops.reference import rms_norm
from attnres.residual.schedule import Source
from attnres.residual.settings import check_settings
from attnres.residual.site import Site

_is_autocast_on = torch._C._is_any_autocast_enabled

ReadScale = Literal["mean", "sum"]


class Strategy(ABC):
    """A residual strategy: `start`, `read` and `write` over an immutable state.

    ::

        state = strategy.start(embedding)
        for site, sublayer in zip(sites, sublayers):
            state = strategy.write(state, site, sublayer(strategy.read(state, site)))
        hidden = strategy.read(state, output_site)
    """

    tensors_at_start: ClassVar[int] = 1
    """How many tensors of the state are the embedding at the start; `Streams` count themselves."""
    scores_every_tensor: ClassVar[bool] = False
    """Whether a read looks at tensors of the state that then get no weight; they count as moved."""
    crosses_tokens: ClassVar[bool] = False
    """Whether a write looks at other positions, so that step-by-step decoding would need a cache of its own."""
    weights_meet_once: ClassVar[bool] = True
    """Whether each parameter enters a model's graph at one site only."""
    short_name: ClassVar[str]
    """The word for it on a command line."""
    formula: ClassVar[str]
    """Its rule in one line, for tables: h the read, v an output, x what the state holds."""
    citation: ClassVar[str]
    """Where it comes from."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "read" in vars(cls) and "read_normed" not in vars(cls):  # what a base fuses is its own read, not this one
            cls.read_normed = Strategy.read_normed

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    @abstractmethod
    def label(self) -> str:
        """Name and settings, for tables and legends."""

    @abstractmethod
    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """Make the site ``index``; ``num_sublayers`` is the output read."""

    def connect(self, sites: Sequence[Site]) -> None:
        """Let the sites of one model, output read last, know of each other where that is needed."""
        del sites

    @abstractmethod
    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """Of which outputs each tensor that the read at a site sees is made, oldest first."""

    def block_ends(self, num_sublayers: int) -> tuple[int, ...]:
        """Sublayer counts at which a block is complete; empty for a strategy without blocks."""
        del num_sublayers
        return ()

    def with_read_scale(self, default: ReadScale) -> "Strategy":
        """The same strategy with its read scale settled, where it has one that was left open."""
        del default
        return self

    def views(self, index: int, num_sublayers: int) -> int:
        """Reads taken at a site: 1, or 3 where query, key and value of an attention each have their own."""
        del index, num_sublayers
        return 1

    def takes_norm(self, index: int, num_sublayers: int) -> bool:
        """Whether the strategy applies the norm of the sublayer at a site itself, in place of the sublayer."""
        del index, num_sublayers
        return False

    def weight_gain(self, num_sublayers: int) -> float:
        """Factor on the initial weights of value, output and MLP projections of a model built with the strategy."""
        del num_sublayers
        return 1.0

    @abstractmethod
    def start(self, embedding: Tensor) -> Any:
        """The state before the first sublayer."""

    def resume(self, state: Any, upcoming: Sequence[Site]) -> Any:
        """A state that was cut between two sublayers, made ready for the reads of the running block.

        What phase 1 had for them does not cross a cut, since it belongs to their sites.

        Args:
            state: As it crossed the cut.
            upcoming: The sites of the running block whose reads come after the cut, in order; may be none.
        """
        del upcoming
        return state

    @abstractmethod
    def read(self, state: Any, site: Site) -> Tensor:
        """The input of a sublayer, or of the final norm: ``[*batch, dim]``, or ``[*batch, views, dim]``."""

    def read_normed(self, state: Any, site: Site, norm_weight: Tensor, norm_eps: float) -> tuple[Tensor, Any]:
        """A read and the RMSNorm that follows it, and the state to go on with. A strategy may fuse the two."""
        return rms_norm(self.read(state, site), norm_weight, norm_eps), state

    @abstractmethod
    def write(self, state: Any, site: Site, output: Tensor) -> Any:
        """The state after a sublayer's output; the given state stays as it is."""

    def source_of(self, state: Any, site: Site, output: Tensor) -> Tensor:
        """What a write takes in: the output itself, unless the strategy first makes something else of it.

        `write_weights` and the mixing matrix are in terms of this.
        """
        del state, site
        return output

    @abstractmethod
    def read_weights(self, state: Any, site: Site) -> Tensor:
        """Weights of the state's tensors in the read: ``[*batch, views, tensors, channels]``.

        ``channels`` is 1, a number of channel groups, or the width; leading axes broadcast against the batch.
        """

    @abstractmethod
    def write_weights(self, state: Any, site: Site, output: Tensor) -> Tensor:
        """Weights of the state's tensors and, last, the output in each tensor of the state that `write` returns.

        Shape ``[*batch, new tensors, tensors + 1, channels]``, read as in `read_weights`.
        """


def stream_dtype(embedding: Tensor) -> torch.dtype | None:
    """The declared dtype of the reads: autocast's where it is on, else none (then all sources must agree).

    Under autocast the embedding is float32 and sublayer outputs are not; without a declared dtype the first source
    would promote the whole stream. Autocast leaves float64 alone, and so does a read.
    """
    if not _is_autocast_on():  # the only question where the answer is no
        return None
    kind = embedding.device.type
    if embedding.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
