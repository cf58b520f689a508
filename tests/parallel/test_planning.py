"""The planner's numbers against the paper, against counting by hand, and against runs."""

import dataclasses
import itertools
import random
import re
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from attnres.errors import ConfigError
from attnres.models import build
from attnres.parallel.formulas import comm_cached, comm_naive, comm_own_reused
from attnres.parallel.layout import layouts
from attnres.parallel.plan import plan_pipeline, stage_ranks
from attnres.parallel.planning.communication import (
    paper_counts,
    predicted_bytes,
    sources_sent,
    total_bytes,
)
from attnres.parallel.planning.divisions import check_tensor_ranks
from attnres.parallel.planning.hardware import Efficiency, link_between
from attnres.parallel.planning.io_table import depth_attention_flops, exact_mean, paper_table, traffic
from attnres.parallel.planning.memory import peak_sources, prefill_memory, training_memory
from attnres.parallel.planning.models import MODELS
from attnres.parallel.planning.orders import Action, schedule_order
from attnres.parallel.planning.planned import plan_run
from attnres.parallel.planning.report import make_report
from attnres.parallel.planning.request import PlanRequest
from attnres.parallel.planning.simulate import NO_HOPS, Hops, HopTime, StageTime, simulate
from attnres.parallel.planning.sizes import built_size, mean_keys
from attnres.parallel.planning.step import balanced_cuts
from attnres.parallel.planning.table import shown
from attnres.parallel.planning.tables_layout import training_table
from attnres.parallel.planning.tables_model import summary_table
from attnres.parallel.schedules import SCHEDULES, check_pipeline, schedule_kind
from attnres.parallel.tensor import parallelize
from attnres.residual import STRATEGIES, BlockAttnRes, FullAttnRes, PreNorm, reads
from attnres.residual.costs import costs
from models.small import ALL_CONFIGS, llama
from parallel.work_pipeline import DIM, ROWS, TOKENS, Case, held_at_peak, pipeline_step

BLOCK = BlockAttnRes(sublayers_per_block=2)
ONE_PHASE = BlockAttnRes(sublayers_per_block=3, phases="one")

# --- the paper's table -----------------------------------------------------------------------------------------------


def test_the_papers_example_comes_out_exactly():
    rows = {row.scheme: row for row in paper_table(128, 16, streams=4)}
    assert {name: row.total for name, row in rows.items()} == {
        "standard residual": 3,
        "mHC, 4 streams": 34,
        "Full AttnRes, naive": 130,
        "Full AttnRes, two phases": 24,
        "Block AttnRes, naive": Fraction(103, 8),
        "Block AttnRes, two phases": Fraction(11, 2),
    }
    assert rows["mHC, 4 streams"].scalars == 48
    assert (rows["Block AttnRes, two phases"].read, rows["Block AttnRes, two phases"].write) == (Fraction(7, 2), 2)


@pytest.mark.parametrize(("depth", "size"), [(12, 3), (128, 16), (20, 20), (8, 1)])
def test_the_formulas_of_full_attnres_are_its_sums(depth, size):
    rows = {row.scheme: row for row in paper_table(depth, size)}
    blocks = depth // size
    phase_1 = sum(2 * (n - 1) * size for n in range(1, blocks + 1))  # paper, Eq. 11
    phase_2 = blocks * sum(2 * (t - 1) for t in range(1, size + 1))  # Eq. 14
    assert rows["Full AttnRes, two phases"].read == Fraction(phase_1 + phase_2, depth)
    assert rows["Full AttnRes, naive"].read == Fraction(sum(2 * layer for layer in range(1, depth + 1)), depth)


@pytest.mark.parametrize(
    "strategy", [BLOCK, ONE_PHASE, FullAttnRes(phases="one"), BlockAttnRes(num_blocks=2), PreNorm()], ids=str
)
@pytest.mark.parametrize("depth", [4, 7, 12])
def test_forward_traffic_of_single_reads_is_what_running_the_strategy_counts(strategy, depth):
    forward, _ = exact_mean(traffic(strategy, depth, 8, element_bytes=2))
    assert forward == pytest.approx(costs(strategy, depth, 8).moved, rel=1e-12)


def test_traffic_in_two_phases_is_that_of_a_hand_count():
    rows = traffic(BlockAttnRes(sublayers_per_block=2, phases="two"), 4, 8, element_bytes=2)
    # E alone; E and the partial sum, and one more to add; E and b2 far, for two reads, their result out and in, h out
    assert [row.forward for row in rows] == [0, 3 + 3, 1 + 2 + 1, 1 + 2 + 1 + 1 + 3, 4]
    far = (1 + 2 * 2) * 2 / 2 + 2
    assert [row.backward for row in rows] == [3, 10 + 1, far + 1, far + 5 + 1, 15 + 1]


def test_traffic_of_whole_blocks_grows_by_less_in_two_phases():
    one, two = (
        exact_mean(traffic(BlockAttnRes(sublayers_per_block=8, phases=phases), 64, 8, element_bytes=2))
        for phases in ("one", "two")
    )
    assert two[0] < one[0]
    assert two[1] < one[1]


def test_depth_attention_is_counted_read_by_read():
    found = depth_attention_flops(BLOCK, 6, 10)
    counts = [len(sources) for sources in reads(6, BLOCK)]
    assert counts == [1, 2, 2, 3, 3, 4, 4]
    assert found == (0, 120 + 10, 120, 180 + 10, 180, 240 + 10, 240)
    assert depth_attention_flops(PreNorm(), 6, 10) is None


# --- tensor ranks ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[3, 4, 8])
def tensor_mesh(request):
    """A mesh of so many ranks, of which this process is the only one there."""
    torch.distributed.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield init_device_mesh("cpu", (request.param,), mesh_dim_names=("tensor",))
    torch.distributed.destroy_process_group()


def _is_refused(do, *arguments):
    try:
        do(*arguments)
    except ConfigError as error:
        assert "tensor ranks do not divide" in str(error)  # noqa: PT017
        return True
    return False


def test_the_planner_refuses_the_widths_that_a_run_refuses_and_no_others(tensor_mesh):
    ranks, seen = tensor_mesh.size(), set()
    for family in ("llama", "qwen3", "phi3", "olmo2", "gemma3", "gpt_neox"):
        for changes in ({}, {"num_attention_heads": 8}, {"intermediate_size": 30}):
            config = ALL_CONFIGS[family](1, **changes)
            widths = built_size(family, config, BLOCK, 16).widths
            planned = _is_refused(check_tensor_ranks, widths, ranks)
            with torch.device("meta"):
                model = build(config, BLOCK, dtype=torch.float32)
            refused = _is_refused(parallelize, model, tensor_mesh)
            if any(width.repeats(ranks) for width in widths):
                assert refused
            else:
                assert planned == refused, (family, changes)
            seen.add(planned)
    assert seen == ({True} if ranks == 3 else {True, False})


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "told"),
    [
        ("llama", {}, 3, "num_attention_heads is 4, which 3 tensor ranks do not divide; allowed here: 1, 2, 4"),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48}, 4,
         "num_key_value_heads is 6, which 4 tensor ranks do not divide; allowed here: 1, 2, 3, 6, 12"),
        ("llama", {"intermediate_size": 27}, 2, "inner width of LlamaMLP is 27, which 2 tensor ranks do not divide"),
        ("gpt2", {"n_inner": 27}, 2, "inner width of GPT2MLP is 27, which 2 tensor ranks do not divide"),
        ("kimi_linear", {"linear_num_heads": 3}, 2, "linear_num_heads is 3, which 2 tensor ranks do not divide"),
        ("kimi_linear", {"moe_intermediate_size": 15, "num_local_experts": 5}, 2,
         "inner width of KimiLinearExperts is 15 (and the number of experts 5), which 2 tensor ranks do not divide"),
        ("deepseek_v3", {"moe_intermediate_size": 15}, 2, "inner width of DeepseekV3MLP is 15"),
        ("qwen3_moe", {"intermediate_size": 27}, 2, "inner width of Qwen3MoeMLP is 27"),
    ],
)  # fmt: skip
def test_tensor_ranks_that_do_not_divide_a_width_are_refused(family, changes, ranks, told):
    widths = built_size(family, ALL_CONFIGS[family](**changes), BLOCK, 16).widths
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_tensor_ranks(widths, ranks)


def test_experts_may_be_handed_out_and_heads_repeated():
    whole = built_size("", ALL_CONFIGS["qwen3_moe"](moe_intermediate_size=15), BLOCK, 16).widths
    check_tensor_ranks(whole, 4)  # four experts of width 15, and two key and value heads
    assert [width.name for width in whole if width.repeats(4)] == ["num_key_value_heads"]
    with pytest.raises(ConfigError, match="num_attention_heads is 4, which 8 tensor ranks"):
        check_tensor_ranks(whole, 8)


def test_every_known_model_goes_on_eight_tensor_ranks_and_says_which_heads_repeat_on_more():
    for name, known in MODELS.items():
        plan_run(PlanRequest(model=name, tensor=8))
        if callable(known.shape):
            with pytest.raises(ConfigError, match=r"heads is .* which 3 tensor ranks do not divide"):
                plan_run(PlanRequest(model=name, tensor=3))
    notes = [summary_table(plan_run(PlanRequest(model="llama-3.1-8b", tensor=ranks))).notes for ranks in (8, 16)]
    assert len(notes[0]) == 1
    assert "keep the embedding and a tied head whole" in notes[0][0]
    assert re.search("num_key_value_heads is 8 and tensor is 16: 2 ranks each have the same head", notes[1][1])
    assert summary_table(plan_run(PlanRequest(model="llama-3.1-8b"))).notes == ()
    experts = summary_table(plan_run(PlanRequest(model="kimi-linear-48b", tensor=8))).notes
    assert any("a model with experts" in note for note in experts)


def test_a_strategy_that_looks_at_other_tokens_is_for_one_tensor_rank(tmp_path):
    crossing = next(kind for kind in STRATEGIES.values() if kind.crosses_tokens)
    llama().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    plan_run(PlanRequest(config=config, residual=crossing()))
    with pytest.raises(ConfigError, match=r"tensor is 2 and .* looks at other tokens.*allowed: 1"):
        plan_run(PlanRequest(config=config, residual=crossing(), tensor=2))


# --- model sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(ALL_CONFIGS))
def test_parts_of_a_model_add_up_to_all_its_parameters(family):
    config = ALL_CONFIGS[family]()
    size = built_size(family, config, BLOCK, context=16)
    model = build(config, BLOCK)
    assert size.parameters == model.num_parameters()
    assert size.num_sublayers == model.base_model.residual.num_sublayers
    assert 0 < size.active <= size.parameters
    assert all(row.mixing_flops >= 0 and row.kept_numbers > 2 * size.dim for row in size.sublayers)


def _counted(config, context):
    model = build(config, PreNorm(), dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(3, 90, (1, context)), use_cache=False)
    return counter.get_total_flops()


def test_operations_are_those_that_pytorch_counts():
    context, config = 16, llama(layers=3)
    size = built_size("", config, PreNorm(), context)
    weights = context * 2 * (sum(row.multiplied for row in size.sublayers) + size.head)
    full_square = context * sum(row.mixing_flops for row in size.sublayers) * context / mean_keys(context)
    rope = _counted(config, context) - weights - full_square
    assert 0 <= rope <= 2 * context * config.head_dim  # the angles of positions are an outer product


def test_operations_of_experts_are_those_of_the_chosen_ones():
    config = ALL_CONFIGS["qwen3_moe"]()
    one = built_size("", config, PreNorm(), 16)
    config.num_experts_per_tok += 1
    two = built_size("", config, PreNorm(), 16)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    more = [b.multiplied - a.multiplied for a, b in zip(one.sublayers, two.sublayers, strict=True)]
    assert set(more) == {0, expert}


def test_keys_of_a_token_are_counted_one_by_one():
    for context, window in itertools.product((1, 2, 7, 16), (None, 1, 3, 16, 40)):
        seen = [min(at + 1, window or context) for at in range(context)]
        assert mean_keys(context, window) == pytest.approx(sum(seen) / context)


# --- communication ---------------------------------------------------------------------------------------------------


def test_figure_3_takes_13_transmissions_with_the_cache_and_19_without():
    counts = {
        cache: sources_sent(plan_pipeline(BLOCK, 8, 4, ranks=4, virtual=2, cache=cache), embedding=True)
        for cache in ("received", "off")
    }
    assert counts == {"received": 13, "off": 19}


@pytest.mark.parametrize(("ranks", "virtual", "per_stage"), [*itertools.product((2, 3, 4), (1, 2, 3), (1, 2))])
def test_blocks_sent_are_the_papers_formulas_where_stages_end_blocks(ranks, virtual, per_stage):
    depth = 2 * per_stage * ranks * virtual
    formulas = {"off": comm_naive, "received": comm_cached, "all": comm_own_reused}
    for cache, formula in formulas.items():
        plan = plan_pipeline(BLOCK, depth, 4, ranks=ranks, virtual=virtual, cache=cache)
        assert sources_sent(plan) == formula(ranks, virtual, per_stage)
        counts = paper_counts(BLOCK, plan)
        assert counts.is_exact
        assert getattr(counts, cache) == formula(ranks, virtual, per_stage)


def test_the_papers_formulas_are_not_given_for_other_layouts():
    assert paper_counts(BLOCK, plan_pipeline(BLOCK, 8, 4, ranks=2, virtual=2, placement="v")) is None
    assert paper_counts(PreNorm(), plan_pipeline(PreNorm(), 8, 4, ranks=2)) is None
    assert not paper_counts(BLOCK, plan_pipeline(BLOCK, 9, 4, ranks=3)).is_exact


CASES = [
    (2, Case()),
    (2, Case(schedule="interleaved1f1b", virtual=2, cuts=(2, 5, 9), dtype=torch.bfloat16)),
    (2, Case(schedule="interleaved1f1b", virtual=3, cache="received", dtype=torch.float32)),
    (4, Case(schedule="interleavedzerobubble", virtual=2, cache="off")),
    (2, Case(schedule="zbv", virtual=2, dtype=torch.bfloat16)),
    (2, Case(schedule="loopedbfs", virtual=2, strategy=PreNorm())),
]


def _plan_of(case, ranks):
    return plan_pipeline(
        case.strategy,
        2 * case.layers,
        DIM,
        ranks=ranks,
        virtual=case.virtual,
        cuts=case.cuts,
        cache=case.cache,
        placement=schedule_kind(case.schedule).placement,
    )


@pytest.mark.parametrize(("ranks", "case"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_predicted_bytes_are_the_ledgers_of_a_run(processes, ranks, case):
    results = processes.run(ranks, pipeline_step, case)
    plan = _plan_of(case, ranks)
    rows = predicted_bytes(
        plan,
        tokens=ROWS * TOKENS,
        element_bytes=case.dtype.itemsize,
        microbatches=case.microbatches,
    )
    ledger = [row for result in results for row in result["rows"]]
    assert sorted(map(str, rows)) == sorted(map(str, ledger))
    assert total_bytes(rows) == sum(row.bytes for row in ledger) > 0


def test_several_streams_in_one_tensor_have_their_size():
    assert {leaf.width for layout in layouts(STRATEGIES["mhc"](), 4, 8) for leaf in layout.leaves} == {4 * 8}
    assert {leaf.width for layout in layouts(BLOCK, 4, 8) for leaf in layout.leaves} == {8}


def test_links_are_nvlink_inside_a_node_only():
    names = [link_between("node", rank, rank + 1, tensor_ranks=2).name for rank in range(5)]
    assert names == ["NVLink 4"] * 3 + ["InfiniBand NDR", "NVLink 4"]
    assert link_between("infiniband", 0, 1, tensor_ranks=1).name == "InfiniBand NDR"


# --- orders ----------------------------------------------------------------------------------------------------------


class _Recorder:
    """A stage that notes what a schedule makes it do; nothing is sent."""

    def __init__(self, rank, ranks):
        self.num_stages, self.stage_index, self.is_first, self.is_last = ranks, rank, rank == 0, rank == ranks - 1
        self.done = []

    def forward_one_chunk(self, index, *arguments, **options):
        self.done.append(Action(self.stage_index, "F", index))

    def backward_one_chunk(self, index, *arguments, **options):
        self.done.append(Action(self.stage_index, "B", index))

    def __getattr__(self, name):
        return lambda *arguments, **options: []


@pytest.mark.parametrize(("name", "made"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 3), (2, 2), (3, 5), (4, 4), (4, 9)])
def test_orders_of_single_stages_are_those_that_pytorch_runs(name, made, ranks, microbatches):
    for rank, actions in enumerate(
        schedule_order(schedule_kind(name), ranks=ranks, virtual=1, microbatches=microbatches)
    ):
        stage = _Recorder(rank, ranks)
        schedule = made(stage, microbatches)
        schedule._initialize_stage = lambda *arguments, **options: None
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        assert tuple(stage.done) == tuple(action for action in actions if action.work != "R")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_every_order_does_every_piece_of_work_once_and_can_be_worked_through(name, ranks, microbatches):
    kind = schedule_kind(name)
    virtual = 2 if kind.is_multi else 1
    check_pipeline(64, ranks=ranks, microbatches=microbatches, schedule=name, virtual=virtual)
    order = schedule_order(kind, ranks=ranks, virtual=virtual, microbatches=microbatches)
    places = stage_ranks(ranks, virtual, kind.placement)
    for rank, actions in enumerate(order):
        assert {action.stage for action in actions} == {stage for stage, at in enumerate(places) if at == rank}
    done = [action for actions in order for action in actions]
    assert len(set(done)) == len(done)
    for stage, index in itertools.product(range(len(places)), range(microbatches)):
        works = [action.work for action in done if (action.stage, action.microbatch) == (stage, index)]
        assert works.pop(0) == "R" if stage and places[stage - 1] != places[stage] else True
        assert works in (["F", "B"], ["F", "I", "W"])
    times = [StageTime(forward=1.0, backward_inputs=1.0, backward_weights=1.0)] * len(places)
    timeline = simulate(order, places, times, NO_HOPS)
    assert timeline.mean_busy == 3 * virtual * microbatches
    assert 0 < timeline.bubble_fraction < 1


# --- simulated steps -------------------------------------------------------------------------------------------------


def _simulated(name, ranks, microbatches, virtual=1, hops=NO_HOPS, forward=1.0, backward=2.0):
    order = schedule_order(schedule_kind(name), ranks=ranks, virtual=virtual, microbatches=microbatches)
    time = StageTime(forward=forward, backward_inputs=backward / 2, backward_weights=backward / 2)
    places = stage_ranks(ranks, virtual, schedule_kind(name).placement)
    return simulate(order, places, [time] * len(places), hops)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 2), (2, 8), (4, 4), (4, 16)])
def test_bubbles_of_gpipe_and_1f1b_are_the_textbooks(name, ranks, microbatches):
    timeline = _simulated(name, ranks, microbatches)
    assert timeline.seconds == pytest.approx((microbatches + ranks - 1) * 3.0)
    assert timeline.bubble_fraction == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert timeline.bubble_overhead == pytest.approx((ranks - 1) / microbatches)


def test_bubbles_of_interleaved_1f1b_are_smaller_by_the_number_of_stages():
    for virtual in (2, 4):
        timeline = _simulated("interleaved1f1b", 4, 8, virtual=virtual, backward=1.0)
        assert timeline.bubble_overhead == pytest.approx((4 - 1) / (8 * virtual))


def test_a_v_shaped_schedule_has_fewer_bubbles_than_1f1b():
    assert _simulated("zbv", 4, 8, virtual=2).bubble_fraction < _simulated("1f1b", 4, 8).bubble_fraction


def _hops(stages, forward=0.0, backward=0.0, latency=0.0):
    def made(seconds):
        return {stage: HopTime(occupied=seconds, latency=latency) for stage in stages}

    return Hops(forward=made(forward), backward=made(backward))


def test_a_hop_slower_than_the_work_is_exposed_by_what_a_hand_computes():
    base = _simulated("gpipe", 2, 4, forward=1.0, backward=1.0)
    slow = _simulated("gpipe", 2, 4, forward=1.0, backward=1.0, hops=_hops([1], forward=3.0))
    assert base.seconds == 10
    assert slow.seconds == 19  # the link takes 4 * 3 for what hides 3 * 1
    assert [transfer.start for transfer in slow.transfers if transfer.direction == "forward"] == [1, 4, 7, 10]


def test_a_hop_faster_than_the_work_is_exposed_once_each_way():
    base = _simulated("gpipe", 2, 8)
    hopped = _simulated("gpipe", 2, 8, hops=_hops([1], forward=0.5, backward=0.25, latency=0.125))
    assert hopped.seconds - base.seconds == pytest.approx(0.5 + 0.25 + 2 * 0.125)


def test_transfers_there_and_back_take_different_links():
    transfers = _simulated("1f1b", 2, 2, hops=_hops([1], forward=5.0, backward=5.0)).transfers
    assert {(t.direction, t.sender, t.receiver) for t in transfers} == {("forward", 0, 1), ("backward", 1, 0)}


def test_one_link_sends_one_thing_at_a_time():
    timeline = _simulated("interleaved1f1b", 2, 8, virtual=3, hops=_hops(range(1, 6), forward=2.0, backward=3.0))
    for pair in ((0, 1), (1, 0)):
        spans = sorted((t.start, t.end) for t in timeline.transfers if (t.sender, t.receiver) == pair)
        assert len(spans) > 8
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_no_rank_does_two_things_at_once_and_nothing_starts_before_its_input():
    timeline = _simulated("zbv", 4, 8, virtual=2, hops=_hops(range(1, 8), forward=0.3, backward=0.7, latency=0.1))
    ends = {event.action: event.end for event in timeline.events}
    for rank in range(4):
        events = [event for event in timeline.events if event.rank == rank]
        assert all(before.end <= after.start for before, after in itertools.pairwise(events))
    for event in timeline.events:
        if event.action.work == "F" and event.action.stage:
            assert event.start >= ends[Action(event.action.stage - 1, "F", event.action.microbatch)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_more_work_or_slower_hops_never_make_a_step_shorter(name):
    kind, drawn = schedule_kind(name), random.Random(0)
    virtual = 2 if kind.is_multi else 1
    order = schedule_order(kind, ranks=4, virtual=virtual, microbatches=8)
    places = stage_ranks(4, virtual, kind.placement)
    for _ in range(20):
        times = [StageTime(**{f.name: drawn.random() for f in dataclasses.fields(StageTime)}) for _ in places]
        forward, backward = ({s: HopTime(occupied=drawn.random()) for s in range(1, len(places))} for _ in range(2))
        seconds = simulate(order, places, times, Hops(forward=forward, backward=backward)).seconds
        at = drawn.randrange(1, len(places))
        slower = list(times)
        slower[at] = dataclasses.replace(times[at], forward=times[at].forward + drawn.random())
        assert simulate(order, places, slower, Hops(forward=forward, backward=backward)).seconds >= seconds
        late = {**forward, at: HopTime(occupied=forward[at].occupied + drawn.random(), latency=drawn.random())}
        assert simulate(order, places, times, Hops(forward=late, backward=backward)).seconds >= seconds
        assert simulate(order, places, times, NO_HOPS).seconds <= seconds


def test_an_order_that_waits_for_itself_is_refused():
    order = ((Action(0, "B", 0), Action(0, "F", 0)), (Action(1, "F", 0), Action(1, "B", 0)))
    with pytest.raises(ConfigError, match="every rank waits"):
        simulate(order, (0, 1), [StageTime(forward=1, backward_inputs=1, backward_weights=0)] * 2, NO_HOPS)


def test_balanced_cuts_are_the_best_of_all():
    drawn = random.Random(1)
    for depth, stages in ((5, 2), (7, 3), (8, 4), (6, 6)):
        rows = [
            SimpleNamespace(multiplied=drawn.randrange(1, 9), mixing_flops=drawn.randrange(3)) for _ in range(depth)
        ]
        size = SimpleNamespace(sublayers=rows, num_sublayers=depth, head=4)
        request = SimpleNamespace(pipeline=stages, virtual=1)
        work = [2 * row.multiplied + row.mixing_flops for row in rows]
        work[-1] += 2 * size.head

        def slowest(cuts, work=work, depth=depth):
            return max(sum(work[a:b]) for a, b in itertools.pairwise((0, *cuts, depth)))

        best = min(map(slowest, itertools.combinations(range(1, depth), stages - 1)))
        cuts = balanced_cuts(size, request)
        assert len(cuts) == stages - 1
        assert slowest(cuts) == best


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_papers_prompt_takes_15_gigabytes_then_1_9_then_less_than_0_3():
    planned = plan_run(PlanRequest(model="kimi-k3", tensor=8, prompt=2**17, chunk=2**14))
    memory = prefill_memory(planned.size, planned.arm.plan, planned.strategy, planned.request)
    assert memory.whole == 8 * 2**17 * 7168 * 2 == 15032385536
    assert memory.shared == 1879048192
    assert memory.chunked == 234881024 < 0.3e9
    assert memory.held == memory.chunked * 9 / 8  # the embedding as well; at a block's end there is no partial sum


def _memory(config, **request):
    planned = plan_run(PlanRequest(config=config, residual=BLOCK, context=8, **request))
    return planned, training_memory(planned.size, planned.arm.plan, planned.order, BLOCK, planned.request)


@pytest.fixture
def config(tmp_path):
    llama(layers=4).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_every_parameter_is_on_one_rank_and_shares_divide_it(config):
    planned, ranks = _memory(config, pipeline=4, microbatches=4)
    assert sum(rank.parameters for rank in ranks) == planned.size.parameters
    assert [rank.weights for rank in ranks] == [4 * rank.parameters for rank in ranks]
    _, shared = _memory(config, pipeline=4, microbatches=4, tensor=2, data=4, sharding="fsdp")
    assert sum(rank.parameters for rank in shared) == planned.size.parameters / 8
    _, copied = _memory(config, pipeline=4, microbatches=4, tensor=2, data=4)
    assert sum(rank.parameters for rank in copied) == planned.size.parameters / 2


def test_muon_keeps_one_number_for_a_matrix_and_two_for_the_rest(config):
    planned, (adamw,) = _memory(config)
    _, (muon,) = _memory(config, optimizer="muon")
    model = build(llama(layers=4), BLOCK)
    layers = model.base_model.layers
    matrices = sum(p.numel() for name, p in layers.named_parameters() if p.ndim == 2)
    assert adamw.optimizer == 8 * planned.size.parameters
    assert muon.optimizer == 8 * (planned.size.parameters - matrices) + 4 * matrices


def test_a_rank_holds_as_many_micro_batches_as_its_schedule_lets_it(config):
    _, gpipe = _memory(config, pipeline=4, microbatches=6, schedule="gpipe")
    _, ordered = _memory(config, pipeline=4, microbatches=6, schedule="1f1b")
    assert [rank.microbatches for rank in gpipe] == [6] * 4
    assert [rank.microbatches for rank in ordered] == [4, 3, 2, 1]


def _sources_held(config, **request):
    _, ranks = _memory(config, pipeline=2, virtual=2, **request)
    return [rank.sources / (8 * 32 * 2) for rank in ranks]


def test_sources_of_a_rank_are_counted_once_with_the_cache(config):
    held = {cache: _sources_held(config, microbatches=2, cache=cache) for cache in ("all", "received", "off")}
    # Both micro-batches are in the earlier stage of a rank. Rank 0: stage 0 makes E and b2, stage 2 is sent b4 and
    # makes b6. Rank 1: stage 1 is sent E and b2 and makes b4; stage 3 is sent b6 and makes b8 for one of them, and
    # there is memory for b6 of the other. With less of a cache b2 and b4 come again, or everything does
    assert held["all"] == [2 * (2 + 2), 2 * 3 + (1 + 1) + 1]
    assert held["received"] == [2 * (2 + 3), 2 * 3 + (2 + 1) + 2]
    assert held["off"] == [2 * (2 + 4), 2 * 3 + (4 + 1) + 4]


def test_what_a_v_hands_over_on_a_rank_is_no_second_copy(config):
    held = {cache: _sources_held(config, microbatches=1, schedule="zbv", cache=cache) for cache in ("all", "off")}
    # rank 1: stage 1 is sent E and b2 and makes b4, which stage 2 takes over, to make b6
    assert held["all"][1] == held["off"][1] == 2 + 1 + 1
    assert (held["all"][0], held["off"][0]) == (2 + 3, 2 + 5)


@pytest.mark.parametrize(("ranks", "case"), CASES[:5], ids=lambda value: getattr(value, "name", str(value)))
def test_the_sources_that_a_run_holds_are_no_more_than_planned_and_not_much_less(processes, ranks, case):
    kind = schedule_kind(case.schedule)
    order = schedule_order(kind, ranks=ranks, virtual=case.virtual, microbatches=case.microbatches)
    results = processes.run(ranks, held_at_peak, case)
    for actions, (held, _) in zip(order, results, strict=True):
        planned = peak_sources(_plan_of(case, ranks), actions) * ROWS * TOKENS * DIM * case.dtype.itemsize
        # a run is looked at after each forward pass, without what its end makes and what is kept for weights alone
        assert held <= planned <= 2 * held


def test_checkpointing_keeps_one_tensor_a_sublayer(config):
    planned, (kept,) = _memory(config, microbatches=1)
    _, (whole,) = _memory(config, microbatches=1, checkpointing=False)
    largest = max(row.kept_numbers for row in planned.size.sublayers)
    (note,) = [n for n in training_table(planned).notes if "checkpointing" in n]
    assert note == f"Activations without checkpointing: up to {shown(whole.activations, 'bytes')} on a rank."
    assert kept.activations == (8 * planned.size.dim + largest) * 8 * 2
    assert whole.activations == sum(row.kept_numbers for row in planned.size.sublayers) * 8 * 2


def test_checkpoints_keep_what_is_new_in_the_state(config):
    streams = STRATEGIES["mhc"]()
    kept, dense = {}, STRATEGIES["denseformer"]()
    for strategy in (PreNorm(), streams, dense):
        planned = plan_run(PlanRequest(config=config, residual=strategy, context=8, microbatches=1))
        (rank,) = training_memory(planned.size, planned.arm.plan, planned.order, strategy, planned.request)
        kept[strategy] = rank.activations
        assert rank.sources == 0
    assert kept[streams] - kept[PreNorm()] == 3 * 8 * 32 * 8 * 2
    assert kept[dense] - kept[PreNorm()] == 3 * 8 * 32 * 2  # outputs stay, and each layer but the last adds a mix


# --- the whole report ------------------------------------------------------------------------------------------------


def test_every_number_names_its_formula(config):
    report = make_report(PlanRequest(config=config, residual=BLOCK, pipeline=2, virtual=2, microbatches=4)).to_dict()
    assert report["format"] == 1
    assert set(report["tables"]) == {
        "summary",
        "parameters",
        "flops",
        "io",
        "residual_traffic",
        "hops",
        "communication",
        "training_memory",
        "prefill_memory",
        "stages",
        "step",
        "overhead",
        "assumptions",
    }
    for table in report["tables"].values():
        for row in table["rows"]:
            for key, value in row.items():
                if isinstance(value, int | float) and table["units"].get(key) != "index":
                    assert row.get("formula") or table["formulas"][key], (table["title"], key)


def test_parts_of_the_overhead_add_up_and_prenorm_has_none(config):
    for schedule, virtual in (("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2)):
        planned = plan_run(
            PlanRequest(config=config, residual=BLOCK, pipeline=2, virtual=virtual, schedule=schedule, microbatches=4)
        )
        found = planned.overhead
        assert found.traffic + found.bubbles + found.communication == pytest.approx(found.total)
        assert found.traffic > 0
        assert found.total == planned.arm.timeline.seconds / planned.base.timeline.seconds - 1
    plain = plan_run(PlanRequest(config=config, residual=PreNorm(), pipeline=2, microbatches=4)).overhead
    assert (plain.total, plain.traffic, plain.bubbles, plain.communication) == (0, 0, 0, 0)


def test_a_slower_memory_or_link_costs_more_and_the_cache_less(config):
    def step(cache="all", **efficiency):
        request = PlanRequest(
            config=config,
            residual=BLOCK,
            pipeline=2,
            virtual=2,
            microbatches=4,
            cache=cache,
            efficiency=Efficiency(**efficiency),
        )
        return plan_run(request).arm.timeline.seconds

    assert step(memory=0.2) > step()
    assert step(link=0.2) > step()
    assert step("all") <= step("received") <= step("off")


def test_kimi_linear_has_its_size_and_stays_below_four_percent():
    planned = plan_run(
        PlanRequest(model="kimi-linear-48b", pipeline=4, virtual=2, microbatches=16, balance=True, link="nvlink")
    )
    size = planned.size
    assert round((size.parameters - size.embedding - size.head) / 1e9) == 48
    assert round(size.active / 1e9) == 3
    assert size.residual == 2 * 2304 * 55
    assert len(planned.strategy.block_ends(54)) == 9
    assert 0 < planned.overhead.total < 0.04


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": "k3"}, "model is 'k3'; allowed: kimi-linear-48b"),
        ({}, "neither model nor config is given"),
        ({"model": "kimi-k3", "gpu": "b9"}, "gpu is 'b9'; allowed: h100, h200"),
        ({"model": "kimi-k3", "link": "tin"}, "link is 'tin'; allowed: node"),
        ({"model": "kimi-k3", "pipeline": 187, "microbatches": 187}, "187 stages, but the model has 186 sublayers"),
        ({"model": "kimi-k3", "pipeline": 2, "cuts": (3, 2)}, "allowed: 1 of them, for 2 stages"),
        ({"model": "kimi-k3", "pipeline": 2, "cuts": (3,), "balance": True}, "balance is set"),
        ({"model": "kimi-k3", "virtual": 0}, "virtual is 0; allowed: 1 or more"),
        ({"model": "kimi-k3", "schedule": "zbv"}, "allowed: 2"),
        ({"model": "kimi-k3", "pipeline": 4, "microbatches": 3}, "too few"),
        ({"model": "kimi-k3", "cache": "some"}, "cache is 'some'; allowed: all, received, off"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(settings, told):
    with pytest.raises(ConfigError, match=told) as error:
        make_report(PlanRequest(**settings))
    assert "\n" not in str(error.value)
