"""The mixing matrix: each read as a weighted sum of the embedding and the sublayer outputs (paper, section 6)."""

from typing import Any

import torch
from torch import Tensor, nn

from attnres.residual import Residual


class MixingListener:
    """Collects a row of the mixing matrix at each read."""

    def __init__(self, residual: Residual):
        self.residual = residual
        self.rows: list[Tensor] = []

    def on_read(self, site: int, state: Any, value: Tensor) -> None:
        """Spread the depth weights of this read over the outputs that each source is the sum of."""
        del value
        residual = self.residual
        weights = residual.depth_weights(state, site).detach()
        row = weights.new_zeros(*weights.shape[:-1], residual.num_sublayers + 1)
        for index, source in enumerate(residual.strategy.sources(site, residual.num_sublayers)):
            if source.embedding:
                row[..., 0] = weights[..., index]
            row[..., source.first + 1 : source.stop + 1] = weights[..., index, None]
        self.rows.append(row)

    def on_write(self, site: int, state: Any, output: Tensor) -> None:
        """Nothing to do."""

    def matrix(self) -> Tensor:
        """``[*batch, sites, sources]``, in the working dtype of the reads."""
        return torch.stack(self.rows, dim=-2)


def mixing_matrix(model: nn.Module, input_ids: Tensor) -> Tensor:
    """The mixing matrix of every token.

    ``h_site = sum_i M[site, i] * v_i`` with ``v_0`` the embedding and ``v_i`` the output of the i-th sublayer. Row
    ``num_sublayers`` is the output read. A block's weight stands at each of its sublayers. Entries above the diagonal
    are zero.

    Args:
        model: A converted model.
        input_ids: Token ids ``[batch, tokens]``.

    Returns:
        ``[batch, tokens, num_sublayers + 1, num_sublayers + 1]``.
    """
    residual = residual_of(model)
    listener = MixingListener(residual)
    with torch.no_grad(), residual.listen(listener):
        model(input_ids=input_ids, use_cache=False)
    return listener.matrix()


def residual_of(model: Any) -> Residual:
    """The residual path of a converted model, with or without its head."""
    return model.base_model.residual
