"""What a trained model does along its depth: magnitudes of outputs, reads and gradients, and the mixing matrix.

One forward and backward pass over a few sequences, in the parameters' own precision, watched through the residual's
listeners. The numbers go to ``depth.json`` of a run folder, from which every figure is drawn.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnres.analysis.mixing import MixingListener, residual_of
from attnres.models.modes import evaluating


@dataclass(frozen=True, kw_only=True)
class DepthProbe:
    """Measured along depth, averaged over tokens. RMS is the root of the mean square over tokens and width."""

    num_sublayers: int
    sublayers: list[str]
    """``"attention"`` or ``"mlp"`` for each sublayer."""
    tokens: int
    """Tokens measured."""
    output_magnitude: list[float]
    """RMS of each sublayer's output."""
    input_magnitude: list[float]
    """RMS of each read, before the norm; the last is the output read."""
    gradient_magnitude: list[float]
    """RMS of the gradient of the mean token loss with respect to each sublayer's output."""
    mixing_matrix: list[list[float]]
    """Row = site (last: output read); column 0 = embedding, column i = output of the i-th sublayer. Averaged over
    channels too, where weights differ between them; of a site with several reads, the query's."""
    block_ends: list[int]
    """Sublayer counts at which a block is complete; empty for a strategy without blocks."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Magnitudes:
    def __init__(self) -> None:
        self.reads: list[float] = []
        self.outputs: list[Tensor] = []

    def on_read(self, site: int, state: Any, value: Tensor) -> None:
        del site, state
        self.reads.append(_rms(value))

    def on_write(self, site: int, state: Any, output: Tensor) -> None:
        del site, state
        self.outputs.append(output)


def probe(model: nn.Module, input_ids: Tensor, targets: Tensor) -> DepthProbe:
    """Measure a converted model on a batch.

    Args:
        model: A converted model; it is evaluated, its gradients are left alone.
        input_ids: Token ids ``[batch, tokens]``.
        targets: The next token of each, ``[batch, tokens]``.

    Returns:
        The measurements, averaged over all tokens of the batch.
    """
    residual = residual_of(model)
    magnitudes, mixing = _Magnitudes(), MixingListener(residual)
    with (
        evaluating(model),
        torch.enable_grad(),
        _watched_from_the_start(model),
        residual.listen(magnitudes),
        residual.listen(mixing),
    ):
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
        gradients = torch.autograd.grad(loss, magnitudes.outputs)
    depth = residual.num_sublayers
    return DepthProbe(
        num_sublayers=depth,
        sublayers=["attention", "mlp"] * (depth // 2),
        tokens=input_ids.numel(),
        output_magnitude=[_rms(output) for output in magnitudes.outputs],
        input_magnitude=magnitudes.reads,
        gradient_magnitude=[_rms(gradient) for gradient in gradients],
        mixing_matrix=mixing.matrix().double().mean(-1).flatten(0, -3).mean(0).tolist(),
        block_ends=list(residual.strategy.block_ends(depth)),
    )


@contextmanager
def _watched_from_the_start(model: Any) -> Iterator[None]:
    """Let every sublayer output have a gradient, also in a model whose weights are frozen."""
    weight = model.get_input_embeddings().weight
    before = weight.requires_grad
    weight.requires_grad_(True)
    try:
        yield
    finally:
        weight.requires_grad_(before)


def _rms(value: Tensor) -> float:
    return value.detach().double().square().mean().sqrt().item()
