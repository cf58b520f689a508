"""How fast one read is: forward, and forward with backward, as multiples of the bytes that have to move.

Every form is first held against the float64 reference. The floor is the time to move the bytes that any implementation
must move, at the copy bandwidth measured in the same run. Forms are timed interleaved (A B B A), so that a drift of the
machine meets all of them.
"""

import csv
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from attnres.errors import ConfigError
from attnres.ops import depth_attention

EPS = 1e-6
Read = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One form, one direction, one shape."""

    date: str
    form: str
    direction: str
    """``"forward"`` or ``"forward+backward"``."""
    sources: int
    tokens: int
    dim: int
    dtype: str
    median_ms: float
    """Median over the repetitions, milliseconds."""
    spread_ms: float
    """Half the distance between the quartiles, milliseconds."""
    floor_multiple: float
    """Median over the time to move the bytes that must move."""
    copy_gb_per_s: float
    """Copy bandwidth of this run: bytes read plus bytes written per second, in 1e9."""
    threads: int
    torch: str
    machine: str


def stacked(sources: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
    """The form of most public code: stack, norm, einsum, softmax, einsum."""
    values = torch.stack(tuple(sources))
    keys = torch.nn.functional.rms_norm(values.float(), values.shape[-1:], weight.float(), EPS)
    depth_weights = torch.einsum("std,d->st", keys, query.float()).softmax(0)
    return torch.einsum("st,std->td", depth_weights, values.float()).to(values.dtype)


def reference(sources: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
    """`attnres.ops.depth_attention`."""
    return depth_attention(sources, query, weight, eps=EPS)


def forms() -> dict[str, Read]:
    """What is compared; fla-core's naive form where that package is installed."""
    found: dict[str, Read] = {"attnres reference": reference, "stacked": stacked}
    spec = importlib.util.find_spec("fla")
    if spec is not None and spec.submodule_search_locations:
        path = Path(next(iter(spec.submodule_search_locations))) / "ops" / "attnres" / "naive.py"
        module_spec = importlib.util.spec_from_file_location("attnres_bench_fla_naive", path)
        if module_spec is not None and module_spec.loader is not None:
            module = importlib.util.module_from_spec(module_spec)
            module_spec.loader.exec_module(module)
            found["fla-core naive"] = lambda sources, query, weight: module.naive_attnres(
                query, sources, weight, rms_eps=EPS
            )
    return found


def measure(
    *, sources: int, tokens: int, dim: int, dtype: torch.dtype = torch.float32, repetitions: int = 7
) -> Iterator[Measurement]:
    """Time every form at one shape, after checking each.

    Raises:
        ConfigError: A size is below 1.
    """
    sizes = {"sources": sources, "tokens": tokens, "dim": dim, "repetitions": repetitions}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; allowed: 1 or more")
    values = [torch.randn(tokens, dim).to(dtype).requires_grad_() for _ in range(sources)]
    query, weight = torch.randn(dim).div(dim**0.5).requires_grad_(), torch.ones(dim).requires_grad_()
    found = {name: read for name, read in forms().items() if _is_right(name, read, values, query, weight)}
    bandwidth = copy_bandwidth(tokens * dim * sources, dtype)
    element = values[0].element_size() * tokens * dim
    for direction, passes in (("forward", sources + 1), ("forward+backward", 3 * sources + 2)):
        times = _interleaved(found, values, query, weight, direction, repetitions)
        for name, seconds in times.items():
            median = statistics.median(seconds)
            quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median] * 3
            yield Measurement(
                date=datetime.now(UTC).strftime("%Y-%m-%d"),
                form=name,
                direction=direction,
                sources=sources,
                tokens=tokens,
                dim=dim,
                dtype=str(dtype).removeprefix("torch."),
                median_ms=round(1e3 * median, 4),
                spread_ms=round(1e3 * (quartiles[2] - quartiles[0]) / 2, 4),
                floor_multiple=round(median * bandwidth / (passes * element), 2),
                copy_gb_per_s=round(bandwidth / 1e9, 2),
                threads=torch.get_num_threads(),
                torch=torch.__version__,
                machine=platform.processor() or platform.machine(),
            )


def copy_bandwidth(elements: int, dtype: torch.dtype, repetitions: int = 7) -> float:
    """Bytes read plus bytes written per second by ``copy_``, best of several."""
    source, target = torch.ones(elements, dtype=dtype), torch.zeros(elements, dtype=dtype)
    seconds = [_seconds(lambda: target.copy_(source)) for _ in range(repetitions)]
    return 2 * source.numel() * source.element_size() / min(seconds)


def append(measurements: Sequence[Measurement], path: Path) -> None:
    """Add rows to a CSV file, with a header where it is new."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Measurement)])
        if new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in measurements)


def _is_right(name: str, read: Read, values: list[Tensor], query: Tensor, weight: Tensor) -> bool:
    """Whether a form has the value of the float64 reference; a wrong one is reported and not timed."""
    with torch.no_grad():
        exact = depth_attention([value.double() for value in values], query.double(), weight.double(), eps=EPS)
        error = (read(values, query, weight).double() - exact).abs().max().item()
    allowed = 4 * torch.finfo(values[0].dtype).eps * exact.abs().max().item()
    if error > allowed:
        print(f"{name}: wrong by {error:.3g} (allowed {allowed:.3g}); not timed")
    return error <= allowed


def _interleaved(
    found: dict[str, Read], values: list[Tensor], query: Tensor, weight: Tensor, direction: str, repetitions: int
) -> dict[str, list[float]]:
    grad = torch.randn_like(values[0])
    leaves = [*values, query, weight]

    def once(read: Read) -> None:
        if direction == "forward":
            with torch.no_grad():
                read(values, query, weight)
        else:
            torch.autograd.grad(read(values, query, weight), leaves, grad)

    names = list(found)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        once(found[name])  # warm up
    for repetition in range(repetitions):
        for name in names if repetition % 2 == 0 else reversed(names):
            times[name].append(_seconds(lambda name=name: once(found[name])))
    return times


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
