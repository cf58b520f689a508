"""Tensor parallelism with the tokens divided between sublayers: one decoder, in place, over one dimension of a mesh.

The weights of attention and MLP are cut by PyTorch's own `ColwiseParallel` and `RowwiseParallel`, which of them how by
the model's own plan in Transformers. The sum of the row-parallel outputs is handed out by tokens; update of the partial
sum, depth attention (the merge of phase 2 included) and the sublayer's norm run on the rank's own tokens; then all
tokens are put together before the next column-parallel weights (paper, section 4.2). So the sources of a token are on
one rank only, a part ``1 / ranks`` of them on each, and nothing of the work between sublayers is done twice.
The hooks that do it are in `attnres.parallel.tokens`.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from attnres.errors import ConfigError, UnsupportedModelError
from attnres.models.convert import converted_base
from attnres.models.families import Family
from attnres.models.install import family_of_converted
from attnres.parallel.agreement import Round, settled
from attnres.parallel.clipping import clip_gradients
from attnres.parallel.part import Elsewhere
from attnres.parallel.sequence import TOKENS, ReplicatedGradients, own_part
from attnres.parallel.tokens import DividedTokens, Logits
from attnres.residual.rivals.hybrid_norm import ProjectionNormSite

SPLIT_HEADS, WHOLE_HEADS = "colwise", "colwise_gather_output"
ROWS = ("rowwise", "rowwise_split_input")
PART_OF_GRADIENT = "replicated_with_grad_allreduce"
STYLES = (SPLIT_HEADS, WHOLE_HEADS, *ROWS, PART_OF_GRADIENT)
"""Words of Transformers' plans that are understood between a read and a write."""


@dataclass(frozen=True, kw_only=True)
class _Sublayer:
    """One attention or MLP with the words of the plan for its modules."""

    name: str
    module: nn.Module
    is_attention: bool
    styles: Mapping[str, str]
    """By full name of a module with parameters, those that the plan names."""
    unnamed: tuple[str, ...]
    """Modules with parameters that the plan does not name."""

    @property
    def rows(self) -> list[str]:
        """Full names of the row-parallel projections."""
        return [name for name, style in self.styles.items() if style in ROWS]

    @property
    def keeps_whole(self) -> bool:
        """Whether every rank computes all of what is between the projections (norms on queries over all heads, say)."""
        columns = [style for style in self.styles.values() if style.startswith("colwise")]
        return all(style == WHOLE_HEADS for style in columns)


class TensorParallel:
    """A parallelized model's handle: own tokens, and what is to be done between backward and optimizer step.

    `parallelize` makes it. A `Pipeline` of the model narrows it to the parameters that its rank keeps.
    """

    def __init__(self, model: Any, mesh: DeviceMesh, gradients: ReplicatedGradients, tokens: DividedTokens):
        self.mesh, self.tokens = mesh, tokens
        self.modules: list[nn.Module] = [model]
        """What this rank has of the model."""
        self.stages: dist.ProcessGroup | None = None
        """Ranks that have the other stages of a pipeline."""
        self._counted_elsewhere: frozenset[str] = frozenset()
        self.gradients = gradients
        """Of the replicated parameters that see own tokens or own heads only."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorParallel":
        """The parts of a model share its handle."""
        del memo
        return self

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share tokens and weights."""
        return self.mesh.get_group()

    def own(self, value: Tensor, dim: int = TOKENS) -> Tensor:
        """The rank's own tokens of a tensor with all of them along ``dim``, such as labels."""
        return own_part(value, self.group, dim)

    def narrow(
        self, modules: Sequence[nn.Module], stages: dist.ProcessGroup, counted_elsewhere: frozenset[str] = frozenset()
    ) -> None:
        """From now on, look after the parameters of some parts of the model only.

        Args:
            modules: The parts; parameters are the model's own.
            stages: The ranks that have the others.
            counted_elsewhere: Names of parameters here that an earlier stage has as well.
        """
        self.modules, self.stages, self._counted_elsewhere = list(modules), stages, counted_elsewhere
        self.gradients.narrow(modules)

    def sum_gradients(self) -> None:
        """Complete the gradients after the last backward pass of a step; asked again, it does nothing.

        Every rank has to call it. It comes before clipping and before the step.
        """
        self.gradients.sum()

    def before_each_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer complete the gradients before each step, for loops that have nothing to do in between."""
        self.gradients.before_each_step(optimizer)

    def optimizer_groups(self, groups: Iterable[Any] | None = None) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer that takes a group in one pass (``foreach`` or ``fused``).

        PyTorch refuses a pass over divided and whole parameters together, so each group becomes one of each kind.

        Args:
            groups: As an optimizer takes them: parameters, pairs of name and parameter, or groups of these with
                settings. None: all that learn.
        """
        every = (parameter for _, parameter in self._parameters() if parameter.requires_grad)
        given: list[Any] = list(every if groups is None else groups)
        found: list[dict[str, Any]] = []
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        for group in groups:
            members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            for kind in (False, True):
                chosen = [member for member in members if isinstance(_parameter_of(member), DTensor) is kind]
                found += [{**group, "params": chosen}] if chosen else []
        return found

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

        Completes the gradients first. What every rank has whole counts once, what is divided counts on every rank.

        Returns:
            The norm before, float64, the same on every rank.
        """
        self.sum_gradients()
        parameters = list(self._parameters())
        return clip_gradients(
            parameters,
            bound=max_norm,
            device=parameters[0][1].device,
            shards=(self.group,),
            stages=self.stages,
            counted_elsewhere=self._counted_elsewhere,
        )

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each once."""
        seen = set[int]()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter


def handle_of(model: Any) -> TensorParallel | None:
    """The handle of a parallelized model; None for one that is whole."""
    return getattr(converted_base(model), "_attnres_tensor", None)


def parallelize(model: Any, mesh: DeviceMesh, *, logits: Logits = "all") -> TensorParallel:
    """Divide a converted decoder over one dimension of a mesh, in place: its weights by columns, its sources by tokens.

    The weights of rank 0 are everybody's afterwards. All ranks are given the same batch, and call forward and backward
    alike. Before each optimizer step, gradients of pseudo-queries, key weights and norms have to be completed, by
    `TensorParallel.sum_gradients` or `TensorParallel.before_each_step`.

    Logits, caches and `generate` are as of the whole model. Hidden states that are recorded on the way are of own
    tokens. The model's own forward keeps the embedding of all its tokens until it returns, one tensor beside the
    sources.

    Where dropout is on, it has to draw alike on all ranks for what they compute alike (embedding; attention of families
    whose plan gathers the projections), so seed the ranks alike, and let them divide the tokens: others are refused.

    Args:
        model: From `attnres.models.convert` or `attnres.models.build`, in any floating dtype.
        mesh: Of one dimension, such as ``mesh["tensor"]``.
        logits: ``"all"``: every rank returns the logits of all tokens, and its loss is the model's. ``"own"``: each
            rank returns those of its own tokens, `TensorParallel.own` cuts labels alike, and what is learned is the sum
            of the ranks' losses.

    Raises:
        ConfigError: The mesh has several dimensions, ``logits`` is unknown, or the ranks do not divide the heads or
            another width that is cut.
        UnsupportedModelError: The model is not converted or parallelized already, its family has no plan that covers
            all weights between read and write, or its strategy looks at other tokens.
    """
    _check_mesh(mesh, logits)
    ranks = mesh.size()

    def check() -> tuple[None, str]:
        check_division(model, ranks)
        shapes = crc32(repr([(name, *value.shape) for name, value in model.named_parameters()]).encode())
        strategy, depth = converted_base(model).residual.strategy, converted_base(model).residual.num_sublayers
        return None, f"{type(model).__name__}, {depth} sublayers, {strategy}, shapes {shapes:08x}, logits {logits}"

    settled([Round("tensor", mesh.get_group())], check)
    base = converted_base(model)
    family = family_of_converted(base)
    sublayers = list(_sublayers(base, family))
    divided_head = _divided_head(model, ranks) if logits == "all" else None
    partial = _partial_parameters(base, family, sublayers)
    if logits == "own":
        partial += _vocabulary_parameters(model)
    for sublayer in sublayers:
        _divide(sublayer, mesh)
    if divided_head is not None:
        parallelize_module(divided_head, mesh, ColwiseParallel(output_layouts=Replicate()))
    _copy_from_first(model, mesh)
    tokens = DividedTokens(mesh, logits)
    tokens.connect(
        model,
        first=getattr(base, family.layers)[0],
        sublayers=[sublayer.module for sublayer in sublayers],
        rows=[base.get_submodule(row) for sublayer in sublayers for row in sublayer.rows],
        norm=getattr(base, family.norm),
    )
    handle = TensorParallel(model, mesh, ReplicatedGradients(partial, mesh.get_group()), tokens)
    base._attnres_tensor = handle
    return handle


def check_division(model: Any, ranks: int) -> None:
    """Raise unless tensor ranks can divide a converted model; it may be on the meta device.

    Args:
        model: The model.
        ranks: How many there are.

    Raises:
        ConfigError: They do not divide the heads or another width that is cut.
        UnsupportedModelError: See `parallelize`.
    """
    base = converted_base(model)
    if any(isinstance(module, Elsewhere) for module in model.modules()):
        raise UnsupportedModelError("the model is a part of a pipeline; allowed: a whole model")
    if (earlier := handle_of(model)) is not None:
        raise UnsupportedModelError(f"{type(base).__name__} is divided over {earlier.mesh.size()} ranks already")
    strategy = base.residual.strategy
    if strategy.crosses_tokens:
        raise UnsupportedModelError(
            f"{strategy.label} looks at other tokens, which other ranks have; allowed are strategies whose state is "
            "per token, such as Full and Block AttnRes"
        )
    family = family_of_converted(base)
    sublayers = list(_sublayers(base, family))
    for sublayer in sublayers:
        _check_covered(sublayer, family)
    _check_hybrid(base, sublayers)
    _check_divides(base, sublayers, ranks)


def divided_parameters(model: Any, ranks: int) -> list[nn.Parameter]:
    """What `parallelize` would give each rank a part of; everything else each has whole.

    Args:
        model: A converted model that so many ranks can divide (see `check_division`); it may be on the meta device.
        ranks: How many there are.
    """
    base = converted_base(model)
    styles = {
        name: style
        for sublayer in _sublayers(base, family_of_converted(base))
        for name, style in sublayer.styles.items()
        if style != PART_OF_GRADIENT
    }
    found = [base.get_submodule(name).weight for name in styles]
    found += [base.get_submodule(name).bias for name, style in styles.items() if style not in ROWS]
    head = _divided_head(model, ranks)
    found += [] if head is None else list(head.parameters())
    return [parameter for parameter in found if parameter is not None]


def _check_mesh(mesh: DeviceMesh, logits: Logits) -> None:
    if mesh.ndim != 1:
        raise ConfigError(
            f'the mesh has {mesh.ndim} dimensions ({mesh.mesh_dim_names}); allowed is one: mesh["tensor"]'
        )
    if logits not in ("all", "own"):
        raise ConfigError(f'logits is {logits!r}; allowed are "all" and "own"')


def _sublayers(base: Any, family: Family) -> Iterator[_Sublayer]:
    plan = getattr(base.config, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModelError(f"{family.name} has no tensor-parallel plan in Transformers")
    for index, layer in enumerate(getattr(base, family.layers)):
        for part in (family.attention, family.mlp):
            name = f"{family.layers}.{index}.{part.module}"
            module = getattr(layer, part.module)
            owners = [
                f"{name}.{child}".rstrip(".")
                for child, owner in module.named_modules()
                if any(True for _ in owner.parameters(recurse=False))
            ]
            styles = {owner: plan.get(_in_plan(owner)) for owner in owners}
            yield _Sublayer(
                name=name,
                module=module,
                is_attention=part is family.attention,
                styles={owner: style for owner, style in styles.items() if style is not None},
                unnamed=tuple(owner for owner, style in styles.items() if style is None),
            )


def _in_plan(name: str) -> str:
    """A module's name as plans write it, with a star for the number of its layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _check_covered(sublayer: _Sublayer, family: Family) -> None:
    """Refuse a sublayer in which the plan leaves open what happens to a weight."""
    unknown = [f"{name} ({style})" for name, style in sublayer.styles.items() if style not in STYLES]
    if unknown:
        raise UnsupportedModelError(
            f"{family.name}: the tensor-parallel plan has {unknown[0]}; allowed are {', '.join(STYLES)}"
        )
    if len(sublayer.rows) != 1 or (sublayer.unnamed and not sublayer.keeps_whole):
        left = ", ".join(sublayer.unnamed[:2]) or sublayer.name
        left += f" and {len(sublayer.unnamed) - 2} more" if len(sublayer.unnamed) > 2 else ""
        raise UnsupportedModelError(
            f"{family.name}: the tensor-parallel plan does not cover {left}; allowed are families whose plan covers "
            "all weights between read and write, such as Llama and Qwen3"
        )
    for name, style in sublayer.styles.items():
        module = sublayer.module.get_submodule(name.removeprefix(sublayer.name).lstrip("."))
        if style != PART_OF_GRADIENT and not isinstance(module, nn.Linear):
            raise UnsupportedModelError(
                f"{family.name}: {name} is a {type(module).__name__}, which is not cut; allowed is Linear"
            )


def _check_hybrid(base: Any, sublayers: list[_Sublayer]) -> None:
    normed = any(isinstance(site, ProjectionNormSite) for site in base.residual.sites)
    if normed and any(sublayer.keeps_whole for sublayer in sublayers if sublayer.is_attention):
        raise UnsupportedModelError(
            f"{base.residual.strategy.label} puts norms on the projections, which this family's plan gathers; allowed "
            "are families whose plan divides the heads, such as Llama and Qwen3"
        )


def _check_divides(base: Any, sublayers: list[_Sublayer], ranks: int) -> None:
    """Refuse a number of ranks that does not divide what is cut."""
    config, widths = base.config, {}
    if any(sublayer.is_attention and not sublayer.keeps_whole for sublayer in sublayers):
        heads = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
        widths |= {name: count for name, count in heads.items() if isinstance(count, int)}
    for sublayer in sublayers:
        for name, style in sublayer.styles.items():
            module = base.get_submodule(name)
            if isinstance(module, nn.Linear):
                is_row = style in ROWS
                widths[f"{name}.{'in' if is_row else 'out'}_features"] = (
                    module.in_features if is_row else module.out_features
                )
    common = math.gcd(*widths.values())
    for name, width in widths.items():
        if width % ranks:
            fitting = ", ".join(str(count) for count in range(1, common + 1) if common % count == 0)
            raise ConfigError(f"{name} is {width}, which {ranks} tensor ranks do not divide; allowed here: {fitting}")


def _divided_head(model: Any, ranks: int) -> nn.Module | None:
    """The head, if the plan cuts it and it is nobody else's weight."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.weight is model.get_input_embeddings().weight:
        return None
    plan = getattr(type(model), "_tp_plan", None) or {}
    names = [name for name, module in model.named_modules() if module is head]
    return head if plan.get(names[0]) == WHOLE_HEADS and head.out_features % ranks == 0 else None


def _partial_parameters(base: Any, family: Family, sublayers: list[_Sublayer]) -> list[tuple[nn.Module, str]]:
    """What every rank has whole, and learns of from its own tokens or heads only."""
    modules = [*base.residual.modules(), getattr(base, family.norm)]
    for layer in getattr(base, family.layers):
        for part in (family.attention, family.mlp):
            modules += [getattr(layer, name) for name in (part.norm, part.output_norm) if name is not None]
    for sublayer in sublayers:
        modules += [base.get_submodule(name) for name, style in sublayer.styles.items() if style == PART_OF_GRADIENT]
    return _unique_parameters(modules)


def _vocabulary_parameters(model: Any) -> list[tuple[nn.Module, str]]:
    """Embedding and head, which see own tokens only where the logits are of these."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return _unique_parameters([module for module in ends if module is not None])


def _parameter_of(member: Any) -> Any:
    """Of a parameter, or a pair of name and parameter."""
    return member[1] if isinstance(member, tuple) else member


def _unique_parameters(modules: list[nn.Module]) -> list[tuple[nn.Module, str]]:
    places = {
        id(parameter): (module, name)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    return list(places.values())


def _divide(sublayer: _Sublayer, mesh: DeviceMesh) -> None:
    """Cut a sublayer's weights."""
    for name, style in sublayer.styles.items():
        if style == PART_OF_GRADIENT:
            continue
        module = sublayer.module.get_submodule(name.removeprefix(sublayer.name).lstrip("."))
        before = dict(module._forward_hooks)
        parallelize_module(module, mesh, _style(style))
        for key, hook in before.items():  # what looks at an output is to see the local tensor, so it comes last
            del module._forward_hooks[key]
            module._forward_hooks[key] = hook


def _style(word: str) -> ParallelStyle:
    styles: dict[str, ParallelStyle] = {
        SPLIT_HEADS: ColwiseParallel(),
        WHOLE_HEADS: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(output_layouts=Partial()),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate(), output_layouts=Partial()),
    }
    return styles[word]


@torch.no_grad()
def _copy_from_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank the first one's replicated parameters and buffers, wherever they are by now."""
    group = mesh.get_group()
    source = dist.get_global_rank(group, 0)
    for tensor in [*model.parameters(), *model.buffers()]:
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            sent = tensor.data.to(mesh.device_type)
            dist.broadcast(sent, source, group=group)
            tensor.data.copy_(sent)
