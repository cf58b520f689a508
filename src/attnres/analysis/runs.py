"""What a run and a comparison of runs are, once read: plain immutable data.

Statistics, tables, figures and the report know runs in this form only, whatever the files look like (see
:mod:`attnres.analysis.reading`). A run that was stopped is normal: it has curves as far as it got and no result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One kind of loss over a run, ordered by step; every array has one entry per record."""

    steps: Array
    """Optimizer steps done."""
    tokens: Array
    """Training tokens seen."""
    loss: Array
    """Loss in nats per token."""
    seconds: Array
    """Training time so far in seconds, without evaluation and checkpoints."""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run wrote at its end."""

    valid_loss: float
    """Final validation loss in nats per token."""
    bits_per_byte: float | None
    """The same loss in bits per byte of text."""
    steps: int
    """Optimizer steps done."""
    tokens: int
    """Training tokens seen."""
    tokens_per_second: float
    """Median training speed."""
    seconds: float
    """Training time in seconds, without evaluation and checkpoints."""
    peak_memory_bytes: int | None
    """Peak memory of the process, where it could be measured."""
    parameters: int
    """Parameters of the model, all of them."""
    extra_parameters: int
    """Parameters that the residual strategy added."""


@dataclass(frozen=True, kw_only=True)
class Depth:
    """What was measured along the depth of a trained model; n is the number of sublayers."""

    sublayers: tuple[str, ...]
    """Kind of each sublayer, such as "attention" or "mlp"."""
    tokens: int
    """Tokens the measurement averages over."""
    output_magnitude: Array
    """Root mean square of each sublayer's output, [n]."""
    input_magnitude: Array
    """Root mean square of what each site reads, the output read last, [n + 1]."""
    gradient_magnitude: Array
    """Root mean square of the loss gradient at each sublayer's output, [n]."""
    mixing_matrix: Array
    """Weight of each source (column; 0 is the embedding) at each site (row; the output read last), [n + 1, n + 1]."""
    block_ends: tuple[int, ...]
    """Sublayer counts at which a block closes; empty for a strategy without blocks."""

    @property
    def num_sublayers(self) -> int:
        """Number of sublayers."""
        return len(self.sublayers)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run as its folder tells it."""

    name: str
    """Name of the run folder."""
    config: Mapping[str, Any]
    """The resolved configuration, as written."""
    environment: Mapping[str, Any]
    """Commit, versions and hardware; empty if the run wrote none."""
    train: Curve
    """Training loss."""
    valid: Curve
    """Validation loss."""
    result: RunResult | None
    """The final result; ``None`` while the run is not finished."""
    depth: Depth | None
    """The measurement along depth; ``None`` if there is none."""

    @property
    def status(self) -> str:
        """In words: finished, or how far the run got."""
        return "finished" if self.result is not None else f"unfinished at step {self.last_step:,}"

    @property
    def last_step(self) -> int:
        """The last optimizer step on record."""
        return int(max([0.0, *self.train.steps[-1:], *self.valid.steps[-1:]]))


@dataclass(frozen=True, kw_only=True)
class Arm:
    """All runs of one residual strategy."""

    name: str
    """Short name, as on the command line."""
    label: str
    """Name for readers."""
    runs: Mapping[int, Run]
    """The runs by seed; without those that have no folder."""
    absent: tuple[str, ...] = ()
    """Run folders that compare.json names and that do not exist."""

    @property
    def finished(self) -> dict[int, Run]:
        """The finished runs by seed."""
        return {seed: run for seed, run in self.runs.items() if run.result is not None}

    @property
    def shown(self) -> dict[int, Run]:
        """The runs that figures show: the finished ones, or all of them while none is finished."""
        return self.finished or dict(self.runs)

    @property
    def depths(self) -> list[Depth]:
        """Measurements along depth of the shown runs."""
        return [run.depth for run in self.shown.values() if run.depth is not None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Arms x seeds. A lone run is a comparison of one arm without a baseline."""

    name: str
    """Name of the folder."""
    arms: tuple[Arm, ...]
    """The arms in the order of compare.json."""
    seeds: tuple[int, ...]
    """The seeds that pair the runs."""
    baseline: str | None
    """Name of the arm the others are compared with; ``None`` for a lone run."""
    jobs: int = 1
    """Runs that shared the machine at a time."""

    @property
    def baseline_arm(self) -> Arm | None:
        """The arm the others are compared with."""
        return next((arm for arm in self.arms if arm.name == self.baseline), None)

    @property
    def runs(self) -> list[Run]:
        """Every run that has a folder, arm by arm."""
        return [run for arm in self.arms for run in arm.runs.values()]
