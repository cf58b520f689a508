"""What in a model notices the scale of a read.

With ``read_scale="sum"`` a converted model's reads are the residual sums, and nothing can notice. With ``"mean"``, the
paper's form, each is divided by its number of sources. A scale-free norm takes that out again, up to its eps; a
sublayer or a head that reads without a norm does not.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from attnres.errors import UnsupportedModelError
from attnres.models.families import Family
from attnres.models.norms import norm_eps
from attnres.residual import Strategy


@dataclass(frozen=True, kw_only=True)
class ScaleReport:
    """Which reads of a model are not followed by a norm, and the eps of those that are."""

    without_norm: tuple[str, ...]
    """Parts that read without a norm, such as ``layers.0.self_attn``; they get another input with ``"mean"``."""
    eps: tuple[tuple[str, float], ...]
    """Norms that follow a read, by name, with their eps. A read that is n times smaller counts it n^2 times as much:
    relative error ``(n^2 - 1) eps / (2 ms)`` for a residual sum of mean square ms."""

    @property
    def is_scale_free(self) -> bool:
        """Whether every read goes through a norm."""
        return not self.without_norm


def scale_report(base: Any, family: Family) -> ScaleReport:
    """Look at what follows each read of a decoder that still has its own layers, or has converted ones."""
    without, eps = [], []
    for index, layer in enumerate(getattr(base, family.layers)):
        for parts in (family.attention, family.mlp):
            place = f"{family.layers}.{index}"
            if parts.norm is None:
                without.append(f"{place}.{parts.module}")
            else:
                eps.append((f"{place}.{parts.norm}", norm_eps(getattr(layer, parts.norm), default=0.0)))
    final = getattr(base, family.norm)
    if isinstance(final, nn.Identity):
        without.append("the head")
    else:
        eps.append((family.norm, norm_eps(final, default=0.0)))
    return ScaleReport(without_norm=tuple(without), eps=tuple(eps))


def check_scale(base: Any, family: Family, strategy: Strategy) -> None:
    """Refuse reads that are means where something would notice.

    Raises:
        UnsupportedModelError: With the parts that read without a norm.
    """
    if getattr(strategy, "read_scale", None) != "mean":
        return
    without = scale_report(base, family).without_norm
    if without:
        shown = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        raise UnsupportedModelError(
            f'read_scale is "mean", but parts of this {family.name} model read without a norm and would get another '
            f'input ({shown}); allowed is "sum", or allow_change=True'
        )
