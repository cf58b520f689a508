"""Attention sublayers whose projections a strategy has a part in: what they read, or how they are normalised.

The sublayer stays Transformers' own. Where query, key and value each have their own read, its input is the reads side
by side, ``[B, T, 3 D]``, and a hook before each projection takes the part that is meant for it. Where projections are
normalised (HybridNorm), a hook behind each does that.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from attnres.errors import UnsupportedModelError
from attnres.models.families import Family
from attnres.residual import Site
from attnres.residual.rivals.hybrid_norm import ProjectionNormSite

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
OUTPUT_AND_NORMS = ("o_proj", "q_norm", "k_norm", "sinks")
"""What an attention may have besides its projections that does not read the sublayer's input."""


def adapt_attention(site: Site, layer: nn.Module, family: Family) -> None:
    """Give the projections of a layer's attention their own parts of the read, or their norms, where the site has any.

    Raises:
        UnsupportedModelError: The attention has no separate query, key and value projections.
    """
    if site.views > 1:
        for index, projection in enumerate(projections(layer, family)):
            projection.register_forward_pre_hook(partial(_take_part, index=index, parts=len(PROJECTIONS)))
    if isinstance(site, ProjectionNormSite):
        _normalize_projections(site, layer, family)


def check_attention(site: Site, layer: nn.Module, family: Family) -> None:
    """Refuse an attention that `adapt_attention` could not adapt, before anything is changed.

    Raises:
        UnsupportedModelError: The attention has no separate query, key and value projections, and the site needs them.
    """
    if site.views > 1 or isinstance(site, ProjectionNormSite):
        if family.is_parallel(layer):
            raise UnsupportedModelError(
                f"{family.name} runs attention and MLP side by side, from one read, but this strategy reads for query, "
                "key and value apart; allowed are families that run them in turn, such as Llama and Qwen3"
            )
        projections(layer, family)


def _normalize_projections(site: ProjectionNormSite, layer: nn.Module, family: Family) -> None:
    """Put a norm behind each projection, and freeze the norm before the attention if that is not applied any more.

    Where the attention has a norm for a projection already (Qwen3: queries and keys), that one serves.
    """
    attention: Any = getattr(layer, family.attention.module)
    for name, projection in zip(PROJECTIONS, projections(layer, family), strict=True):
        if not hasattr(attention, name.replace("_proj", "_norm")):
            site.add_norm(name, attention.head_dim)
            projection.register_forward_hook(partial(_normalize, site=site, name=name))
    if site.takes_norm:
        getattr(layer, str(family.attention.norm)).weight.requires_grad_(False)


def projections(layer: nn.Module, family: Family) -> list[nn.Module]:
    """The query, key and value projections of a layer's attention.

    Raises:
        UnsupportedModelError: There are none.
    """
    attention: Any = getattr(layer, family.attention.module)
    named = [getattr(attention, name, None) for name in PROJECTIONS]
    found: list[nn.Module] = [module for module in named if isinstance(module, nn.Linear)]
    others = {name.split(".")[0] for name, _ in attention.named_parameters()} - {*PROJECTIONS, *OUTPUT_AND_NORMS}
    if len(found) < len(named) or others:  # what else reads the input, such as gates, would get all parts of it
        raise UnsupportedModelError(
            f"{family.name} attention ({type(attention).__name__}) is not just {', '.join(PROJECTIONS)} and an output, "
            "which this strategy needs; allowed are families that have them, such as Llama and Qwen3"
        )
    return found


def _take_part(module: nn.Module, arguments: tuple[Tensor, ...], *, index: int, parts: int) -> tuple[Tensor]:
    del module
    (value,) = arguments
    return (value.unflatten(-1, (parts, -1))[..., index, :],)


def _normalize(
    module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor, *, site: ProjectionNormSite, name: str
) -> Tensor:
    del module, arguments
    return site.normalize(name, output)
