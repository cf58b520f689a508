"""Times of several arms that can be compared: interleaved A B B A, told as median and quartiles, or as paired ratios.

A machine drifts (clock, neighbours, memory layout). Arms timed one after the other blame the drift on an arm; here
every round visits every arm, in one order and then in the other, and a ratio is taken within a round before its median.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Clock = Callable[[Callable[[], Any]], float]
"""Runs a function once and returns its seconds."""

Times = dict[str, list[float | None]]
"""Seconds of each arm in each round; None where a slow arm sat out."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A sample in three numbers."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (inclusive method); of a single value, that value."""
    median = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (median,) * 3
    return Spread(median=median, low=low, high=high, count=len(values))


def taken(times: Times, arm: str) -> list[float]:
    """The times of one arm, without the rounds that it sat out."""
    return [seconds for seconds in times[arm] if seconds is not None]


def paired_ratios(times: Times, arm: str, baseline: str) -> list[float]:
    """Time of an arm over that of the baseline, within each round that has both."""
    pairs = zip(times[arm], times[baseline], strict=True)
    return [mine / base for mine, base in pairs if mine is not None and base is not None]


def interleaved(
    arms: Mapping[str, Callable[[], Any]],
    clock: Clock,
    *,
    rounds: int,
    budget_s: float = float("inf"),
    at_least: int = 3,
) -> Times:
    """Time every arm once a round, in order in the first round, backwards in the second, and so on.

    Warm up before: nothing here is thrown away.

    Args:
        arms: What to run, by name.
        clock: How one run is timed.
        rounds: Rounds.
        budget_s: An arm that would exceed this many seconds in total sits out the rounds that are left.
        at_least: Rounds that every arm takes part in, whatever it costs.
    """
    times: Times = {name: [] for name in arms}
    with _no_garbage_collection():
        for index in range(rounds):
            for name in arms if index % 2 == 0 else reversed(list(arms)):
                done = taken(times, name)
                sits_out = len(done) >= at_least and sum(done) + done[-1] > budget_s
                times[name].append(None if sits_out else clock(arms[name]))
    return times


def wall_clock(device: torch.device) -> Clock:
    """Time as the caller sees it, Python included; on a GPU until its work is done.

    The result is released after the clock has stopped: giving memory back is the same for every arm.
    """
    synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing

    def seconds(function: Callable[[], Any]) -> float:
        synchronize()
        began = time.perf_counter()
        result = function()
        synchronize()
        took = time.perf_counter() - began
        del result
        return took

    return seconds


def kernel_clock(device: torch.device, *, flush_bytes: int = 256 * 2**20, head_start_cycles: int = 4_000_000) -> Clock:
    """Time that a GPU works, without the time Python takes to give it the work; on the CPU, `wall_clock`.

    Before each run the level-2 cache is overwritten, so that sources come from memory, and the GPU is made to wait
    about two milliseconds, in which the host queues the work.
    """
    if device.type != "cuda":
        return wall_clock(device)
    flush = torch.empty(flush_bytes, dtype=torch.int8, device=device)

    def seconds(function: Callable[[], Any]) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        flush.zero_()
        torch.cuda._sleep(head_start_cycles)
        start.record()
        result = function()
        stop.record()
        torch.cuda.synchronize()
        del result
        return start.elapsed_time(stop) / 1e3

    return seconds


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _nothing() -> None:
    return
