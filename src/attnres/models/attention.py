"""Attention sublayers that take several reads: one each for the query, key and value projections.

The sublayer stays Transformers' own. Its input is the reads side by side, ``[B, T, 3 D]``, and a hook before each
projection takes the part that is meant for it.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from attnres.errors import UnsupportedModelError
from attnres.models.families import Family
from attnres.residual import Site

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def adapt_attention(site: Site, layer: nn.Module, family: Family) -> None:
    """Give the projections of a layer's attention their own parts of the read, where the site has several.

    Raises:
        UnsupportedModelError: The attention has no separate query, key and value projections.
    """
    if site.views == 1:
        return
    for index, projection in enumerate(projections(layer, family)):
        projection.register_forward_pre_hook(partial(_take_part, index=index, parts=len(PROJECTIONS)))


def projections(layer: nn.Module, family: Family) -> list[nn.Module]:
    """The query, key and value projections of a layer's attention.

    Raises:
        UnsupportedModelError: There are none.
    """
    attention: Any = getattr(layer, family.attention)
    named = [getattr(attention, name, None) for name in PROJECTIONS]
    found: list[nn.Module] = [module for module in named if isinstance(module, nn.Linear)]
    if len(found) < len(named):
        raise UnsupportedModelError(
            f"{family.name} attention ({type(attention).__name__}) has no separate {', '.join(PROJECTIONS)}, "
            "which this strategy needs; allowed are families that have them, such as Llama and Qwen3"
        )
    return found


def _take_part(module: nn.Module, arguments: tuple[Tensor, ...], *, index: int, parts: int) -> tuple[Tensor]:
    del module
    (value,) = arguments
    return (value.unflatten(-1, (parts, -1))[..., index, :],)
