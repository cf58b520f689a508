"""The mixing matrix: each read as a weighted sum of the embedding and the sublayer outputs (paper, section 6)."""

from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import ConfigError
from attnres.models.modes import evaluating
from attnres.residual import Residual, Streams
from attnres.residual.state import tensors


class MixingListener:
    """Collects a row of the mixing matrix at each read.

    It keeps what each tensor of the state is made of, ``[*batch, tensors, sources, channels]``, and carries that along
    by the strategy's own weights: a read takes a weighted sum of it, a write replaces it.
    """

    def __init__(self, residual: Residual):
        self.residual = residual
        self.rows: list[Tensor] = []
        self._content: Tensor | None = None

    def on_read(self, site: int, state: Any, value: Tensor) -> None:
        """Spread the weights of this read over what the state's tensors are made of."""
        del value
        weights = self.residual.strategy.read_weights(state, self.residual.site(site)).detach()
        self.rows.append(_product(weights, self._contents(state, weights.dtype)))

    def on_write(self, site: int, state: Any, output: Tensor) -> None:
        """Follow the write with what the state's tensors are made of."""
        weights = self.residual.strategy.write_weights(state, self.residual.site(site), output).detach()
        content = self._contents(state, weights.dtype)
        added = content.new_zeros(*content.shape[:-3], 1, *content.shape[-2:])
        added[..., site + 1, :] = 1
        self._content = _product(weights, torch.cat([content, added], dim=-3))

    def matrix(self, view: int = 0) -> Tensor:
        """``[*batch, sites, sources, channels]``, in the working dtype of the reads."""
        rows = [row[..., min(view, row.shape[-3] - 1), :, :] for row in self.rows]
        shape = torch.broadcast_shapes(*(row.shape for row in rows))
        return torch.stack([row.expand(shape) for row in rows], dim=-3)

    def _contents(self, state: Any, dtype: torch.dtype) -> Tensor:
        """At the start every tensor of the state is the embedding."""
        if self._content is None:
            first = tensors(state)[0]
            streams = first.shape[-2] if isinstance(state, Streams) else self.residual.strategy.tensors_at_start
            batch = first.shape[: -2 if isinstance(state, Streams) else -1]
            self._content = first.new_zeros(*batch, streams, self.residual.num_sublayers + 1, 1, dtype=dtype)
            self._content[..., 0, :] = 1
        return self._content


def _product(weights: Tensor, content: Tensor) -> Tensor:
    """``[.., rows, tensors, channels]`` times ``[.., tensors, sources, channels]``, channel by channel."""
    product = weights.movedim(-1, -3) @ content.movedim(-1, -3).to(weights.dtype)
    return product.movedim(-3, -1)


def mixing_matrix(model: nn.Module, input_ids: Tensor, *, view: int = 0) -> Tensor:
    """The mixing matrix of every token, whatever the strategy.

    ``h_site = sum_i M[site, i] * v_i`` with ``v_0`` the embedding and ``v_i`` the output of the i-th sublayer, or what
    the strategy writes in its place (`Strategy.source_of`; it differs for `ProjectedResidual` only). Row
    ``num_sublayers`` is the output read. A block's weight stands at each of its sublayers. Entries above the diagonal
    are zero. For a method with several streams it is the product of its maps (paper, section 6).

    Args:
        model: A converted model.
        input_ids: Token ids ``[batch, tokens]``.
        view: Which read, at sites that have several: 0 the query's, 1 the key's, 2 the value's.

    Returns:
        ``[batch, tokens, num_sublayers + 1, num_sublayers + 1]``; where weights differ between channels,
        ``[batch, tokens, num_sublayers + 1, num_sublayers + 1, channels]``, with as many channels as there are groups,
        or the width.

    Raises:
        ConfigError: No site has such a view.
    """
    residual = residual_of(model)
    most = max(residual.site(index).views for index in range(residual.num_sublayers))
    if view not in range(most):
        raise ConfigError(f"view is {view}; allowed is 0 to {most - 1}, the reads that a site of this model has")
    listener = MixingListener(residual)
    with evaluating(model), torch.no_grad(), residual.listen(listener):
        model(input_ids=input_ids, use_cache=False)
    matrix = listener.matrix(view)
    return matrix[..., 0] if matrix.shape[-1] == 1 else matrix


def residual_of(model: Any) -> Residual:
    """The residual path of a converted model, with or without its head."""
    return model.base_model.residual
