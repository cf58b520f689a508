"""How fast one read is: forward, forward with backward, and the latency of a read of a single token.

Every form is first held against the float64 reference; a wrong one is reported and not timed. All forms of a shape are
timed interleaved, together with a copy, from whose bandwidth the floor follows (`attnres.bench.floor`). Gradients are
returned and not added into ``.grad``, since adding would cost every form further passes. The time of a form includes
the allocation of its results, and of whatever it makes in between; the copy allocates nothing. See
`attnres.bench.allocator` for why page faults are kept out of it.

On a GPU the times are those of the kernels (`attnres.bench.timing.kernel_clock`), but for the latency, which is as
Python sees it on every device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnres.bench.floor import CopyArm, bytes_moved
from attnres.bench.forms import Form, Problem, ours, stacked
from attnres.bench.gate import exact, judge
from attnres.bench.inputs import Inputs, Shape
from attnres.bench.peers import eager_peers, fused_peers
from attnres.bench.progress import say
from attnres.bench.results import significant
from attnres.bench.timing import Spread, Times, interleaved, kernel_clock, spread, taken, wall_clock
from attnres.errors import ConfigError

SHAPES = ("9x4096x1024", "17x4096x1024", "9x2048x512")
TOKEN_READ = Shape(sources=9, tokens=1, dim=1024)
LATENCY = "one token"
_COPY = "copy"


@dataclass(frozen=True, kw_only=True)
class OpRow:
    """One form, one direction, one shape."""

    form: str
    direction: str
    """``"forward"``, ``"forward+backward"`` or ``"one token"`` (forward, as Python sees it)."""
    sources: int
    tokens: int
    dim: int
    dtype: str
    median_ms: float | None = None
    low_ms: float | None = None
    """First quartile."""
    high_ms: float | None = None
    """Third quartile."""
    rounds: int | None = None
    floor_ms: float | None = None
    """Time to move the bytes that must move, at the copy bandwidth."""
    floor_multiple: float | None = None
    """Median over floor."""
    gb_per_s: float | None = None
    """Bytes that must move over the median, in 1e9 per second."""
    copy_gb_per_s: float | None = None
    """Best copy of this shape and dtype: bytes read plus bytes written, in 1e9 per second."""
    note: str = ""
    """Why a form was not timed."""


@dataclass(frozen=True, kw_only=True)
class OpBench:
    """Settings of `measure`."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    compiled: bool = True
    """Whether forms in plain PyTorch are timed under ``torch.compile`` too."""
    rounds: int = 21
    budget_s: float = 5.0
    """Seconds per form and direction, after which a slow form sits out; it gets three rounds at least."""
    token_reads: int = 2000
    """Reads of a single token per form; 0 for none."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}; allowed: 1 or more")
        if not self.budget_s > 0:
            raise ConfigError(f"budget_s is {self.budget_s}; allowed: more than 0")
        if self.token_reads < 0:
            raise ConfigError(f"token_reads is {self.token_reads}; allowed: 0 or more")


def measure(bench: OpBench) -> Iterator[OpRow]:
    """Time every form at every shape and dtype, after checking each; then the reads of a single token."""
    for shape in bench.shapes:
        for dtype in bench.dtypes:
            yield from _measure_shape(bench, shape, dtype)
    for dtype in bench.dtypes if bench.token_reads else ():
        yield from _measure_token(bench, dtype)


def forms(device: torch.device, dtype: torch.dtype, *, compiled: bool) -> list[Form]:
    """What is compared on a device."""
    *kernels, reference = ours(device, dtype)
    eager = [reference, stacked(), *eager_peers()]
    again = [form.compiled() for form in eager] if compiled else []
    return [*kernels, *eager, *again, *(fused_peers() if device.type == "cuda" else [])]


def _measure_shape(bench: OpBench, shape: Shape, dtype: torch.dtype) -> Iterator[OpRow]:
    inputs = Inputs(shape, dtype, bench.device)
    problems, refused = _pass_gate(forms(bench.device, dtype, compiled=bench.compiled), inputs)
    yield from refused
    copy = CopyArm(shape.sources * shape.tokens * shape.dim, dtype, bench.device)
    copy()
    times = {}
    for direction in ("forward", "forward+backward"):
        say(f"op {shape} {_name(dtype)}: {direction}")
        times[direction] = _time(bench, problems, copy, direction)
    bandwidth = copy.bandwidth(min(min(taken(each, _COPY)) for each in times.values()))
    for direction, each in times.items():
        for name in problems:
            yield _row(name, direction, inputs, spread(taken(each, name)), bandwidth)


def _pass_gate(candidates: Sequence[Form], inputs: Inputs) -> tuple[dict[str, Problem], list[OpRow]]:
    """The forms that are right, warmed up by the check, and a row on each of the others."""
    torch.compiler.reset()  # code made for other shapes would count as a reason to make these dynamic
    truth, problems, refused = exact(inputs), {}, []
    for form in candidates:
        say(f"op {inputs.shape} {_name(inputs.dtype)}: checking {form.name}")
        problem = form.problem(inputs)
        try:
            verdict = judge(problem, inputs, truth)
            note = "" if verdict.is_right else str(verdict)
        except Exception as error:
            if form.is_ours:
                raise  # somebody else's kernel may fail in any way, and is named with the reason; ours may not
            note = f"fails: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if note:
            say(f"  {form.name}: {note}; not timed")
            refused.append(OpRow(form=form.name, direction="gate", note=note, **_problem_columns(inputs)))
        else:
            problems[form.name] = problem
    return problems, refused


def _time(bench: OpBench, problems: dict[str, Problem], copy: CopyArm, direction: str) -> Times:
    runs = {
        name: problem.forward if direction == "forward" else problem.forward_backward
        for name, problem in problems.items()
    }
    clock = kernel_clock(bench.device)
    return interleaved({_COPY: copy, **runs}, clock, rounds=bench.rounds, budget_s=bench.budget_s)


def _measure_token(bench: OpBench, dtype: torch.dtype) -> Iterator[OpRow]:
    """Median over many single reads, one form after the other in turns of a twentieth."""
    inputs = Inputs(TOKEN_READ, dtype, bench.device)
    say(f"op {TOKEN_READ} {_name(dtype)}: latency of one token")
    problems, refused = _pass_gate(forms(bench.device, dtype, compiled=bench.compiled), inputs)
    yield from refused
    clock = wall_clock(bench.device)
    turn = max(bench.token_reads // 20, 1)
    seconds: dict[str, list[float]] = {name: [] for name in problems}
    for index in range(-(-bench.token_reads // turn)):
        for name in problems if index % 2 == 0 else reversed(list(problems)):
            seconds[name] += [clock(problems[name].forward) for _ in range(turn)]
    for name, values in seconds.items():
        yield _row(name, LATENCY, inputs, spread(values), None)


def _row(name: str, direction: str, inputs: Inputs, times: Spread, bandwidth: float | None) -> OpRow:
    shape = inputs.shape
    numbers: dict[str, Any] = {}
    if bandwidth is not None:
        moved = bytes_moved(shape.sources, shape.tokens, shape.dim, inputs.dtype, direction)
        numbers = {
            "floor_ms": significant(1e3 * moved / bandwidth),
            "floor_multiple": significant(times.median * bandwidth / moved, 4),
            "gb_per_s": significant(moved / times.median / 1e9, 4),
            "copy_gb_per_s": significant(bandwidth / 1e9, 4),
        }
    return OpRow(
        form=name,
        direction=direction,
        median_ms=significant(1e3 * times.median),
        low_ms=significant(1e3 * times.low),
        high_ms=significant(1e3 * times.high),
        rounds=times.count,
        **_problem_columns(inputs),
        **numbers,
    )


def _problem_columns(inputs: Inputs) -> dict[str, Any]:
    return {**vars(inputs.shape), "dtype": _name(inputs.dtype)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
