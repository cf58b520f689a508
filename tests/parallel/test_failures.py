"""What is wrong on one rank ends all of them, in time, with one line that says where and why."""

import re

import pytest

from attnres.parallel.failures import ANSWER_SECONDS
from parallel.processes import RankError
from parallel.work_pipeline import Case, disagree, failing_loss, lost_rank, odd_batches


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        (Case(cuts=(5,)), r"cut at \[5\]"),
        (Case(cache="off"), "cache off"),
        (Case(microbatches=8), "M=8"),
    ],
)
def test_ranks_that_plan_differently_are_told_apart(processes, changed, seen):
    for message in processes.run(2, disagree, changed, 1):
        assert message.startswith("ConfigError: pipeline rank 1 has [")
        assert re.search(seen, message)
        assert message.endswith("allowed: the same on all")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("one shorter", r"pipeline rank 1: micro-batch 1 has token ids \[2, 4\] .* micro-batch 0 \[2, 5\]"),
        ("all shorter", r"pipeline rank 1 has \[4 micro-batches of \[2, 4\]\], pipeline rank 0 has .*\[2, 5\]"),
        ("fewer", r"pipeline rank 1: 3 micro-batches were given; allowed: 4"),
    ],
)
def test_micro_batches_that_differ_are_refused_on_every_rank_and_the_pipeline_goes_on(processes, how, expected):
    messages = processes.run(2, odd_batches, 1, how)
    assert messages[0] == messages[1]
    assert re.fullmatch(rf"ConfigError: {expected}.*", messages[0])


def test_an_error_on_one_rank_is_told_on_the_others(processes):
    first, second = processes.run(2, failing_loss, 1, group_seconds=20, timeout=60)
    assert (
        first
        == "RankFailure: rank 0 stopped in a pipeline step, because rank 1 failed: ValueError: no such token at all"
    )
    assert second.startswith("ValueError: no such token")


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_lost_rank_is_named_within_the_time_out(processes, how):
    limit = 6
    with pytest.raises(RankError) as caught:
        processes.run(3, lost_rank, 1, how, group_seconds=limit, timeout=120, grace_seconds=20)
    messages = caught.value.results
    assert messages.keys() == {0, 2}
    for rank, message in messages.items():
        who = "rank 1, whose process has ended" if how == "killed" else "rank 1"
        expected = rf"RankFailure: rank {rank} stopped in a pipeline step: lost contact with {who} \(.+\) \[(\d+) s\]"
        found = re.fullmatch(expected, message)
        assert found, message
        assert "\n" not in message
        assert int(found[1]) <= limit + ANSWER_SECONDS + 1
