"""How a run is laid out over processes: the mesh, and what is checked of it before anything starts.

The numbers of a run do not depend on its mesh, so nothing here decides them: tokens of a step, order of the data and
the mean loss are those of one process. What a mesh may do is not fit, and then every rank has to find that out from the
settings alone, before a process group, a folder or a model exists.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from attnres.errors import ConfigError
from attnres.parallel.plan import Cache
from attnres.parallel.schedules import SCHEDULES

Sharding = Literal["ddp", "fsdp"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbv", "dualpipev"]
SPLIT_SCHEDULES = tuple(name for name, kind in SCHEDULES.items() if kind.splits_backward)
"""Schedules that compute the gradients of weights apart from those of inputs, and later."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Processes of a run, and what each of them does; the default is a single process.

    Micro-batches of the pipeline are the passes of an optimizer step (`train.accumulation`), and each data rank takes
    its share of the rows of every pass (`train.batch_size`).

    Raises:
        ConfigError: A field is outside its range.
    """

    pipeline: int = 1
    """Ranks that the layers are cut over."""
    data: int = 1
    """Ranks that the rows of each pass are shared by."""
    tensor: int = 1
    """Ranks that divide the weights of attention and MLP, and the tokens between them."""
    sharding: Sharding = "ddp"
    """Between data ranks: ``"ddp"`` keeps all weights on each, ``"fsdp"`` shards weights, gradients and optimizer
    state."""
    schedule: ScheduleName | None = None
    """Order of the micro-batches in the pipeline; None: ``"1f1b"``, and ``"interleaved1f1b"`` where ``virtual`` is
    more than 1."""
    virtual: int = 1
    """Stages of each pipeline rank."""
    cuts: tuple[int, ...] | None = None
    """Sublayers before each cut, ascending, one cut fewer than there are stages; None shares them evenly."""
    cache: Cache = "all"
    """Sources that a pipeline rank keeps and is not sent again: all that it has seen, those it received, or none."""
    timeout: float = 600.0
    """Seconds after which a rank that waits for another gives up."""

    def __post_init__(self) -> None:
        for name in ("pipeline", "data", "tensor", "virtual"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name, literal in (("sharding", Sharding), ("cache", Cache)):
            _require(getattr(self, name) in get_args(literal), name, getattr(self, name), ", ".join(get_args(literal)))
        known = self.schedule is None or self.schedule in get_args(ScheduleName)
        _require(known, "schedule", self.schedule, f"{', '.join(get_args(ScheduleName))}, or None")
        _require(0 < self.timeout < math.inf, "timeout", self.timeout, "more than 0 seconds, and finite")
        if self.is_sharded and self.schedule in SPLIT_SCHEDULES:
            raise ConfigError(
                f"parallel.sharding='fsdp' and parallel.schedule={self.schedule!r} contradict each other, as FSDP "
                "reduces the gradients of a layer before that schedule has all of them; allowed: sharding='ddp', or a "
                "schedule that does not split the backward pass"
            )
        if self.is_sharded and self.tensor > 1:
            raise ConfigError(
                f"parallel.sharding='fsdp' and parallel.tensor={self.tensor} contradict each other, as FSDP replaces "
                "the parameters whose gradients the tensor ranks add up; allowed: sharding='ddp', or tensor=1"
            )
        if self.cuts is not None:
            rising = all(first < second for first, second in pairwise((0, *self.cuts)))
            allowed = f"{self.stages - 1} numbers of sublayers, ascending from 1 on, for {self.stages} stages"
            _require(len(self.cuts) == self.stages - 1 and rising, "cuts", self.cuts, allowed)

    @property
    def size(self) -> int:
        """Processes."""
        return self.pipeline * self.data * self.tensor

    @property
    def mesh(self) -> str:
        """The mesh in the words of the options."""
        return " x ".join([f"parallel.{name}={getattr(self, name)}" for name in self.dimensions])

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the mesh's dimensions; that of tensor ranks where there are any."""
        return ("pipeline", "data", "tensor") if self.tensor > 1 else ("pipeline", "data")

    @property
    def is_sharded(self) -> bool:
        """Whether data ranks have parts of the weights only."""
        return self.data > 1 and self.sharding == "fsdp"

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline * self.virtual

    @property
    def settled_schedule(self) -> ScheduleName:
        """The schedule, where it is left open as well."""
        return self.schedule or ("interleaved1f1b" if self.virtual > 1 else "1f1b")

    def check_rows(self, batch_size: int) -> None:
        """Raise unless the rows of a pass can be shared evenly.

        Raises:
            ConfigError: They cannot.
        """
        if batch_size % self.data:
            below, above = batch_size // self.data * self.data, -(-batch_size // self.data) * self.data
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"train.batch_size is {batch_size}, which {self.data} data ranks (parallel.data) cannot share evenly; "
                f"allowed: a multiple of {self.data}, such as {near}"
            )

    def check_processes(self, environment: Mapping[str, str] = os.environ) -> None:
        """Raise unless as many processes were started as the mesh has places.

        Raises:
            ConfigError: There are more or fewer, or no launcher.
        """
        started = world_size(environment)
        if started == self.size:
            return
        if not is_launched(environment):
            raise ConfigError(
                f"{self.mesh} takes {_counted(self.size)}, but there is one; allowed: "
                f"torchrun --nproc-per-node {self.size} -m attnres ..., or "
                f"{' and '.join(f'parallel.{name}=1' for name in self.dimensions)}"
            )
        tensor = self.tensor if started % self.tensor == 0 else 1
        rest = started // tensor
        fitting = [f"{count} x {rest // count}" for count in range(1, rest + 1) if rest % count == 0]
        beside = f" beside parallel.tensor={tensor}" if self.tensor > 1 else ""
        raise ConfigError(
            f"{self.mesh} takes {_counted(self.size)}, but {started} were started; allowed with {started}: "
            f"pipeline x data of {', '.join(fitting)}{beside}"
        )


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one that torchrun started."""
    return "WORLD_SIZE" in environment and "RANK" in environment


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Processes that were started together; 1 without a launcher."""
    if not is_launched(environment):
        return 1
    given = environment["WORLD_SIZE"]
    if not given.isdecimal():
        raise ConfigError(f"WORLD_SIZE is {given!r} in the environment; allowed: a whole number, as torchrun sets it")
    return int(given)


def is_first_process(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the one that speaks for all: rank 0, or the only one."""
    return not is_launched(environment) or environment["RANK"] == "0"


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has started this job again after a rank was lost."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_launched(environment) else 0


def _counted(processes: int) -> str:
    return f"{processes} process" + ("es" if processes > 1 else "")


def _require(condition: bool, field: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"parallel.{field} is {value!r}; allowed: {allowed}")
