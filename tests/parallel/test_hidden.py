"""A read over sources divided by columns is the operator's read, and sends two numbers per source and token."""

import pytest
import torch

from parallel.work_hidden import read_against_operator, read_and_count, read_single, read_with_wrong_width


@pytest.mark.parametrize(("ranks", "dim"), [(2, 16), (2, 7), (4, 10), (4, 3)])
@pytest.mark.parametrize("options", [(True, 1.0), (False, 5.0)], ids=["key weight", "scaled"])
def test_result_and_all_gradients_equal_the_operators(processes, ranks, dim, options):
    for errors in processes.run(ranks, read_against_operator, 5, dim, torch.float64, *options):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_at_least_float32_and_rounded_once(processes, dtype):
    for errors in processes.run(2, read_against_operator, 9, 64, dtype):
        assert max(errors) < (1e-5 if dtype == torch.float32 else 2**-8)


def test_one_source_passes_bit_for_bit(processes):
    assert processes.run(2, read_single) == [(True, [0.0, 0.0])] * 2


def test_one_exchange_each_way_and_nothing_of_the_sources_size_is_kept(processes):
    count, tokens = 5, 6
    numbers = 2 * count * tokens
    assert processes.run(2, read_and_count, count, 64) == [([numbers, count * tokens], numbers)] * 2


def test_a_width_below_the_own_columns_is_refused(processes):
    assert (
        processes.run(2, read_with_wrong_width)
        == ["dim is 5; allowed is the width of all ranks together, at least 6"] * 2
    )
