"""What a run will cost, from its config alone: parameters, memory of the training state, arithmetic per token."""

from dataclasses import dataclass

import torch
from torch import nn

from attnres.experiments.models import hf_config
from attnres.models import build
from attnres.optim import freeze_base, is_depth_parameter, param_groups
from attnres.train import RunConfig

BYTES_PER_FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Costs of a run."""

    parameters: int
    """All parameters, tied ones once."""
    extra_parameters: int
    """Pseudo-queries and key weights."""
    training_tokens: int
    """Tokens of the whole run."""
    state_bytes: int
    """Weights, and for those that are trained gradients and optimizer state, in float32 (AdamW has two moments, Muon
    one); activations come on top."""
    flops_per_token: float
    """Forward and backward: six per weight that multiplies, the residual path's matrices among them, and
    ``6 * layers * context * dim`` for causal attention. Mixing, a few operations per number moved, is not counted, nor
    is attention that a residual scheme has of its own."""


def describe(config: RunConfig) -> Plan:
    """Count on the meta device; nothing is allocated.

    Raises:
        ConfigError: The strategy does not fit the depth, or learns nothing where only it is trained.
    """
    shape = hf_config(config.model, config.data)
    with torch.device("meta"):
        model = build(shape, config.residual, dtype=torch.float32)
    if config.optim.train_only == "depth":
        freeze_base(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    matrices += sum(p.numel() for p in model.base_model.residual.parameters() if sum(n > 1 for n in p.shape) > 1)
    by_role = {str(group["name"]): sum(p.numel() for _, p in group["params"]) for group in param_groups(model, lr=1.0)}
    saved_by_muon = by_role.get("matrix", 0) if config.optim.optimizer == "muon" else 0
    attention = 6.0 * shape.num_hidden_layers * config.data.context * shape.hidden_size
    return Plan(
        parameters=sum(sizes.values()),
        extra_parameters=sum(size for name, size in sizes.items() if is_depth_parameter(name)),
        training_tokens=config.train.steps * config.tokens_per_step,
        state_bytes=BYTES_PER_FLOAT * (sum(sizes.values()) + 3 * sum(by_role.values()) - saved_by_muon),
        flops_per_token=6.0 * matrices + attention,
    )
