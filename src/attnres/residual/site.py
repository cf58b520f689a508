"""A site: one place where the history is read, and the parameters a strategy learns there."""

from typing import Any, Self

import torch
from torch import Tensor, nn


class Site(nn.Module):
    """One place where the history is read: a sublayer's input, or the output. Without parameters of its own.

    A strategy that learns something derives a class with parameters and gives their initial values in
    `reset_parameters`. These are exact however the module comes to be: by the constructor, by `reset_parameters`, by
    moving a module off the meta device, and through an initialisation pass of a Hugging Face model.
    """

    index: int = -1
    """Place among the sites of a model, given by the `Residual` that holds it; the output read comes last."""
    views: int = 1
    """Reads taken here: 1, or 3 where query, key and value of an attention sublayer each have their own."""
    takes_norm: bool = False
    """Whether the sublayer's own norm is the strategy's to apply; the sublayer then gets the read as it is."""
    norm: tuple[nn.Module, ...] = ()
    """The norm of the sublayer that reads here, where it is known; referred to, not owned."""

    def __init__(self, *, closes_block: bool = False):
        super().__init__()
        self.closes_block = closes_block

    def reset_parameters(self) -> None:
        """Give the parameters their initial values."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        was_meta = any(parameter.is_meta for parameter in self.parameters())
        super()._apply(fn, recurse)
        if was_meta and not any(parameter.is_meta for parameter in self.parameters()):
            self.reset_parameters()  # to_empty() leaves whatever the memory held
        return self


class DepthSite(Site):
    """A site with its own pseudo-query (zero at start) and key weight (one at start)."""

    pseudo_query: nn.Parameter
    key_weight: nn.Parameter
    upcoming: tuple["DepthSite", ...]
    """The sites whose reads phase 1 computes once this one is written; referred to, not owned. Mostly none."""

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        closes_block: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(closes_block=closes_block)
        self.eps = eps
        self.upcoming = ()
        self.pseudo_query = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the pseudo-query to zeros and the key weight to ones."""
        nn.init.zeros_(self.pseudo_query)
        nn.init.ones_(self.key_weight)

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """Pseudo-query and key weight, where they are parameters past `nn.Module.__getattr__`, which is slow."""
        own = self._parameters
        query, weight = own.get("pseudo_query"), own.get("key_weight")
        return (self.pseudo_query, self.key_weight) if query is None or weight is None else (query, weight)

    def folded(self, dtype: torch.dtype) -> Tensor:
        """What a normalised source is scored with: ``pseudo_query * key_weight``, multiplied in ``dtype``."""
        return self.pseudo_query.to(dtype) * self.key_weight.to(dtype)

    def extra_repr(self) -> str:
        """Width, eps and whether the site's write completes a block."""
        return f"{self.pseudo_query.shape[-1]}, eps={self.eps}, closes_block={self.closes_block}"
