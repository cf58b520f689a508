"""Between sublayers each rank has its own tokens, inside them all: the hooks that bring the one into the other.

Everything is hooks on the modules that are there: masks, positions, caches and the model's own forward see all tokens.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from attnres.errors import ConfigError, ShapeError
from attnres.parallel.bank import own_tokens
from attnres.parallel.sequence import TOKENS, GatherTokens, ScatterSum, TakeOwn, own_part

Logits = Literal["all", "own"]


def check_tokens(model: nn.Module, ranks: int, tokens: int) -> None:
    """Raise where tensor ranks would draw different random numbers: with dropout, and unequal shares of the tokens.

    A rank with fewer tokens draws fewer numbers, and from then on ranks would drop other values of what they compute
    alike.

    Args:
        model: The model; it may be on the meta device.
        ranks: Tensor ranks.
        tokens: Tokens that they share.

    Raises:
        ConfigError: There is dropout, and the ranks do not divide the tokens.
    """
    if tokens % ranks and _has_dropout(model):
        raise ConfigError(_uneven(ranks, tokens))


def _uneven(ranks: int, tokens: int) -> str:
    return (
        f"there is dropout, and {ranks} tensor ranks with different shares of {tokens} tokens would draw different "
        f"numbers; allowed: a multiple of {ranks} tokens, or no dropout"
    )


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


class _GiveWhole(torch.autograd.Function):
    """All tokens as a replicated tensor of the mesh, for column-parallel weights.

    Each rank finds the part of the gradient that its columns make. `DTensor.from_local` would add the parts up for
    all tokens on all ranks, once for each weight; here they stay parts, and are added up by tokens, once.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> DTensor:
        del ctx
        return DTensor.from_local(whole, mesh, [Replicate()])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        assert grad.placements[0].is_partial()
        return grad.to_local(), None


class DividedTokens:
    """The hooks that take tokens apart and put them together again, on one model or on the parts of one.

    Args:
        mesh: The ranks that share the tokens.
        logits: ``"all"`` puts the result together, ``"own"`` leaves each rank its own tokens of it.
    """

    def __init__(self, mesh: DeviceMesh, logits: Logits):
        self._mesh, self._group, self.logits = mesh, mesh.get_group(), logits
        self.count = 0
        """Tokens of the forward at hand, on all ranks together."""
        self._start_id: int | None = None
        self._drops = False
        self._ends_run = False  # whether the final norm is given a state, not hidden states to be looked at

    def __deepcopy__(self, memo: dict[int, Any]) -> "DividedTokens":
        """A copied model shares its ranks, and runs in turn with the original."""
        del memo
        return self

    def connect(
        self,
        model: Any,
        *,
        first: nn.Module,
        sublayers: Iterable[nn.Module],
        rows: Iterable[nn.Module],
        norm: nn.Module,
    ) -> None:
        """Register the hooks.

        Args:
            model: With its head.
            first: The first decoder layer.
            sublayers: Attention and MLP of all layers.
            rows: Their row-parallel projections.
            norm: The final one.
        """
        self._drops = _has_dropout(model)
        self._start_id = first.register_forward_pre_hook(self._start, with_kwargs=True).id
        for sublayer in sublayers:
            sublayer.register_forward_pre_hook(self._gather, with_kwargs=True)
        for row in rows:
            row.register_forward_hook(self._hand_out)
        norm.register_forward_pre_hook(self._note_end, prepend=True)
        norm.register_forward_hook(self._finish)
        if self.logits == "own":
            model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)

    def leave_start(self, layer: nn.Module) -> None:
        """Let a copy of the first layer take a state, as where a cut lies inside the layer; others do so anyway."""
        for hooks in (layer._forward_pre_hooks, layer._forward_pre_hooks_with_kwargs):
            hooks.pop(self._start_id, None)  # pyright: ignore[reportArgumentType, reportCallIssue]

    @torch.compiler.disable()
    def _start(self, layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Begin with the own tokens of the embedding."""
        del layer
        embedding: Tensor = positional[0]
        self.count = embedding.shape[TOKENS]
        if self.logits == "all":
            own = TakeOwn.apply(embedding, self._group)
        else:
            own = own_part(embedding, self._group).clone(memory_format=torch.contiguous_format)
        return (own, *positional[1:]), named

    @torch.compiler.disable()
    def _gather(self, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Give a sublayer all tokens; what the column-parallel weights find as gradient is their rank's part of it."""
        tokens = self._count(named)
        if self._drops and module.training and tokens % self._mesh.size():
            raise ConfigError(_uneven(self._mesh.size(), tokens))
        hidden: Tensor = named["hidden_states"] if "hidden_states" in named else positional[0]
        self._check_own(hidden, tokens)
        whole = GatherTokens.apply(hidden, tokens, self._group, True)
        given = _GiveWhole.apply(whole, self._mesh)
        if "hidden_states" in named:
            return positional, named | {"hidden_states": given}
        return (given, *positional[1:]), named

    @torch.compiler.disable()
    def _hand_out(self, module: nn.Module, positional: Any, output: Tensor) -> Any:
        """Sum the row-parallel outputs, to each rank those of its tokens."""
        del module, positional
        return ScatterSum.apply(output, self._group)

    @torch.compiler.disable()
    def _note_end(self, norm: nn.Module, positional: tuple[Any, ...]) -> None:
        del norm
        self._ends_run = not isinstance(positional[0], Tensor)

    @torch.compiler.disable()
    def _finish(self, norm: nn.Module, positional: Any, output: Tensor) -> Any:
        """Put the model's result together."""
        del norm, positional
        if self.logits == "own" or not self._ends_run:
            return output
        return GatherTokens.apply(output, self.count, self._group, False)

    def _count(self, named: Mapping[str, Any]) -> int:
        """Tokens of the forward at hand, from an attention's own arguments.

        Under activation checkpointing a layer runs again when another batch has been seen since.
        """
        positions = named.get("position_ids")
        if positions is not None:
            self.count = positions.shape[-1]
        return self.count

    def _check_own(self, hidden: Tensor, tokens: int) -> None:
        ranks, rank = self._mesh.size(), self._mesh.get_local_rank()
        own = len(own_tokens(tokens, tensor_ranks=ranks, rank=rank))
        if hidden.shape[TOKENS] != own:
            raise ShapeError(
                f"rank {rank} of {ranks} has {hidden.shape[TOKENS]} tokens before a sublayer; of {tokens} it owns {own}"
            )


def _refuse_labels(model: nn.Module, positional: Any, named: Mapping[str, Any]) -> None:
    del model, positional
    for name in ("labels", "logits_to_keep"):
        if named.get(name) is not None and not isinstance(named[name], int):
            raise ConfigError(f'{name} is given, but logits="own" are of a part of the tokens; allowed with "all"')
        if isinstance(named.get(name), int) and named[name]:
            raise ConfigError(
                f'{name} is {named[name]}, but logits="own" are of a part of the tokens; allowed with "all"'
            )
