"""Muon and AdamW behind one object, with a state that is plain named tensors.

A model needs both: Muon takes matrices only. `torch.optim` keys its state by position, so a parameter that moves in
the model's order silently gets another one's moments; here the key is the parameter's name.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from attnres.errors import CheckpointError
from attnres.optim.config import OptimConfig
from attnres.optim.groups import ParamGroup, freeze_base, param_groups
from attnres.optim.muon import ShardedMuon, is_sharded

SLOT = "/"
"""Between parameter name and slot in the keys of a state, as in ``model.norm.weight/exp_avg``."""

SLOTS: dict[type[torch.optim.Optimizer], set[str]] = {
    torch.optim.Muon: {"momentum_buffer"},
    ShardedMuon: {"momentum_buffer"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
}
"""What each optimizer keeps for a parameter."""


def build_optimizer(model: nn.Module, config: OptimConfig) -> "GroupedOptimizer":
    """Make the optimizer of a model: groups by role, matrices to Muon where asked, the rest to AdamW.

    Muon runs with ``adjust_lr_fn="match_rms_adamw"``, so that its updates have AdamW's size and one learning rate and
    one weight decay serve both.

    Args:
        model: Already on its device. With ``train_only="depth"`` its other parameters no longer require gradients.
        config: What to build.

    Raises:
        ConfigError: The model has no trainable parameter, or no depth parameter where only those are trained.
    """
    return optimizer_of_groups(optimizer_groups(model, config), config)


def optimizer_groups(model: nn.Module, config: OptimConfig) -> list[ParamGroup]:
    """The groups that `build_optimizer` makes of a model, for a caller that lays its parameters out before they are
    trained.

    Raises:
        ConfigError: As in `build_optimizer`.
    """
    if config.train_only == "depth":
        freeze_base(model)
    return param_groups(
        model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        embedding_lr_scale=config.embedding_lr_scale,
        head_lr_scale=config.head_lr_scale,
        vector_lr_scale=config.vector_lr_scale,
        depth_lr_scale=config.depth_lr_scale,
    )


def local_groups(groups: Sequence[ParamGroup], parameters: Sequence[tuple[str, nn.Parameter]]) -> list[ParamGroup]:
    """The part of a whole model's groups that a rank holds.

    Args:
        groups: Of the whole model, so that a parameter has the role that it has there.
        parameters: What this rank holds, by the names in the whole model. A name may come twice, as when a rank has
            both ends of a pipeline with tied weights; both are trained alike.
    """
    roles = {name: group["name"] for group in groups for name, _ in group["params"]}
    found = [
        ParamGroup(
            name=group["name"],
            params=[(name, parameter) for name, parameter in parameters if roles.get(name) == group["name"]],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
        )
        for group in groups
    ]
    return [group for group in found if group["params"]]


def optimizer_of_groups(groups: Sequence[ParamGroup], config: OptimConfig) -> "GroupedOptimizer":
    """The optimizer of groups by role; there may be none, as on a rank that holds nothing that is trained."""
    muon_roles = {"matrix"} if config.optimizer == "muon" else set()
    to_muon = [group for group in groups if group["name"] in muon_roles]
    to_adamw = [group for group in groups if group["name"] not in muon_roles]
    parts: list[torch.optim.Optimizer] = []
    if to_muon:
        parts.append(_muon(to_muon, config))
    if to_adamw:
        parts.append(_adamw(to_adamw, config))
    return GroupedOptimizer(parts)


def _muon(groups: list[ParamGroup], config: OptimConfig) -> torch.optim.Optimizer:
    settings = {"momentum": config.momentum, "adjust_lr_fn": "match_rms_adamw"}
    sharded = any(is_sharded(parameter) for group in groups for _, parameter in group["params"])
    return (ShardedMuon if sharded else torch.optim.Muon)([dict(group) for group in groups], **settings)


def _adamw(groups: list[ParamGroup], config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW([dict(group) for group in groups], betas=config.betas, eps=config.eps)


@final
class GroupedOptimizer:
    """Several `torch.optim` optimizers over disjoint named parameters, stepped as one.

    Args:
        parts: Optimizers whose groups were built from ``(name, parameter)`` pairs.
    """

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self.parts = parts
        for group in self.param_groups:
            group["peak_lr"] = group["lr"]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts; each has ``name``, ``params``, ``param_names``, ``lr`` and ``weight_decay``."""
        return [group for part in self.parts for group in part.param_groups]

    def set_lr(self, multiplier: float) -> None:
        """Set the rate of every group to its peak times ``multiplier``."""
        for group in self.param_groups:
            group["lr"] = group["peak_lr"] * multiplier

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Moments and step counts as tensors keyed ``name/slot``; learning rates follow from config and step."""
        return {
            f"{name}{SLOT}{slot}": value
            for part in self.parts
            for name, parameter in _named(part)
            for slot, value in part.state.get(parameter, {}).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state made by `state_dict`, for parameters of the same names and shapes.

        Raises:
            CheckpointError: A name or slot is not one of ours, or a shape differs; nothing has been changed then.
        """
        slots: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, slot = key.rpartition(SLOT)
            slots.setdefault(name, {})[slot] = value
        self._check(slots)
        for part in self.parts:
            part.load_state_dict(_by_position(part, slots))

    def _check(self, slots: Mapping[str, Mapping[str, Tensor]]) -> None:
        parameters = {name: (parameter, SLOTS[type(part)]) for part in self.parts for name, parameter in _named(part)}
        unknown = sorted(slots.keys() - parameters.keys())
        if unknown:
            raise CheckpointError(f"the optimizer state has parameters that are not trained here: {', '.join(unknown)}")
        for name, values in slots.items():
            parameter, allowed = parameters[name]
            if set(values) != allowed:
                raise CheckpointError(f"the optimizer state of {name} has {sorted(values)}; allowed: {sorted(allowed)}")
            for slot, value in values.items():
                if value.ndim and value.shape != parameter.shape:
                    shapes = f"{list(value.shape)}; allowed: {list(parameter.shape)}"
                    raise CheckpointError(f"the optimizer state {name}{SLOT}{slot} has shape {shapes}")


def _named(part: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group in part.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def _by_position(part: torch.optim.Optimizer, slots: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """The state in the form that `torch.optim.Optimizer.load_state_dict` takes."""
    names = [name for name, _ in _named(part)]
    state = {
        index: {slot: value.clone() for slot, value in slots[name].items()}
        for index, name in enumerate(names)
        if name in slots
    }
    return {"state": state, "param_groups": part.state_dict()["param_groups"]}
