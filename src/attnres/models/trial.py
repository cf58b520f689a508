"""Running a decoder once, to look at its layers: what discovery and proof have in common."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnres.models.modes import evaluating

TOKENS = 8


def try_out(base: Any) -> Tensor:
    """Run a model without head on a random embedding of a few tokens, without gradients, and return what it returns."""
    weight = base.get_input_embeddings().weight
    generator = torch.Generator("cpu").manual_seed(0)
    embedding = torch.randn(1, TOKENS, weight.shape[-1], generator=generator, device="cpu")
    with torch.no_grad(), evaluating(base):
        return base(inputs_embeds=embedding.to(weight.device, weight.dtype), use_cache=False)[0]


def one_of_each_kind(layers: nn.ModuleList) -> Iterator[tuple[int, nn.Module]]:
    """The first layer of each kind, by the classes of the layer and its children, with its index."""
    kinds: set[tuple[type, ...]] = set()
    for index, layer in enumerate(layers):
        kind = (type(layer), *(type(child) for child in layer.children()))
        if kind not in kinds:
            kinds.add(kind)
            yield index, layer


def first_tensor(output: Any) -> Any:
    """What a module returns, or the first of several things."""
    return output[0] if isinstance(output, tuple) else output
