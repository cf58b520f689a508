"""What the timing helper makes of given numbers; nothing here depends on how fast anything is."""

import gc

import pytest
import torch

from attnres.bench.timing import interleaved, paired_ratios, spread, taken, wall_clock


def test_spread_is_median_and_inclusive_quartiles():
    found = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.median, found.low, found.high, found.count) == (3.0, 2.0, 4.0, 5)
    assert spread([1.0, 2.0]).low == 1.25
    single = spread([7.0])
    assert (single.median, single.low, single.high, single.count) == (7.0, 7.0, 7.0, 1)


def scripted(seconds):
    """A clock that notes whom it timed and tells given seconds."""
    visits = []

    def clock(function):
        name = function()
        visits.append(name)
        return seconds[name]

    return clock, visits


def arms(*names):
    return {name: lambda name=name: name for name in names}


def test_rounds_go_forwards_and_backwards():
    clock, visits = scripted({"a": 1.0, "b": 2.0, "c": 3.0})
    times = interleaved(arms("a", "b", "c"), clock, rounds=3)
    assert "".join(visits) == "abccbaabc"
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3, "c": [3.0] * 3}


def test_a_slow_arm_sits_out_once_its_budget_is_spent_but_not_before_its_least_rounds():
    clock, visits = scripted({"fast": 1.0, "slow": 40.0})
    times = interleaved(arms("fast", "slow"), clock, rounds=6, budget_s=50, at_least=2)
    assert times["slow"] == [40.0, 40.0, None, None, None, None]
    assert taken(times, "slow") == [40.0, 40.0]
    assert taken(times, "fast") == [1.0] * 6
    assert visits.count("slow") == 2


def test_ratios_are_taken_within_a_round():
    times = {"base": [1.0, 10.0, 2.0, None], "arm": [2.0, 30.0, None, 5.0]}
    assert paired_ratios(times, "arm", "base") == [2.0, 3.0]
    assert paired_ratios(times, "base", "base") == [1.0, 1.0, 1.0]


def test_garbage_collection_waits_and_comes_back():
    seen = []
    interleaved({"a": lambda: seen.append(gc.isenabled())}, wall_clock(torch.device("cpu")), rounds=1)
    assert seen == [False]
    assert gc.isenabled()

    def fails():
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError):
        interleaved({"a": fails}, wall_clock(torch.device("cpu")), rounds=1)
    assert gc.isenabled()


def test_wall_clock_runs_the_function_once_and_releases_its_result_afterwards():
    released = []

    class Result:
        def __del__(self):
            released.append(True)

    calls = []

    def function():
        calls.append(True)
        return Result()

    assert wall_clock(torch.device("cpu"))(function) >= 0
    assert (len(calls), len(released)) == (1, 1)
