"""Strategies whose state has a fixed number of streams: one running tensor, or a few that are mixed at every write."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from attnres.ops.precision import without_autocast
from attnres.residual.schedule import Source
from attnres.residual.site import Site
from attnres.residual.state import RunningSum, Streams
from attnres.residual.strategy import Strategy

Gain = Tensor | float | None
"""A factor: None and 1 leave things as they are; a tensor ends in an axis of 1 or of the width."""


class SingleStream(Strategy):
    """Base of the strategies that carry one tensor: ``h = read_gain * x`` and ``x <- keep * x + gain * v``.

    A derived class gives the three factors, which may depend on the stream and on the output.
    """

    def site(self, index: int, num_sublayers: int, dim: int, *, eps: float, device: Any, dtype: Any) -> Site:
        """A site without parameters."""
        del index, num_sublayers, dim, eps, device, dtype
        return Site()

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """One tensor: a weighted sum of everything so far."""
        del num_sublayers
        return (Source(embedding=True, first=0, stop=site),)

    def read_gain(self, hidden: Tensor, site: Site) -> Gain:
        """Factor of the stream in the read."""
        del hidden, site
        return None

    def keep(self, hidden: Tensor, site: Site) -> Gain:
        """Factor of the stream in the next."""
        del hidden, site
        return None

    def gain(self, hidden: Tensor, site: Site, output: Tensor) -> Gain:
        """Factor of the output in the next stream."""
        del hidden, site, output
        return None

    def start(self, embedding: Tensor) -> RunningSum:
        """The embedding is the stream."""
        return RunningSum(embedding)

    def read(self, state: RunningSum, site: Site) -> Tensor:
        """``read_gain * x``."""
        return scaled(state.hidden, self.read_gain(state.hidden, site))

    def write(self, state: RunningSum, site: Site, output: Tensor) -> RunningSum:
        """``keep * x + gain * v``."""
        hidden = state.hidden
        kept = scaled(hidden, self.keep(hidden, site))
        return RunningSum(kept + scaled(output, self.gain(hidden, site, output)))

    def read_weights(self, state: RunningSum, site: Site) -> Tensor:
        """The read's factor."""
        return _as_tensor(self.read_gain(state.hidden, site), state.hidden)[..., None, None, :]

    def write_weights(self, state: RunningSum, site: Site, output: Tensor) -> Tensor:
        """The two factors of a write."""
        keep = _as_tensor(self.keep(state.hidden, site), state.hidden)
        gain = _as_tensor(self.gain(state.hidden, site, output), state.hidden)
        keep, gain = torch.broadcast_tensors(keep, gain)
        return torch.stack([keep, gain], dim=-2)[..., None, :, :]


class MultiStream(Strategy):
    """Base of the strategies that carry m streams: ``h = pre^T X`` and ``X <- res X + post v^T``, X of m rows.

    A derived class gives ``pre`` for a read, and ``res`` and ``post`` for a write, from the streams
    ``[*batch, m, dim]``, each in float32 (float64 for float64 streams).
    """

    @property
    @abstractmethod
    def num_streams(self) -> int:
        """How many streams there are."""

    @abstractmethod
    def pre(self, streams: Tensor, site: Site) -> Tensor:
        """Weights ``[*batch, m]`` of the streams in the read."""

    @abstractmethod
    def res_post(self, streams: Tensor, site: Site, output: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the streams ``[*batch, m, m]``, old ones last, and of the output ``[*batch, m]`` in the next."""

    def sources(self, site: int, num_sublayers: int) -> tuple[Source, ...]:
        """Every stream is a weighted sum of everything so far."""
        del num_sublayers
        return (Source(embedding=True, first=0, stop=site),) * self.num_streams

    def start(self, embedding: Tensor) -> Streams:
        """The embedding in every stream."""
        return Streams(embedding.unsqueeze(-2).repeat_interleave(self.num_streams, -2))

    def read(self, state: Streams, site: Site) -> Tensor:
        """``pre^T X``."""
        streams = state.hidden
        wide = streams.to(_wide(streams))
        with without_autocast(streams):
            mixed = (self.pre(streams, site).to(wide.dtype)[..., None, :] @ wide).squeeze(-2)
        return mixed.to(streams.dtype)

    def write(self, state: Streams, site: Site, output: Tensor) -> Streams:
        """``res X + post v^T``."""
        streams = state.hidden
        wide = streams.to(_wide(streams))
        with without_autocast(streams):
            res, post = self.res_post(streams, site, output)
            kept = res.to(wide.dtype) @ wide
            added = post.to(wide.dtype)[..., None] * output.to(wide.dtype)[..., None, :]
        return Streams((kept + added).to(streams.dtype))

    def read_weights(self, state: Streams, site: Site) -> Tensor:
        """``pre``."""
        return self.pre(state.hidden, site)[..., None, :, None]

    def write_weights(self, state: Streams, site: Site, output: Tensor) -> Tensor:
        """``res`` and ``post`` beside each other."""
        res, post = self.res_post(state.hidden, site, output)
        batch = torch.broadcast_shapes(res.shape[:-2], post.shape[:-1])
        parts = [res.expand(*batch, *res.shape[-2:]), post.expand(*batch, -1)[..., None]]
        return torch.cat(parts, dim=-1)[..., None]


def scaled(value: Tensor, gain: Gain) -> Tensor:
    """``gain * value`` in float32 (float64 for float64 values), rounded once to the dtype of the value."""
    if gain is None:
        return value
    if isinstance(gain, float | int):
        return value * gain
    return (value.to(_wide(value)) * gain.to(_wide(value))).to(value.dtype)


def _as_tensor(gain: Gain, like: Tensor) -> Tensor:
    if isinstance(gain, Tensor):
        return gain.to(_wide(like))
    return torch.full((1,), 1.0 if gain is None else gain, dtype=_wide(like), device=like.device)


def _wide(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)
