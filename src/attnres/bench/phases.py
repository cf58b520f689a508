"""One phase or two: what all reads of a model cost together, and how the cost grows with depth.

Block AttnRes may read all finished sources once per block (phase 1) and merge them with the partial sum at each
sublayer (phase 2), or read everything at each sublayer (one phase). Arms are the two, the library's own choice, the
plain sums of PreNorm, and Full AttnRes for contrast where the depth allows. At a fixed number of blocks the cost of
Block AttnRes grows linearly with depth; that of Full AttnRes with its square.

First every arm is held against one phase in float64, reads and gradients, at a few tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnres.bench.chain import Chain, ChainInputs
from attnres.bench.progress import say
from attnres.bench.results import significant
from attnres.bench.timing import Times, interleaved, paired_ratios, spread, taken, wall_clock
from attnres.errors import ConfigError
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm, Strategy

ONE, TWO, AUTO, FULL, PRENORM = "Block, one phase", "Block, two phases", "Block, auto", "Full", "PreNorm"
DEEPEST_FULL = 64
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 8e-2}
"""Largest error over largest magnitude; in bfloat16 partial sums and gradients are rounded at every step."""
_GATE_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """One arm, one direction, one depth."""

    arm: str
    direction: str
    sublayers: int
    blocks: int
    tokens: int
    dim: int
    dtype: str
    median_ms: float | None = None
    """Of all reads and writes together."""
    low_ms: float | None = None
    """First quartile."""
    high_ms: float | None = None
    """Third quartile."""
    rounds: int | None = None
    ratio_to_one_phase: float | None = None
    """Median over the rounds of the time over that of one phase in the same round."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    note: str = ""
    """Why an arm was not timed."""


@dataclass(frozen=True, kw_only=True)
class PhaseBench:
    """Settings of `measure`."""

    sublayers: tuple[int, ...]
    blocks: int
    tokens: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    rounds: int = 11
    budget_s: float = 12.0
    """Seconds per arm, direction and depth, after which a slow arm sits out; it gets three rounds at least."""

    def __post_init__(self) -> None:
        for name in ("blocks", "tokens", "dim", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
        for depth in self.sublayers:
            BlockAttnRes(num_blocks=self.blocks).block_ends(depth)

    def draw(self, sublayers: int, tokens: int) -> ChainInputs:
        """Inputs for a depth, the same every time."""
        return ChainInputs.draw(sublayers, tokens, self.dim, self.dtype, self.device)

    def arms(self, sublayers: int) -> dict[str, Strategy]:
        """What is compared at a depth."""
        arms: dict[str, Strategy] = {
            PRENORM: PreNorm(),
            ONE: BlockAttnRes(num_blocks=self.blocks, phases="one"),
            TWO: BlockAttnRes(num_blocks=self.blocks, phases="two"),
            AUTO: BlockAttnRes(num_blocks=self.blocks, phases="auto"),
        }
        return {**arms, FULL: FullAttnRes()} if sublayers <= DEEPEST_FULL else arms


def measure(bench: PhaseBench) -> Iterator[PhaseRow]:
    """Check every arm, then time it, at each depth."""
    for sublayers in bench.sublayers:
        say(f"phases {sublayers} sublayers: checking")
        wrong = {name: note for name in bench.arms(sublayers) if (note := _check(bench, name, sublayers))}
        for name, note in wrong.items():
            say(f"  {name}: {note}; not timed")
            yield PhaseRow(arm=name, direction="gate", note=note, **_columns(bench, sublayers))
        yield from _measure_depth(bench, sublayers, [name for name in bench.arms(sublayers) if name not in wrong])


def _measure_depth(bench: PhaseBench, sublayers: int, names: Sequence[str]) -> Iterator[PhaseRow]:
    strategies, inputs = bench.arms(sublayers), bench.draw(sublayers, bench.tokens)
    chains = {name: Chain(strategies[name], inputs) for name in names}
    for direction in ("forward", "forward+backward"):
        say(f"phases {sublayers} sublayers: {direction}")
        runs = {
            name: chain.forward if direction == "forward" else chain.forward_backward for name, chain in chains.items()
        }
        for run in runs.values():
            run()
        times = interleaved(runs, wall_clock(bench.device), rounds=bench.rounds, budget_s=bench.budget_s)
        for name in names:
            yield _row(bench, sublayers, name, direction, times)


def _check(bench: PhaseBench, name: str, sublayers: int) -> str:
    """What is wrong with an arm, or nothing."""
    tested = bench.arms(sublayers)[name]
    truth = BlockAttnRes(num_blocks=bench.blocks, phases="one") if name in (ONE, TWO, AUTO) else tested
    inputs = bench.draw(sublayers, _GATE_TOKENS)
    found, true = Chain(tested, inputs), Chain(truth, inputs.double())
    worst = max(_error([found.forward()], [true.forward()]), _error(found.everything(), true.everything()))
    allowed = ALLOWED[bench.dtype]
    return "" if worst <= allowed else f"wrong by {worst:.2g} (allowed {allowed:.2g})"


def _error(found: Sequence[Tensor | None], true: Sequence[Tensor | None]) -> float:
    """Largest relative error; infinite where a tensor is missing or not a number."""
    errors = [0.0]
    for mine, exact in zip(found, true, strict=True):
        if mine is None or exact is None:
            errors.append(0.0 if mine is exact else float("inf"))
            continue
        error = ((mine.detach().double() - exact.detach()).abs().max() / exact.abs().max().clamp_min(1e-3)).item()
        errors.append(error if error == error else float("inf"))
    return max(errors)


def _row(bench: PhaseBench, sublayers: int, name: str, direction: str, times: Times) -> PhaseRow:
    own = spread(taken(times, name))
    ratios = paired_ratios(times, name, ONE) if ONE in times else []
    ratio = spread(ratios) if ratios else None
    return PhaseRow(
        arm=name,
        direction=direction,
        median_ms=significant(1e3 * own.median),
        low_ms=significant(1e3 * own.low),
        high_ms=significant(1e3 * own.high),
        rounds=own.count,
        ratio_to_one_phase=ratio and significant(ratio.median, 4),
        ratio_low=ratio and significant(ratio.low, 4),
        ratio_high=ratio and significant(ratio.high, 4),
        **_columns(bench, sublayers),
    )


def _columns(bench: PhaseBench, sublayers: int) -> dict[str, Any]:
    return {
        "sublayers": sublayers,
        "blocks": bench.blocks,
        "tokens": bench.tokens,
        "dim": bench.dim,
        "dtype": str(bench.dtype).removeprefix("torch."),
    }
