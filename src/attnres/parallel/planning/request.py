"""What is asked of the planner: a model, a residual strategy, a layout, and the machine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from attnres.errors import ConfigError
from attnres.parallel.config import Sharding
from attnres.parallel.plan import Cache
from attnres.parallel.planning.hardware import LINK_CHOICES, Efficiency, accelerator
from attnres.residual import Strategy

Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan."""

    model: str | None = None
    """Name of a known model. Give this or `config`."""
    config: Path | None = None
    """A Hugging Face ``config.json``. Give this or `model`."""
    residual: Strategy | None = None
    """The residual strategy; None: what is usual for the model."""
    pipeline: int = 1
    """Ranks P of the pipeline."""
    virtual: int = 1
    """Stages V on each of them."""
    tensor: int = 1
    """Ranks T that share each sublayer, and the tokens of the residual path."""
    data: int = 1
    """Copies D of all that, each with other micro-batches."""
    sharding: Sharding = "ddp"
    """Between the copies: ``"ddp"`` keeps all on each, ``"fsdp"`` shards weights, gradients and optimizer state."""
    microbatches: int = 8
    """Micro-batches M of a step, for each copy."""
    schedule: str | None = None
    """Word for one of PyTorch's schedules; None: ``"1f1b"``, or ``"interleaved1f1b"`` with several stages on a rank."""
    context: int = 4096
    """Tokens of a sequence in training."""
    micro_batch_size: int = 1
    """Sequences of a micro-batch."""
    cuts: tuple[int, ...] | None = None
    """Sublayers before each cut; None spreads them evenly."""
    balance: bool = False
    """Whether cuts are chosen so that the slowest stage of the plain model is as fast as can be, its head counted."""
    cache: Cache = "all"
    """What ranks keep between their stages."""
    gpu: str = "h200"
    """Accelerator."""
    link: str = "node"
    """Links between ranks of the pipeline."""
    optimizer: Optimizer = "adamw"
    """Optimizer, for its state."""
    checkpointing: bool = True
    """Whether activations are recomputed in the backward pass, sublayer by sublayer."""
    prompt: int = 131072
    """Tokens of the prompt whose prefill is planned."""
    chunk: int = 16384
    """Tokens of one forward of that prefill."""
    element_bytes: int = 2
    """Bytes of a number of the stream and of activations: 2 is bfloat16."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """Shares of the data sheet that are reached."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.config is None):
            given = "neither model nor config is given" if self.model is None else "both model and config are given"
            raise ConfigError(f"{given}; allowed: one of the two")
        counts = ("pipeline", "virtual", "tensor", "data", "microbatches", "context", "micro_batch_size")
        for name in (*counts, "prompt", "chunk", "element_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
        for name, allowed in (
            ("cache", get_args(Cache)),
            ("sharding", get_args(Sharding)),
            ("link", LINK_CHOICES),
            ("optimizer", get_args(Optimizer)),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        accelerator(self.gpu)
        if self.balance and self.cuts is not None:
            raise ConfigError(f"balance is set and cuts are {list(self.cuts)}; allowed: one of the two")

    @property
    def settled_schedule(self) -> str:
        """The schedule, where it is left open as well."""
        return self.schedule or ("interleaved1f1b" if self.virtual > 1 else "1f1b")

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.context * self.micro_batch_size

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, of all copies."""
        return self.tokens * self.microbatches * self.data

    @property
    def accelerators(self) -> int:
        """How many the layout takes."""
        return self.pipeline * self.tensor * self.data
