"""What hops carry, before anything runs: the paper's formulas and its worked example, and every strategy's state."""

import itertools
from fractions import Fraction

import pytest
import torch

from attnres.errors import ConfigError
from attnres.experiments.arms import strategy_of
from attnres.parallel.formulas import comm_cached, comm_naive, comm_own_reused, peak_cached, peak_naive
from attnres.parallel.layout import layouts
from attnres.parallel.plan import check_cuts, plan_pipeline, stage_ranks
from attnres.parallel.schedules import SCHEDULES, check_pipeline
from attnres.residual import STRATEGIES, BlockAttnRes, FullAttnRes, PreNorm
from attnres.residual.bare import bare_residual

CACHES = ("off", "received", "all")
FORMULAS = (comm_naive, comm_cached, comm_own_reused)
FIGURE_3 = BlockAttnRes(sublayers_per_block=2)


@pytest.mark.parametrize(("ranks", "virtual", "blocks"), list(itertools.product((2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3))))
def test_blocks_sent_are_those_of_the_formulas(ranks, virtual, blocks):
    sublayers = 2 * blocks * ranks * virtual
    for cache, formula in zip(CACHES, FORMULAS, strict=True):
        plan = plan_pipeline(FIGURE_3, sublayers, 4, ranks=ranks, virtual=virtual, cache=cache)
        assert sum(hop.blocks for hop in plan.hops) == formula(ranks, virtual, blocks)


@pytest.mark.parametrize(("ranks", "virtual"), list(itertools.product((2, 4, 8), (1, 2, 4))))
def test_the_largest_hop_grows_with_ranks_and_not_with_stages(ranks, virtual):
    sublayers = 2 * ranks * virtual
    naive = plan_pipeline(FIGURE_3, sublayers, 4, ranks=ranks, virtual=virtual, cache="off")
    cached = plan_pipeline(FIGURE_3, sublayers, 4, ranks=ranks, virtual=virtual, cache="received")
    assert max(hop.blocks for hop in naive.hops) == peak_naive(ranks, virtual, 1)
    assert max(hop.blocks for hop in cached.hops) == peak_cached(ranks, virtual, 1)


def test_the_papers_worked_example_transmission_by_transmission():
    # four ranks, two stages each, a block spans two ranks (N_p = 1/2); b2, b4, b6 are the paper's b1, b2, b3
    sent = {
        cache: [[leaf.key for leaf in hop.leaves if leaf.is_source] for hop in plan.hops]
        for cache in CACHES
        for plan in [plan_pipeline(FIGURE_3, 8, 4, ranks=4, virtual=2, cache=cache)]
    }
    first_round = [["E"], ["E", "b2"], ["E", "b2"]]
    assert sent["off"] == [*first_round, *[["E", "b2", "b4"]] * 2, *[["E", "b2", "b4", "b6"]] * 2]
    assert sent["received"] == [*first_round, ["b2", "b4"], ["b2", "b4"], ["b4", "b6"], ["b4", "b6"]]
    assert sent["all"] == [*first_round, ["b2", "b4"], ["b4"], ["b4", "b6"], ["b6"]]
    assert [sum(map(len, sent[cache])) for cache in CACHES] == [19, 13, 11]


def test_formulas_take_parts_of_a_block():
    assert comm_naive(4, 2, Fraction(1, 2)) == 14
    assert comm_cached(4, 2, Fraction(1, 2)) == 11


@pytest.mark.parametrize(
    ("cuts", "widths"), [((31, 62), [4, 7]), ((47,), [5]), ((24, 47, 70), [3, 5, 7])], ids=["pp3", "pp2", "pp4"]
)
def test_payloads_of_a_deep_model_with_blocks_of_twelve_layers(cuts, widths):
    strategy = BlockAttnRes(sublayers_per_block=24)
    cuts = tuple(2 * layer for layer in cuts)
    plan = plan_pipeline(strategy, 186, 4, ranks=len(cuts) + 1, cuts=cuts, cache="off")
    assert [len(hop.leaves) for hop in plan.hops] == widths


def test_full_attnres_sends_each_output_once_to_each_rank():
    plan = plan_pipeline(FullAttnRes(), 24, 4, ranks=4, virtual=3, cache="all")
    for rank in range(4):
        arrived = [leaf.key for hop in plan.hops if hop.receiver == rank for leaf in hop.leaves]
        assert len(arrived) == len(set(arrived))


def test_a_v_hands_over_without_sending():
    plan = plan_pipeline(FIGURE_3, 8, 4, ranks=2, virtual=2, placement="v")
    assert plan.ranks == (0, 1, 1, 0)
    assert [hop.is_local for hop in plan.hops] == [False, True, False]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_state_goes_apart_and_together_at_every_cut(name):
    strategy, sublayers, dim = strategy_of(name, {}), 10, 32
    residual = bare_residual(strategy, sublayers, dim)
    state = residual.start(torch.randn(1, 3, dim))
    seen: dict[str, torch.Tensor] = {}
    for cut, layout in enumerate(layouts(strategy, sublayers, dim)):
        tensors = layout.flatten(state)
        assert len(tensors) == len(layout.leaves) == len({leaf.key for leaf in layout.leaves})
        for leaf, tensor in zip(layout.leaves, tensors, strict=True):
            assert seen.setdefault(leaf.key, tensor) is tensor  # one name, one tensor
        again = layout.unflatten(tensors)
        torch.testing.assert_close(residual.read(again, cut), residual.read(state, cut))  # one phase or two
        if cut < sublayers:
            state = residual.write(state, cut, torch.randn(1, 3, dim))


def test_prenorm_sends_one_tensor():
    plan = plan_pipeline(PreNorm(), 8, 4, ranks=4, virtual=2)
    assert [len(hop.leaves) for hop in plan.hops] == [1] * 7


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ((3, 3), r"leaves the stage from 3 to 3 without a sublayer"),
        ((5, 2), r"leaves the stage from 5 to 2 without a sublayer"),
        ((0, 4), r"leaves the stage from 0 to 0"),
        ((4, 8), r"cuts are \[4, 8\]; allowed: below 8, the number of sublayers"),
        ((4,), r"allowed: 2 of them, for 3 stages"),
    ],
)
def test_cuts_that_leave_a_stage_empty_are_refused(cuts, message):
    with pytest.raises(ConfigError, match=message):
        check_cuts(cuts, 8, 3)


def test_what_does_not_fit_is_refused_with_what_would():
    with pytest.raises(ConfigError, match="9 stages, but the model has 8 sublayers"):
        check_pipeline(8, ranks=3, virtual=3, microbatches=8, schedule="interleaved1f1b")
    with pytest.raises(ConfigError, match="too few for the schedule 1f1b on 4 ranks; allowed: 4 or more"):
        check_pipeline(8, ranks=4, microbatches=2)
    with pytest.raises(ConfigError, match="allowed: for example 4 or 6"):
        check_pipeline(8, ranks=2, virtual=2, microbatches=5, schedule="interleaved1f1b")
    with pytest.raises(ConfigError, match="virtual is 2 with the schedule gpipe"):
        check_pipeline(8, ranks=2, virtual=2, microbatches=4, schedule="gpipe")
    with pytest.raises(ConfigError, match="two stages on each rank"):
        check_pipeline(8, ranks=2, virtual=1, microbatches=4, schedule="zbv")
    with pytest.raises(ConfigError, match="schedule is 'fifo'; allowed: gpipe, 1f1b"):
        check_pipeline(8, ranks=2, microbatches=4, schedule="fifo")
    with pytest.raises(ConfigError, match="virtual is 0"):
        stage_ranks(2, 0)
    with pytest.raises(ConfigError, match="cache is 'some'"):
        plan_pipeline(PreNorm(), 8, 4, ranks=2, cache="some")  # pyright: ignore[reportArgumentType]


def test_suggested_numbers_of_micro_batches_do_fit():
    for ranks, count in itertools.product((2, 3, 4), range(1, 20)):
        for name in SCHEDULES:
            virtual = 1 if name in ("gpipe", "1f1b") else 2
            try:
                check_pipeline(24, ranks=ranks, virtual=virtual, microbatches=count, schedule=name)
            except ConfigError as error:
                words = str(error).partition("allowed: ")[2].replace(" or more", "").split()
                for fitting in (int(word) for word in words if word.isdigit()):
                    check_pipeline(24, ranks=ranks, virtual=virtual, microbatches=fitting, schedule=name)


def test_all_schedules_but_two_take_several_stages_on_a_rank():
    assert {name for name, kind in SCHEDULES.items() if not kind.is_multi} == {"gpipe", "1f1b"}
