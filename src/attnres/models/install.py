"""Put a residual path into a decoder, in place, and take it out again."""

from typing import Any

from torch import nn

from attnres.errors import UnsupportedModelError
from attnres.models.attention import adapt_attention, check_attention
from attnres.models.families import Family, check_children, plain_norms
from attnres.models.layer import ResidualDecoderLayer, read_before, read_no_more
from attnres.models.norms import norm_eps
from attnres.residual import Residual, Strategy


def make_residual(base: Any, family: Family, strategy: Strategy) -> Residual:
    """The residual path of a decoder that still has its own layers, checked against them.

    Args:
        base: A model without head.
        family: How its layers are decomposed.
        strategy: With its read scale settled.

    Raises:
        ConfigError: The strategy does not fit the depth or the width.
        UnsupportedModelError: The layers have parts that the family does not describe, or lack what the strategy needs.
    """
    layers, norm = getattr(base, family.layers), getattr(base, family.norm)
    check_children(layers, family)
    sites = sum(family.sublayers(layer) for layer in layers)
    norms = plain_norms(layers, family)
    moved = any(strategy.takes_norm(site, sites) for site in range(sites))
    if moved and not norms:
        raise UnsupportedModelError(
            f"{strategy.label} moves the norm before each sublayer, but not every sublayer of {family.name} is a norm "
            "and a module; allowed are families whose sublayers are, such as Llama and Qwen3"
        )
    weight = next(iter(norm.parameters()), base.get_input_embeddings().weight)
    residual = Residual(
        strategy,
        sites,
        base.get_input_embeddings().weight.shape[-1],
        eps=norm_eps(norm, default=1e-6),
        norms=norms,
        device=weight.device,
        dtype=weight.dtype,
    )
    for layer, first in zip(layers, _first_sites(layers, family), strict=True):
        check_attention(residual.site(first), layer, family)
    return residual


def install(base: Any, family: Family, strategy: Strategy) -> None:
    """Replace a decoder's layers by ones that read and write a residual state, in place, sharing all weights.

    Raises:
        ConfigError, UnsupportedModelError: As `make_residual`; the decoder is unchanged then.
    """
    put_in(base, family, make_residual(base, family, strategy))


def put_in(base: Any, family: Family, residual: Residual) -> None:
    """The second half of `install`, once the residual path is made."""
    layers = getattr(base, family.layers)
    firsts = _first_sites(layers, family)
    replaced = [
        ResidualDecoderLayer(layer, family, residual, at, base) for layer, at in zip(layers, firsts, strict=True)
    ]
    setattr(base, family.layers, nn.ModuleList(replaced))
    base.residual = residual
    # first in order, so that a device map filled in order keeps it on a device: it is small, and every layer reads it
    base._modules = {"residual": residual, **base._modules}
    for layer, first in zip(replaced, firsts, strict=True):
        adapt_attention(residual.site(first), layer, family)
    read_before(getattr(base, family.norm), base)


def take_out(base: Any) -> None:
    """Give a decoder its own layers back, with the weights that they have by now.

    Raises:
        UnsupportedModelError: The strategy has a part in the attention (HybridNorm, or a read for each projection).
    """
    family = family_of_converted(base)
    layers = getattr(base, family.layers)
    sites = base.residual.sites
    if any(site.views > 1 or site.takes_norm for site in sites):
        raise UnsupportedModelError(
            f"{base.residual.strategy.label} changes the sublayers themselves; a plain model cannot be taken out of it"
        )
    setattr(base, family.layers, nn.ModuleList(layer.original() for layer in layers))
    read_no_more(getattr(base, family.norm))
    del base.residual


def family_of_converted(base: Any) -> Family:
    """How the layers of a converted decoder are decomposed."""
    for child in base.children():
        if isinstance(child, nn.ModuleList) and len(child) and hasattr(child[0], "family"):
            layer: Any = child[0]
            return layer.family
    raise UnsupportedModelError(f"{type(base).__name__} has no converted layers")


def _first_sites(layers: nn.ModuleList, family: Family) -> list[int]:
    """For each layer, the index of the site where it reads first."""
    firsts, site = [], 0
    for layer in layers:
        firsts.append(site)
        site += family.sublayers(layer)
    return firsts
