"""How much memory reads need: what one read keeps for its backward, and the peak of a training step.

A read may keep references to its sources and ``O(n T)`` float32 numbers, nothing of the size of its sources. With an
activation checkpoint around each layer, a model with Block AttnRes then peaks above PreNorm by its finished sources and
a constant number of ``[T, D]`` tensors, however deep it is. Without checkpoints every sublayer's read is a tensor of
its own beside the partial sum, where PreNorm has one for both, so the difference grows by about one per sublayer.

Gradients of the weights are there before the step is measured, as with gradient accumulation: they are the same for
every arm and would otherwise grow while activations shrink, and move the peak.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnres.bench.forms import Form, ours, stacked
from attnres.bench.inputs import Inputs, Shape
from attnres.bench.live import peak_bytes, saved_by
from attnres.bench.models import BLOCK, FULL, PRENORM, ModelShape, draw_tokens, make_arms
from attnres.bench.peers import eager_peers
from attnres.bench.progress import say
from attnres.bench.results import significant
from attnres.errors import ConfigError

SAVED, PEAK = "saved by one read", "peak of a training step"


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One form of a read, or one arm of a model."""

    measure: str
    """``"saved by one read"`` or ``"peak of a training step"``."""
    arm: str
    """Form of the read, or strategy of the model."""
    dtype: str
    tokens: int
    dim: int
    sources: int
    """Of the read; of the model, the finished sources that its last read sees (0 for PreNorm)."""
    layers: int | None = None
    checkpointing: bool | None = None
    """Whether each layer is recomputed in the backward."""
    bytes: int
    """Saved beyond the inputs, or peak beyond what was there before the step."""
    units: float
    """The same in ``[tokens, dim]`` tensors of the dtype."""
    largest_units: float | None = None
    """Largest saved tensor in ``[tokens, dim]`` tensors."""
    floats_per_score: float | None = None
    """Saved bytes over ``4 * sources * tokens``: float32 numbers per source and token."""
    units_over_prenorm: float | None = None
    """Peak less that of PreNorm."""
    constant: float | None = None
    """The same less the finished sources: what should not grow with depth."""


@dataclass(frozen=True, kw_only=True)
class MemoryBench:
    """Settings of `measure`."""

    read: Shape
    dtypes: tuple[torch.dtype, ...]
    layers: tuple[int, ...]
    dim: int
    batch: int
    context: int
    blocks: int
    device: torch.device

    def __post_init__(self) -> None:
        for name in ("batch", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
        for layers in self.layers:
            self.model(layers)

    def model(self, layers: int) -> ModelShape:
        """The model at a depth."""
        return ModelShape(layers=layers, dim=self.dim, blocks=self.blocks, head_dim=min(64, self.dim), vocab=256)


def measure(bench: MemoryBench) -> Iterator[MemoryRow]:
    """One read of each form in each dtype, then the training step at each depth."""
    for dtype in bench.dtypes:
        inputs = Inputs(bench.read, dtype, bench.device)
        for form in (*ours(bench.device, dtype), stacked(), *eager_peers()):
            say(f"memory {bench.read}: one read, {form.name}")
            yield _saved_row(form, inputs)
    for layers in bench.layers:
        yield from _measure_depth(bench, layers)


def _saved_row(form: Form, inputs: Inputs) -> MemoryRow:
    problem, shape = form.problem(inputs), inputs.shape
    saved = saved_by(problem.value, [*problem.sources, *problem.vectors])
    return MemoryRow(
        measure=SAVED,
        arm=form.name,
        dtype=_name(inputs.dtype),
        tokens=shape.tokens,
        dim=shape.dim,
        sources=shape.sources,
        bytes=saved.bytes,
        units=significant(saved.bytes / (shape.tokens * shape.dim * inputs.dtype.itemsize)),
        largest_units=significant(saved.largest / (shape.tokens * shape.dim)),
        floats_per_score=significant(saved.bytes / (4 * shape.sources * shape.tokens)),
    )


def _measure_depth(bench: MemoryBench, layers: int) -> Iterator[MemoryRow]:
    arms = make_arms(bench.model(layers), bench.device)
    for checkpointing in (False, True):
        peaks = {}
        for name in (PRENORM, BLOCK, FULL):
            say(f"memory {layers} layers{', checkpointing' * checkpointing}: {name}")
            peaks[name] = _training_peak(bench, arms[name], layers, checkpointing=checkpointing)
        for name, peak in peaks.items():
            yield _peak_row(bench, name, layers, peak, peak - peaks[PRENORM], checkpointing=checkpointing)


def _training_peak(bench: MemoryBench, model: Any, layers: int, *, checkpointing: bool) -> int:
    tokens = draw_tokens(bench.model(layers), bench.batch, bench.context, bench.device)
    model.train()
    model.activation_checkpointing_disable()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    step()  # leaves gradients for the next step to be added to
    peak = peak_bytes(step, bench.device)
    model.zero_grad(set_to_none=True)
    return peak


def _peak_row(bench: MemoryBench, name: str, layers: int, peak: int, over: int, *, checkpointing: bool) -> MemoryRow:
    unit = bench.batch * bench.context * bench.dim * 4
    sources = {PRENORM: 0, BLOCK: bench.blocks + 1, FULL: 2 * layers + 1}[name]
    return MemoryRow(
        measure=PEAK,
        arm=name,
        dtype="float32",
        tokens=bench.batch * bench.context,
        dim=bench.dim,
        sources=sources,
        layers=layers,
        checkpointing=checkpointing,
        bytes=peak,
        units=significant(peak / unit),
        units_over_prenorm=round(over / unit, 2),
        constant=round(over / unit - sources, 2),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
