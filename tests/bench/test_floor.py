"""The byte model against numbers worked out by hand."""

import torch

from attnres.bench.floor import CopyArm, bytes_moved, rows_moved
from attnres.bench.inputs import Inputs, Shape
from attnres.bench.op import _row
from attnres.bench.timing import spread

CPU = torch.device("cpu")


def test_bytes_that_must_move():
    assert rows_moved(9, "forward") == 10
    assert rows_moved(9, "forward+backward") == 10 + 9 + 1 + 9
    assert rows_moved(1, "forward+backward") == 5
    assert bytes_moved(9, 4096, 1024, torch.float32, "forward") == 10 * 4096 * 1024 * 4 == 167_772_160
    assert bytes_moved(9, 8192, 7168, torch.bfloat16, "forward") == 1_174_405_120
    assert bytes_moved(17, 4096, 1024, torch.bfloat16, "forward+backward") == 53 * 4096 * 1024 * 2


def test_bandwidth_counts_reading_and_writing():
    copy = CopyArm(1000, torch.float32, CPU)
    assert copy().sum() == 1000
    assert copy.bandwidth(best_seconds=1e-6) == 8e9


def test_a_row_holds_floor_multiple_and_bandwidth():
    inputs = Inputs(Shape(sources=3, tokens=10, dim=100), torch.float32, CPU)
    row = _row("form", "forward+backward", inputs, spread([4e-5, 4.4e-5, 5e-5]), 2e9)
    moved = (3 * 3 + 2) * 10 * 100 * 4  # 44 000 bytes, 22 microseconds at 2 GB/s
    assert row.floor_ms == 0.022
    assert row.floor_multiple == 2.0
    assert row.gb_per_s == moved / 4.4e-5 / 1e9 == 1.0
    assert row.copy_gb_per_s == 2.0
    assert (row.median_ms, row.rounds, row.sources, row.tokens, row.dim, row.dtype) == (
        0.044, 3, 3, 10, 100, "float32",
    )  # fmt: skip
