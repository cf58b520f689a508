"""Tokens divided over ranks: exchanges between all tokens and own ones, and gradients of which each rank has a part.

A read, a write and a norm are local to a token, so a rank can do them for its own tokens alone, and then it is the only
one that holds these tokens' sources. Attention and MLP need all tokens. Between the two stand three exchanges, each the
other's gradient: the sum of all ranks' outputs handed out by tokens (reduce-scatter), own tokens put together
(all-gather), and a cut that costs nothing. Numbers of tokens that the ranks do not divide are filled up on the way.

What a rank learns about a replicated parameter from its own tokens is its part of the gradient only.
`ReplicatedGradients` adds the parts up, once, however often it is asked.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attnres.errors import ConfigError
from attnres.parallel.bank import own_tokens

TOKENS = 1
"""The axis of tokens in ``[batch, tokens, dim]``."""
_BUCKET_NUMBERS = 2**24
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_part(value: Tensor, group: dist.ProcessGroup, dim: int = TOKENS) -> Tensor:
    """A rank's own tokens of a tensor that every rank has whole; a view.

    Args:
        value: With the tokens along ``dim``.
        group: The ranks that share them.
        dim: Axis of the tokens.
    """
    part = _own_range(value.shape[dim], group)
    return value.narrow(dim, part.start, len(part))


class GatherTokens(torch.autograd.Function):
    """All tokens from own ones: ``[batch, own tokens, dim]`` to ``[batch, tokens, dim]``.

    With ``partial_gradients`` each rank's gradient of the result is a part, and backward adds up the parts of a token
    on its rank. Otherwise every rank has the whole gradient, and backward takes what belongs to its tokens.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, tokens: int, group: dist.ProcessGroup, partial_gradients: bool) -> Tensor:
        """Gather ``own``."""
        ctx.group, ctx.partial_gradients = group, partial_gradients
        return _gather(own, tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Give each token's gradient to its rank."""
        own = _scatter_sum(grad, ctx.group) if ctx.partial_gradients else own_part(grad, ctx.group).contiguous()
        return own, None, None, None


class ScatterSum(torch.autograd.Function):
    """Own tokens of the sum over the ranks: ``[batch, tokens, dim]`` to ``[batch, own tokens, dim]``."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Add up and hand out the parts."""
        ctx.group, ctx.tokens = group, part.shape[TOKENS]
        return _scatter_sum(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gather the gradients of all tokens."""
        return _gather(grad, ctx.tokens, ctx.group), None


class TakeOwn(torch.autograd.Function):
    """Own tokens of what every rank has whole; backward gathers, so that every rank has the whole gradient as well."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Cut out the own tokens, as memory of their own: a view would keep all of them."""
        ctx.group, ctx.tokens = group, value.shape[TOKENS]
        return own_part(value, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gather the gradients of all tokens."""
        return _gather(grad, ctx.tokens, ctx.group), None


class ReplicatedGradients:
    """Sums the gradients of parameters that every rank has whole and has used on a part of the data only.

    ``sum`` is to be called once all backward passes of an optimizer step are done; a call without new gradients does
    nothing, so a hook before the step and the trainer may both ask. Where one is called between two backward passes,
    the total stays on the first rank until the next, and nothing counts twice. (`torch.autograd.grad` for one of these
    parameters counts as a backward pass: call it before ``sum``.)

    Each number is added up on one rank and copied to the others, so the ranks' gradients are equal bit for bit, and
    with the same optimizer the parameters stay so. The sum is float32, or float64 for float64.

    Args:
        parameters: Pairs of module and parameter name, the same on every rank.
        group: The ranks.
    """

    def __init__(self, parameters: Iterable[tuple[nn.Module, str]], group: dist.ProcessGroup):
        self._places = dict(enumerate(parameters))
        self._watched = dict(enumerate(self.parameters()))
        self._group, self._is_first = group, dist.get_rank(group) == 0
        self._totals: set[int] = set()  # places whose gradient is a total already
        self._is_pending = False
        for place, parameter in self._watched.items():
            if parameter.requires_grad:
                parameter.register_hook(self._watcher(place))

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, as they are by now."""
        return [module._parameters[name] for module, name in self._places.values()]  # pyright: ignore[reportReturnType]

    def narrow(self, modules: Iterable[nn.Module]) -> None:
        """Leave out the parameters that some modules do not have; each rank of the group has the same modules."""
        have = {
            id(parameter): (module, name)
            for root in modules
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        kept = {place: have[id(parameter)] for place, parameter in self._watched.items() if id(parameter) in have}
        self._watched = {place: self._watched[place] for place in kept}
        self._places = kept

    @torch.no_grad()
    def sum(self) -> None:
        """Replace each gradient by its sum over the ranks; every rank of the group has to call it.

        Raises:
            ConfigError: A parameter has been replaced since, or unfrozen.
        """
        self.check()
        if not self._is_pending:
            return
        chosen = [place for place, parameter in self._watched.items() if parameter.requires_grad]
        for bucket in self._buckets(chosen):
            self._sum_bucket(bucket)
        self._totals, self._is_pending = set(chosen), False

    def before_each_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer ask for the sum before each of its steps."""
        optimizer.register_step_pre_hook(lambda *_: self.sum())

    def _watcher(self, place: int) -> Callable[[Tensor], None]:
        def arrives(grad: Tensor) -> None:
            del grad
            if place in self._totals:
                self._totals.discard(place)
                if not self._is_first:
                    self._watched[place].grad = None
            self._is_pending = True

        return arrives

    def check(self) -> None:
        """Raise unless the gradients that arrive are still those that are watched.

        Raises:
            ConfigError: A parameter has been replaced since, or unfrozen.
        """
        for place, watched in self._watched.items():
            module, name = self._places[place]
            parameter = module._parameters[name]
            if parameter is not watched:
                raise ConfigError(
                    f"{name} of {type(module).__name__} has been replaced since its gradients are watched; "
                    "allowed is to parallelize after the parameters are final"
                )
            if watched.requires_grad and not watched._backward_hooks:
                raise ConfigError(
                    f"{name} of {type(module).__name__} was frozen when the model was parallelized; allowed is to "
                    "unfreeze before"
                )

    def _buckets(self, places: list[int]) -> Iterator[list[int]]:
        """Places of one working dtype each, of bounded size, in order."""
        for dtype in (torch.float32, torch.float64):
            bucket: list[int] = []
            for place in places:
                if _summing_dtype(self._watched[place]) == dtype:
                    bucket.append(place)
                if bucket and sum(self._watched[part].numel() for part in bucket) >= _BUCKET_NUMBERS:
                    yield bucket
                    bucket = []
            if bucket:
                yield bucket

    def _sum_bucket(self, places: list[int]) -> None:
        sizes = [self._watched[place].numel() for place in places]
        first = self._watched[places[0]]
        ranks = dist.get_world_size(self._group)
        flat = torch.zeros(-(-sum(sizes) // ranks) * ranks, dtype=_summing_dtype(first), device=first.device)
        for place, part in zip(places, flat[: sum(sizes)].split(sizes), strict=True):
            grad = self._watched[place].grad
            if grad is not None and (self._is_first or place not in self._totals):
                part.copy_(grad.flatten())
        own = flat.new_empty(len(flat) // ranks)
        _reduce_scatter(own, flat, group=self._group)
        _all_gather(flat, own, group=self._group)
        for place, total in zip(places, flat[: sum(sizes)].split(sizes), strict=True):
            parameter = self._watched[place]
            if parameter.grad is not None:
                parameter.grad.copy_(total.view_as(parameter))
            elif bool(total.any()):  # a parameter that no rank has used stays without gradient
                parameter.grad = total.view_as(parameter).to(parameter.dtype, copy=True)


def _summing_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _own_range(tokens: int, group: dist.ProcessGroup) -> range:
    return own_tokens(tokens, tensor_ranks=dist.get_world_size(group), rank=dist.get_rank(group))


def _gather(own: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    length = -(-tokens // ranks)
    filled = own.contiguous() if own.shape[TOKENS] == length else _fill(own, length)
    parts = own.new_empty(ranks * filled.shape[0], *filled.shape[1:])
    _all_gather(parts, filled, group=group)
    return parts.unflatten(0, (ranks, -1)).movedim(0, TOKENS).flatten(TOKENS, TOKENS + 1)[:, :tokens].contiguous()


def _scatter_sum(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks, tokens = dist.get_world_size(group), part.shape[TOKENS]
    length = -(-tokens // ranks)
    filled = part if tokens == ranks * length else _fill(part, ranks * length)
    parts = filled.unflatten(TOKENS, (ranks, length)).movedim(TOKENS, 0).flatten(0, 1).contiguous()
    own = parts.new_empty(part.shape[0], length, *part.shape[2:])
    _reduce_scatter(own, parts, group=group)
    count = len(_own_range(tokens, group))
    return own if count == length else own[:, :count].clone(memory_format=torch.contiguous_format)


def _fill(value: Tensor, length: int) -> Tensor:
    """The tensor with tokens of zeros behind its own."""
    filled = value.new_zeros(value.shape[0], length, *value.shape[2:])
    filled[:, : value.shape[TOKENS]] = value
    return filled
