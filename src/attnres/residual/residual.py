"""A strategy bound to a model's depth and width: the sites with their parameters, and the interface models speak."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.ops.reference import rms_norm
from attnres.residual.site import Site
from attnres.residual.state import Streams, tensors
from attnres.residual.strategy import Strategy

OUTPUT: Final = -1
"""The site of the output read, after the last sublayer and before the model's final norm."""


class Listener(Protocol):
    """Something that watches reads and writes, such as an analysis. It must not change what it is given."""

    def on_read(self, site: int, state: Any, value: Tensor) -> None:
        """Called after each read; ``site`` counts from 0 and ``num_sublayers`` is the output."""

    def on_write(self, site: int, state: Any, output: Tensor) -> None:
        """Called before each write, with the state the output is going to be written to."""


class Residual(nn.Module):
    """The residual path of one model.

    ::

        state = residual.start(embedding)
        for site, sublayer in enumerate(sublayers):
            state = residual.write(state, site, sublayer(residual.read(state, site)))
        hidden = residual.read(state, OUTPUT)

    Args:
        strategy: Where reads come from and writes go.
        num_sublayers: Depth, attention and MLP counted separately.
        dim: Model width.
        eps: Of the key norm; by custom the base model's norm eps.
        norms: The sublayers' own norms, in order; only a strategy that moves them, such as PostNorm, needs them.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ConfigError: The strategy does not fit the depth, or needs norms that are not given.
    """

    def __init__(
        self,
        strategy: Strategy,
        num_sublayers: int,
        dim: int,
        *,
        eps: float = 1e-6,
        norms: Sequence[nn.Module] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, value in (("num_sublayers", num_sublayers), ("dim", dim)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; allowed is 1 or more")
        self.strategy = strategy.with_read_scale("mean")
        self.num_sublayers = num_sublayers
        self.sites = nn.ModuleList(
            self.strategy.site(index, num_sublayers, dim, eps=eps, device=device, dtype=dtype)
            for index in range(num_sublayers + 1)
        )
        for index in range(num_sublayers + 1):
            self._place(index, norms)
        self.strategy.connect([self.site(index) for index in range(num_sublayers + 1)])
        self._listeners: list[Listener] = []

    def _place(self, index: int, norms: Sequence[nn.Module]) -> None:
        """Tell a site where it is, and of the norm that follows it."""
        site, strategy = self.site(index), self.strategy
        site.index, site.views = index, strategy.views(index, self.num_sublayers)
        site.takes_norm = strategy.takes_norm(index, self.num_sublayers)
        site.norm = (norms[index],) if index < len(norms) else ()
        if site.takes_norm and not site.norm:
            raise ConfigError(f"{strategy.label} applies the norm of sublayer {index} itself; give it with norms=")

    def reset_parameters(self) -> None:
        """Give the parameters of every site their initial values."""
        for site in self.sites:
            assert isinstance(site, Site)
            site.reset_parameters()

    def start(self, embedding: Tensor) -> Any:
        """The state before the first sublayer, from the token embedding ``[*batch, dim]``."""
        return self.strategy.start(embedding)

    def read(self, state: Any, site: int | Site) -> Tensor:
        """The input of sublayer ``site`` before its norm, or of the final norm with `OUTPUT`.

        A site is given by its place, or itself: compiled code that looks a site up by number is made anew for each.
        """
        module = self.site(site)
        value = self.strategy.read(state, module)
        for listener in self._listeners:
            listener.on_read(module.index, state, value)
        return value

    def read_normed(self, state: Any, site: int | Site, norm_weight: Tensor, norm_eps: float) -> tuple[Tensor, Any]:
        """A read followed by the RMSNorm of the sublayer, ``[*batch, dim]``, and the state to go on with.

        The same as `read` and then the norm as Transformers' Llama rounds it: the read is rounded to the stream's
        dtype, normalised in float32, rounded, and multiplied by the weight. Without gradients and without listeners a
        strategy with fused kernels does both in one pass.

        Args:
            state: Of the model before sublayer ``site``.
            site: As of `read`.
            norm_weight: Weight of the norm, ``[dim]``.
            norm_eps: Eps of the norm.
        """
        module = self.site(site)
        if not self._listeners:
            return self.strategy.read_normed(state, module, norm_weight, norm_eps)
        return rms_norm(self.read(state, module), norm_weight, norm_eps), state

    def write(self, state: Any, site: int | Site, output: Tensor) -> Any:
        """The state after sublayer ``site`` put out ``output``; the given state stays as it is."""
        module = self.site(site)
        for listener in self._listeners:
            listener.on_write(module.index, state, output)
        return self.strategy.write(state, module, output)

    def depth_weights(self, state: Any, site: int | Site) -> Tensor:
        """Weights of the state's tensors in the read at a site, oldest source first.

        ``[*batch, sources]``; where a site has several views or weights differ between channels,
        ``[*batch, views, sources, channels]``.
        """
        weights = self.strategy.read_weights(state, self.site(site))
        batch = tensors(state)[0].shape[: -2 if isinstance(state, Streams) else -1]
        weights = weights.expand(*batch, *weights.shape[-3:])
        return weights[..., 0, :, 0] if weights.shape[-3] == weights.shape[-1] == 1 else weights

    def site(self, site: int | Site) -> Site:
        """The site at a place: 0 for the first sublayer's input, `OUTPUT` for the output read."""
        if isinstance(site, Site):
            return site
        module = self.sites[site]
        assert isinstance(module, Site)
        return module

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Let ``listener`` watch reads and writes inside a ``with`` block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def extra_repr(self) -> str:
        """Strategy and depth."""
        return f"{self.strategy}, num_sublayers={self.num_sublayers}"
