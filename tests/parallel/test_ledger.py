"""The bytes that hops really send are those of the formulas, forward and backward, to the byte."""

import pytest
import torch

from attnres.parallel.formulas import comm_cached, comm_naive, comm_own_reused
from attnres.parallel.planning.communication import predicted_bytes
from attnres.residual import BlockAttnRes, FullAttnRes
from parallel.work_pipeline import DIM, ROWS, TOKENS, Case, plan_of, step_with_transfers_watched

FORMULAS = {"off": comm_naive, "received": comm_cached, "all": comm_own_reused}


def run(processes, ranks, case):
    """The rows of all ranks; that they are all that was sent has been checked."""
    results = processes.run(ranks, step_with_transfers_watched, case)
    for result in results:
        assert sum(row.bytes for row in result["rows"]) == result["sent"]
    return [row for result in results for row in result["rows"]], plan_of(case, ranks)


def schedule(virtual):
    return "1f1b" if virtual == 1 else "interleaved1f1b"


COVERED = [(2, 1, 2, "all"), (2, 2, 1, "off"), (2, 3, 1, "received"), (4, 2, 1, "received"), (4, 3, 1, "all")]
GRID = [(p, v, n, cache) for p in (2, 4) for v in (1, 2, 3) for n in (1, 2) for cache in FORMULAS]


def check_formula(processes, ranks, virtual, blocks, cache):
    strategy = BlockAttnRes(sublayers_per_block=1)
    layers = blocks * ranks * virtual // 2
    case = Case(strategy=strategy, layers=layers, virtual=virtual, schedule=schedule(virtual), cache=cache)
    rows, _ = run(processes, ranks, case)
    one_source = ROWS * TOKENS * DIM * 8
    expected = FORMULAS[cache](ranks, virtual, blocks) * one_source * case.microbatches
    for direction in ("forward", "backward"):
        assert sum(row.bytes for row in rows if row.direction == direction and row.kind == "block") == expected


@pytest.mark.parametrize(("ranks", "virtual", "blocks", "cache"), COVERED)
def test_blocks_cost_what_the_formula_says(processes, ranks, virtual, blocks, cache):
    check_formula(processes, ranks, virtual, blocks, cache)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize(("ranks", "virtual", "blocks", "cache"), GRID)
def test_blocks_cost_what_the_formula_says_in_the_whole_grid(processes, ranks, virtual, blocks, cache):
    check_formula(processes, ranks, virtual, blocks, cache)


@pytest.mark.parametrize("cache", FORMULAS)
def test_every_transfer_is_the_plans_and_goes_once_each_way(processes, cache):
    case = Case(
        strategy=BlockAttnRes(sublayers_per_block=2), layers=4, virtual=2, schedule="interleaved1f1b", cache=cache
    )
    rows, plan = run(processes, 4, case)
    for hop in plan.hops:
        for micro_batch in range(case.microbatches):
            here = [row for row in rows if (row.stage, row.micro_batch) == (hop.stage, micro_batch)]
            keys = [leaf.key for leaf in hop.leaves]
            forward = [row for row in here if row.direction == "forward"]
            backward = [row for row in here if row.direction == "backward"]
            assert [row.key for row in forward] == [row.key for row in backward] == keys
            assert {(row.sender, row.receiver) for row in forward} == {(hop.sender, hop.receiver)}
            assert {(row.sender, row.receiver) for row in backward} == {(hop.receiver, hop.sender)}


def test_gradients_of_bfloat16_sources_travel_in_float32_and_of_the_partial_sum_in_bfloat16(processes):
    strategy = BlockAttnRes(sublayers_per_block=4)
    case = Case(strategy=strategy, dtype=torch.bfloat16, virtual=2, schedule="interleaved1f1b")
    rows, _ = run(processes, 2, case)
    elements = ROWS * TOKENS * DIM
    size = {(row.direction, row.kind): row.bytes // elements for row in rows}
    assert size["forward", "embedding"] == size["forward", "partial"] == size["backward", "partial"] == 2
    assert size["backward", "embedding"] == 4


@pytest.mark.parametrize("strategy", [BlockAttnRes(sublayers_per_block=3), FullAttnRes()], ids=["block", "full"])
@pytest.mark.parametrize("name", ["interleaved1f1b", "zbv"])
def test_the_planner_predicts_every_byte(processes, strategy, name):
    case = Case(strategy=strategy, virtual=2, schedule=name, cuts=(1, 6, 8), cache="received")
    rows, plan = run(processes, 2, case)
    predicted = predicted_bytes(plan, tokens=ROWS * TOKENS, element_bytes=8, microbatches=case.microbatches)
    assert sum(row.bytes for row in rows) == sum(row.bytes for row in predicted)
    assert sorted(map(_facts, rows)) == sorted(map(_facts, predicted))


def _facts(row):
    return row.direction, row.stage, row.sender, row.receiver, row.micro_batch, row.key, row.kind, row.bytes
