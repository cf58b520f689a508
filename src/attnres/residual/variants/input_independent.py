"""Mixing with learned scalars instead of a query and keys (paper, Table 4)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.residual.history import AttnResVariant
from attnres.residual.site import Site
from attnres.residual.state import History

Normalization = Literal["softmax", "none"]


@final
class ScalarSite(Site):
    """A site with one scalar per source, all the same at start."""

    def __init__(self, num_sources: int, initial: float, *, closes_block: bool, device: Any, dtype: Any):
        super().__init__(closes_block=closes_block)
        self.initial = initial
        self.source_weight = nn.Parameter(torch.full((num_sources,), initial, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Give every source the same scalar."""
        nn.init.constant_(self.source_weight, self.initial)


@final
@dataclass(frozen=True, kw_only=True)
class InputIndependentMixing(AttnResVariant):
    """``h = sum_i a_{l,i} v_i`` with learned scalars per site and source, the same for every token (Table 4, 1.749).

    Whether the scalars go through a softmax the paper leaves open: both are options. They start uniform, so the model
    starts as AttnRes does. Without softmax and with ``read_scale="sum"`` the scalars start at 1 in effect, which is
    DenseFormer as the paper's Table 5 writes it.

    Parameters: one scalar per site and source. State and moves: as AttnRes in one phase.
    """

    short_name: ClassVar[str] = "input-independent"
    formula: ClassVar[str] = "h = sum_i softmax_i(a) v_i"
    citation: ClassVar[str] = "Attention Residuals, arXiv 2603.15031, Table 4"

    normalization: Normalization = "softmax"
    """``"softmax"`` over the scalars of a site, which start at 0; or ``"none"``, where they start at 1/sources."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalization not in get_args(Normalization):
            raise ConfigError(f'normalization is {self.normalization!r}; allowed are "softmax" and "none"')

    @property
    def label(self) -> str:
        """Name and form, for tables and legends."""
        return f"{self.form} AttnRes, input-independent" + ("" if self.normalization == "softmax" else " (raw)")

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site with one scalar per source."""
        del dim, eps
        count = len(self.sources(index, num_sublayers))
        initial = 0.0 if self.normalization == "softmax" else 1.0 / count
        closes_block = self.closes_block(index, num_sublayers)
        return ScalarSite(count, initial, closes_block=closes_block, device=device, dtype=dtype)

    def weights(self, stacked: Tensor, state: History, site: Site) -> Tensor:
        """The scalars, or their softmax."""
        del state
        assert isinstance(site, ScalarSite)
        scalars = site.source_weight.to(stacked.dtype)
        return (scalars.softmax(-1) if self.normalization == "softmax" else scalars)[None, :, None]
