"""Memory is counted to the byte in cases where it can be counted by hand."""

import pytest
import torch

from attnres.bench.forms import ours, stacked
from attnres.bench.inputs import Inputs, Shape
from attnres.bench.live import peak_bytes, peak_of, saved_by
from attnres.bench.memory import PEAK, SAVED, MemoryBench, measure
from attnres.errors import ConfigError

CPU = torch.device("cpu")
BIG = 10_000
"""Elements of a tensor beside which the scalars of PyTorch do not count."""


def in_tensors(count):
    return round(count / (4 * BIG), 2)


def test_peak_of_a_sequence_of_allocations():
    assert peak_of([]) == 0
    assert peak_of([(1, 10), (2, 20), (1, -10), (3, 15)]) == 35
    assert peak_of([(9, -100), (1, 10)]) == 10  # given back, but from before
    assert peak_of([(1, 10), (1, 30), (2, 5)]) == 35  # an address whose release was missed is used again


def test_the_peak_counts_tensors_alive_at_once():
    def two_at_once():
        first = torch.zeros(BIG)
        second = first + 1
        del first
        third = second + 1
        del second
        return third

    assert in_tensors(peak_bytes(two_at_once, CPU)) == 2
    assert in_tensors(peak_bytes(lambda: [torch.zeros(BIG) for _ in range(5)], CPU)) == 5
    assert in_tensors(peak_bytes(lambda: [torch.zeros(BIG) for _ in range(5)][:0], CPU)) == 5


def test_what_was_there_before_does_not_count():
    before = [torch.zeros(BIG)]

    def replace():
        before.append(before.pop() + 1)
        before.append(before.pop() + 1)

    assert in_tensors(peak_bytes(replace, CPU)) == 2
    assert in_tensors(peak_bytes(lambda: before[0].view(-1), CPU)) == 0


def test_the_peak_sees_what_an_operator_allocates_inside():
    values = torch.randn(BIG, dtype=torch.float64)
    assert peak_bytes(lambda: values.sort(), CPU) >= 2 * 8 * BIG  # values and indices


def test_the_peak_is_the_same_every_time():
    inputs = Inputs(Shape(sources=3, tokens=16, dim=64), torch.float32, CPU)
    problem = stacked().problem(inputs)
    assert len({peak_bytes(problem.forward_backward, CPU) for _ in range(3)}) == 1


def test_saved_tensors_count_once_and_inputs_not_at_all():
    x = torch.randn(BIG, requires_grad=True)
    assert saved_by(lambda: x * x, [x]).bytes == 0  # its inputs
    assert saved_by(lambda: (x.view(100, 100) ** 2).sum(), [x]).bytes == 0  # a view of an input
    result = saved_by(lambda: x.exp(), [x])  # its result
    assert (result.bytes, result.largest) == (4 * BIG, BIG)

    def twice():
        half = x.exp()
        return half[:5000] * half[5000:] * half[0]

    assert saved_by(twice, [x]).bytes == 4 * BIG + 4 * BIG // 2  # views of one result, and the first product
    assert saved_by(lambda: x.exp(), []).bytes == 4 * BIG
    with torch.no_grad():
        assert saved_by(lambda: x.exp(), [x]).bytes == 0


def test_a_stacked_read_keeps_copies_of_its_sources_and_ours_does_not():
    inputs = Inputs(Shape(sources=6, tokens=32, dim=64), torch.float32, CPU)
    found = {}
    for form in (*ours(CPU, torch.float32), stacked()):
        problem = form.problem(inputs)
        found[form.name] = saved_by(problem.value, [*problem.sources, *problem.vectors])
    one = 32 * 64
    assert found["stacked"].largest == 6 * one
    assert found["stacked"].bytes >= 2 * 6 * one * 4
    mine = [saved for name, saved in found.items() if name != "stacked"]
    assert all(saved.largest < one and saved.bytes < 4 * one for saved in mine)


def test_block_peaks_above_prenorm_by_its_sources_and_a_constant_under_checkpointing():
    bench = MemoryBench(
        read=Shape(sources=3, tokens=8, dim=16), dtypes=(torch.float32,), layers=(4, 8), dim=32, batch=1, context=64,
        blocks=4, device=CPU,
    )  # fmt: skip
    rows = list(measure(bench))
    assert {row.measure for row in rows} == {SAVED, PEAK}
    peaks = {(row.arm, row.layers, row.checkpointing): row for row in rows if row.measure == PEAK}
    assert all(peaks["PreNorm", layers, on].units_over_prenorm == 0 for layers in (4, 8) for on in (False, True))
    shallow, deep = (peaks["Block", layers, True] for layers in (4, 8))
    assert shallow.sources == deep.sources == 5
    assert abs(deep.constant - shallow.constant) < 4
    assert deep.constant < 10
    assert deep.constant == pytest.approx(deep.units_over_prenorm - 5)
    assert peaks["Full", 8, True].sources == 17
    assert peaks["Full", 8, True].units_over_prenorm > deep.units_over_prenorm
    assert peaks["PreNorm", 8, True].bytes < peaks["PreNorm", 8, False].bytes


def test_bad_settings_are_refused():
    settings = {"read": Shape(sources=3, tokens=8, dim=16), "dtypes": (torch.float32,), "layers": (4,), "dim": 32,
                "batch": 1, "context": 64, "blocks": 4, "device": CPU}  # fmt: skip
    for changes, message in (
        ({"context": 0}, "context is 0"),
        ({"blocks": 9}, "num_blocks is 9"),
        ({"layers": (0,)}, "layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            MemoryBench(**{**settings, **changes})
