"""Which widths of a model its tensor ranks have to divide, and whether they do.

Heads go to ranks whole, and an MLP is cut along its inner width. Key and value heads may be fewer than ranks, several
of which then have the same head; experts may be handed out whole instead of being cut.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from attnres.errors import ConfigError
from attnres.models.families import Family

GATHERED = "colwise_gather_output"
"""Word of Transformers' plans for a projection that every rank has the whole output of."""


@dataclass(frozen=True, kw_only=True)
class Width:
    """One width that is shared among tensor ranks."""

    name: str
    """For people."""
    size: int
    """The width, or number of heads."""
    may_repeat: bool = False
    """Whether a multiple of so many ranks fits as well."""
    experts: int | None = None
    """Number of experts of this width, which ranks may divide instead of it."""

    def fits(self, ranks: int) -> bool:
        """Whether a number of ranks can share it.

        Examples:
            >>> heads = Width(name="num_key_value_heads", size=8, may_repeat=True)
            >>> [ranks for ranks in range(1, 33) if heads.fits(ranks)]
            [1, 2, 4, 8, 16, 24, 32]
        """
        whole = self.experts is not None and self.experts % ranks == 0
        return self.size % ranks == 0 or whole or self.repeats(ranks)

    def repeats(self, ranks: int) -> bool:
        """Whether so many ranks have some of it several times."""
        return self.may_repeat and ranks > self.size and ranks % self.size == 0

    def __str__(self) -> str:
        of_experts = "" if self.experts is None else f" (and the number of experts {self.experts})"
        return f"{self.name} is {self.size}{of_experts}"


def check_tensor_ranks(widths: Sequence[Width], ranks: int) -> None:
    """Raise unless tensor ranks can share every width.

    Args:
        widths: From `tensor_widths`; none where a model is not known well enough.
        ranks: Tensor ranks T.

    Raises:
        ConfigError: They cannot; the message has the numbers of ranks that could.
    """
    for width in widths:
        if not width.fits(ranks):
            most = max(max(width.size, width.experts or 0) for width in widths)
            fitting = [count for count in range(1, most + 1) if all(width.fits(count) for width in widths)]
            raise ConfigError(
                f"{width}, which {ranks} tensor ranks do not divide; allowed here: {', '.join(map(str, fitting))}"
            )


def tensor_widths(base: Any, family: Family) -> tuple[Width, ...]:
    """The widths of a decoder that tensor ranks have to divide, each once.

    Args:
        base: A model without head, on any device.
        family: How its layers are decomposed.
    """
    found: dict[Width, None] = {}
    for index, layer in enumerate(getattr(base, family.layers)):
        attention, mlp = getattr(layer, family.attention.module), getattr(layer, family.mlp.module)
        found |= dict.fromkeys(_of_attention(base.config, index, attention, f"layers.*.{family.attention.module}."))
        found |= dict.fromkeys(_of_mlp(mlp, base.get_input_embeddings().weight.shape[-1]))
    return tuple(found)


def attention_kind(config: Any, layer: int) -> str:
    """What kind of attention a layer has.

    Raises:
        ConfigError: One whose operations are not counted here.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    is_kda = kinds[layer] == "linear_attention" and hasattr(config, "linear_head_dim")
    if is_kda or kinds[layer] in ("full_attention", "sliding_attention"):
        return kinds[layer]
    raise ConfigError(
        f"layer {layer} has the attention {kinds[layer]!r}; allowed: full and sliding attention, Kimi Delta Attention"
    )


def _of_attention(config: Any, index: int, module: nn.Module, place: str) -> Iterator[Width]:
    plan = getattr(config, "base_model_tp_plan", None) or {}
    words = {name.removeprefix(place): word for name, word in plan.items() if name.startswith(place)}
    columns = {word for word in words.values() if word.startswith("colwise")}
    if attention_kind(config, index) == "linear_attention":
        yield Width(name="linear_num_heads", size=config.linear_num_heads)
    elif columns == {GATHERED}:
        yield from _of_gathered(module, words.items())
    else:
        heads = config.num_attention_heads
        yield Width(name="num_attention_heads", size=heads)
        grouped = getattr(config, "num_key_value_heads", None) or heads
        if grouped < heads and not getattr(config, "kv_lora_rank", None):  # all heads share a latent
            yield Width(name="num_key_value_heads", size=grouped, may_repeat=True)


def _of_gathered(attention: nn.Module, words: Iterable[tuple[str, str]]) -> Iterator[Width]:
    """Of an attention whose projections are cut anywhere, as every rank has their whole outputs."""
    for name, word in words:
        module, side = attention.get_submodule(name), "out" if word == GATHERED else "in"
        if isinstance(module, nn.Linear):
            yield Width(name=f"{name}.{side}_features", size=getattr(module, f"{side}_features"))


def _of_mlp(mlp: nn.Module, dim: int) -> Iterator[Width]:
    """The inner widths: what its last matrices, and those of its experts, take."""
    for name, module in mlp.named_modules():
        within = type(mlp.get_submodule(name.rpartition(".")[0])).__name__
        if isinstance(module, nn.Linear) and module.out_features == dim:
            yield Width(name=f"inner width of {within}", size=module.in_features)
        elif isinstance(module, Conv1D) and module.nf == dim:
            yield Width(name=f"inner width of {within}", size=module.weight.shape[0])
        stacks = [p.shape for p in module.parameters(recurse=False) if p.ndim == 3 and p.shape[1] == dim]
        if stacks:
            experts, _, inner = min(stacks, key=lambda shape: shape[2])
            yield Width(name=f"inner width of {type(module).__name__}", size=inner, experts=experts)
