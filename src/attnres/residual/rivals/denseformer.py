"""DenseFormer: after each decoder layer, a learned weighted sum of all states so far."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnres.errors import ConfigError
from attnres.residual.schedule import Source
from attnres.residual.site import Site
from attnres.residual.strategy import Strategy


@final
@dataclass(frozen=True)
class States:
    """The states that are averaged, and the running one."""

    finished: tuple[Tensor, ...]
    """The embedding, and the running sum at the end of each decoder layer, ``[*batch, dim]``."""
    hidden: Tensor
    """What is read next."""


pytree.register_dataclass(States, field_names=["finished", "hidden"])


@final
class AverageSite(Site):
    """A site after whose write the states are averaged: one weight per state, at start all on the newest."""

    def __init__(self, num_states: int, *, device: Any, dtype: Any):
        super().__init__(closes_block=True)
        self.state_weight = nn.Parameter(torch.zeros(num_states, device=device, dtype=dtype))
        if not self.state_weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """All weight on the newest state: a plain residual."""
        with torch.no_grad():
            self.state_weight.zero_()
            self.state_weight[-1] = 1.0


@final
@dataclass(frozen=True, kw_only=True)
class DenseFormer(Strategy):
    """``x <- x + v`` within a decoder layer; after it ``x <- sum_j a_{l,j} y_j`` over all states y so far.

    ``y_0`` is the embedding and ``y_j`` the running sum at the end of layer j, so what is averaged are cumulative
    states, not outputs. The weights are the same for every token. At the start the model is PreNorm.

    Parameters: one scalar per layer and earlier state. State: layers so far + 2 tensors. Moves: 3 tensors a
    sublayer, and after each layer all states once.
    """

    tensors_at_start: ClassVar[int] = 2
    short_name: ClassVar[str] = "denseformer"
    formula: ClassVar[str] = "x <- x + v;  after each layer x <- sum_j a_j y_j over the states so far"
    citation: ClassVar[str] = "DenseFormer, arXiv 2402.02622"

    sublayers_per_average: int = 2
    """Sublayers between averages; 2 averages after every decoder layer, as DenseFormer does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.sublayers_per_average
        if count < 1:
            raise ConfigError(f"sublayers_per_average is {count!r}; allowed is a whole number of 1 or more")

    @property
    def label(self) -> str:
        """Name for tables and legends."""
        return "DenseFormer"

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with weights where a layer ends, and without elsewhere.

        Raises:
            ConfigError: The model ends before the first average.
        """
        del dim, eps
        if self.sublayers_per_average > num_sublayers:
            seen, most = self.sublayers_per_average, num_sublayers
            raise ConfigError(f"sublayers_per_average is {seen}; allowed is up to {most} (the number of sublayers)")
        number, rest = divmod(index + 1, self.sublayers_per_average)
        if index == num_sublayers or rest:
            return Site()
        return AverageSite(number + 1, device=device, dtype=dtype)

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """The running state: a weighted sum of everything so far."""
        del num_sublayers
        return (Source(embedding=True, first=0, stop=site),)

    def start(self, embedding: Tensor) -> States:
        """The embedding is the first state and the running one."""
        return States((embedding,), embedding)

    def read(self, state: States, site: Site) -> Tensor:
        """The running state."""
        del site
        return state.hidden

    def write(self, state: States, site: Site, output: Tensor) -> States:
        """Add the output, and at the end of a layer average the states."""
        hidden = state.hidden + output
        if not isinstance(site, AverageSite):
            return States(state.finished, hidden)
        finished = (*state.finished, hidden)
        weight = site.state_weight.to(torch.promote_types(hidden.dtype, torch.float32))
        total = weight[0] * finished[0].to(weight.dtype)
        for index in range(1, len(finished)):
            total = total + weight[index] * finished[index].to(weight.dtype)
        return States(finished, total.to(hidden.dtype))

    def read_weights(self, state: States, site: Site) -> Tensor:
        """All on the running state."""
        del site
        hidden = state.hidden
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = torch.zeros(1, len(state.finished) + 1, 1, device=hidden.device, dtype=wide)
        weights[:, -1] = 1
        return weights

    def write_weights(self, state: States, site: Site, output: Tensor) -> Tensor:
        """The old states, the new one where a layer ends, and the running one."""
        old = len(state.finished)
        wide = torch.promote_types(output.dtype, torch.float32)
        rows = torch.eye(old, old + 2, device=output.device, dtype=wide)
        newest = rows.new_zeros(1, old + 2)
        newest[:, old:] = 1
        if not isinstance(site, AverageSite):
            return torch.cat([rows, newest])[..., None]
        rows = torch.cat([rows, newest])
        return torch.cat([rows, site.state_weight.to(wide)[None] @ rows])[..., None]
