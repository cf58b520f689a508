"""The proof of an adapter: an original layer and its decomposition must agree on the same input.

A family's description consists of names, and Transformers changes under us. So conversion does not trust it: every kind
of layer in the model at hand is run both ways, before anything is replaced.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UnsupportedModelError
from attnres.models.families import Family
from attnres.models.layer import ResidualDecoderLayer
from attnres.models.modes import evaluating
from attnres.residual import PreNorm, Residual

PROOF_TOKENS = 8


def prove(base: Any, family: Family) -> float:
    """Check the decomposition of each kind of decoder layer, and return the largest relative difference seen.

    The model runs once, without gradients, on a random embedding of a few tokens. A model on the meta device has no
    values to compare; there the check passes by without a verdict.

    Raises:
        UnsupportedModelError: A layer and its decomposition differ by more than rounding.
    """
    if any(parameter.is_meta for parameter in base.parameters()):
        return 0.0
    worst = 0.0
    for index, (layer, arguments, expected) in _layer_calls(base).items():
        (hidden,), keywords = arguments
        split = ResidualDecoderLayer(layer, family, Residual(PreNorm(), 2, hidden.shape[-1]), index=0)
        with torch.no_grad(), evaluating(base):
            actual = split(hidden, **keywords).hidden
        difference = _relative_difference(actual, expected)
        allowed = 16 * torch.finfo(expected.dtype).eps
        if not difference <= allowed:  # also refuses NaN
            raise UnsupportedModelError(
                f"{family.name} layer {index} ({type(layer).__name__}) differs from its two sublayers by "
                f"{difference:.3g} relative; allowed is {allowed:.3g}. This version of Transformers is not supported"
            )
        worst = max(worst, difference)
    return worst


def _layer_calls(base: Any) -> dict[int, tuple[nn.Module, Any, Tensor]]:
    """Run the model and keep, for the first layer of each kind, the arguments it got and what it returned."""
    calls: dict[int, tuple[nn.Module, Any, Tensor]] = {}
    kinds: set[tuple[type, ...]] = set()
    handles = []
    for index, layer in enumerate(base.layers):
        kind = tuple(type(child) for child in layer.children())
        if kind in kinds:
            continue
        kinds.add(kind)

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Tensor, index: int = index) -> None:
            calls[index] = (module, (args, kwargs), output)

        handles.append(layer.register_forward_hook(keep, with_kwargs=True))
    try:
        with torch.no_grad(), evaluating(base):
            base(inputs_embeds=_random_embedding(base), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _random_embedding(base: Any) -> Tensor:
    weight = base.get_input_embeddings().weight
    generator = torch.Generator("cpu").manual_seed(0)
    embedding = torch.randn(1, PROOF_TOKENS, weight.shape[-1], generator=generator, device="cpu")
    return embedding.to(weight.device, weight.dtype)


def _relative_difference(actual: Tensor, expected: Tensor) -> float:
    scale = expected.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return ((actual.double() - expected.double()).abs().max() / scale).item()
