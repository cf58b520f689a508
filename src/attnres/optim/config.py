"""Settings of the optimizer and its schedule."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from attnres.errors import ConfigError

OptimizerName = Literal["muon", "adamw"]
ScheduleName = Literal["wsd", "cosine", "constant"]
TrainOnly = Literal["all", "depth"]


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise a `ConfigError` that names the field, the value seen and what is allowed, unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{field} is {value!r}; allowed: {allowed}")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How the parameters are updated.

    Raises:
        ConfigError: A field is outside its range.
    """

    optimizer: OptimizerName = "muon"
    """What updates the weight matrices of linear layers; everything else is always updated by AdamW."""
    lr: float = 2e-3
    """Peak learning rate. Muon is scaled to AdamW's update size, so one value serves both."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's term under the division."""
    momentum: float = 0.95
    """Muon's momentum; without effect when ``optimizer="adamw"``."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices (expert weights included); nothing else is decayed."""
    embedding_lr_scale: float = 1.0
    """Learning-rate multiplier of embeddings, and of the head where it is tied to them."""
    head_lr_scale: float = 1.0
    """Learning-rate multiplier of an untied head."""
    vector_lr_scale: float = 1.0
    """Learning-rate multiplier of norms, biases, convolution filters and other small parameters."""
    depth_lr_scale: float = 1.0
    """Learning-rate multiplier of pseudo-queries and key weights."""
    train_only: TrainOnly = "all"
    """``"depth"``: everything but what the residual strategy learns (pseudo-queries and key weights) stays as it is."""
    schedule: ScheduleName = "wsd"
    """``"wsd"``: warm-up, stable, linear decay. ``"cosine"``: warm-up, cosine decay. ``"constant"``: warm-up only."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from near zero to its peak."""
    decay_fraction: float = 0.2
    """Share of all steps, at the end, over which WSD decays; without effect on the other schedules."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of the decay, as a share of the peak."""

    def __post_init__(self) -> None:
        require(self.optimizer in get_args(OptimizerName), "optimizer", self.optimizer, '"muon" or "adamw"')
        require(self.schedule in get_args(ScheduleName), "schedule", self.schedule, '"wsd", "cosine" or "constant"')
        require(self.train_only in get_args(TrainOnly), "train_only", self.train_only, '"all" or "depth"')
        require(0 < self.lr < math.inf, "lr", self.lr, "more than 0, and finite")
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "two in [0, 1)"
        )
        require(self.eps > 0, "eps", self.eps, "more than 0")
        require(0 <= self.momentum < 1, "momentum", self.momentum, "0 to below 1")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        for name in ("decay_fraction", "min_lr_ratio"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1")
        scales = ("embedding_lr_scale", "head_lr_scale", "vector_lr_scale", "depth_lr_scale")
        for name in ("weight_decay", *scales):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
