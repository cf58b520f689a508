"""The pool gives each call its own group, and says which rank failed."""

import pytest

from parallel.processes import RankError
from parallel.work_pool import end_on, fail_on, total


def test_every_rank_answers_in_order_and_groups_are_fresh(processes):
    assert processes.run(2, total, 1.0) == [3.0, 3.0]
    assert processes.run(4, total, 1.0) == [10.0] * 4


def test_a_failing_rank_is_named_and_the_next_call_works(processes):
    with pytest.raises(RankError, match="rank 1 fails"):
        processes.run(2, fail_on, 1, timeout=30)
    assert processes.run(2, total, 2.0) == [6.0, 6.0]


def test_a_process_that_ends_is_an_error(processes):
    with pytest.raises(RankError, match="the process ended"):
        processes.run(2, end_on, 0, timeout=30)
