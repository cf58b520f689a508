"""A pipeline computes what one process computes: loss, every gradient, and the weights after many steps.

In float64 it is the same to the last bit. Where a rank reuses what it has, it adds up a source's gradients in another
order than one process does; the reference is then one process that passes tensors on by the same routes, in one
autograd graph and without any of the protocol.
"""

import itertools

import pytest
import torch

from attnres.errors import ConfigError
from attnres.experiments.arms import strategy_of
from attnres.parallel.schedules import SCHEDULES, check_pipeline
from attnres.residual import STRATEGIES, BlockAttnRes, FullAttnRes
from parallel.work_pipeline import (
    Case,
    adamw,
    cross_entropy,
    evaluate,
    evaluation_batch,
    held_at_peak,
    live_tensors,
    one_process_step,
    pipeline_step,
    pipeline_training,
    routed,
    routed_step,
    small_model,
    weights,
)

FULL = FullAttnRes(phases="one")
COVERING = [
    (1, Case()),
    (2, Case()),
    (4, Case(schedule="gpipe", microbatches=8)),
    (4, Case(cuts=(1, 6, 7), checkpointing="non_reentrant")),
    (2, Case(schedule="interleaved1f1b", virtual=2)),
    (2, Case(schedule="interleaved1f1b", virtual=3, cache="off", checkpointing="reentrant")),
    (4, Case(schedule="interleaved1f1b", virtual=3, cache="received", microbatches=8)),
    (4, Case(schedule="interleaved1f1b", virtual=2, strategy=FULL, cuts=(1, 2, 3, 5, 8, 9, 11))),
    (2, Case(schedule="loopedbfs", virtual=2, checkpointing="non_reentrant")),
    (2, Case(schedule="interleavedzerobubble", virtual=3)),
    (4, Case(schedule="interleavedzerobubble", virtual=2, cache="received", checkpointing="non_reentrant")),
    (2, Case(schedule="zbv", virtual=2)),
    (4, Case(schedule="zbv", virtual=2, cache="off", strategy=FULL)),
    (2, Case(schedule="dualpipev", virtual=2, checkpointing="non_reentrant")),
    (4, Case(schedule="dualpipev", virtual=2, microbatches=8)),
]


def is_one_order(case, ranks):
    """Whether gradients are added up in the order of the plain model: no rank has anything to reuse."""
    return case.virtual == 1 or ranks == 1 or case.cache == "off"


def reference(case, ranks):
    """Loss and gradients by one process: of the plain model where the order is the same, else by the plan's routes."""
    model = small_model(case)
    loss = one_process_step(model, case)
    plain = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    if is_one_order(case, ranks):
        return loss, plain, plain
    parts, plan = routed(case, ranks)
    assert routed_step(parts, plan, case) == loss
    same_order = {}
    for part in parts:
        same_order |= {name: value.grad for name, value in part.decoder.named_parameters() if value.grad is not None}
    return loss, same_order, plain


def check_step(processes, ranks, case):
    loss, exact, plain = reference(case, ranks)
    seen = set()
    for result in processes.run(ranks, pipeline_step, case):
        assert result["loss"] == loss
        assert result["held"] == 0
        for name, gradient in result["gradients"].items():
            seen.add(name)
            assert torch.equal(gradient, exact[name]), name
            torch.testing.assert_close(gradient, plain[name], rtol=1e-12, atol=1e-15)
    assert seen == set(plain)


@pytest.mark.parametrize(("ranks", "case"), COVERING, ids=[f"{ranks}-{case.name}" for ranks, case in COVERING])
def test_loss_and_every_gradient_are_those_of_one_process(processes, ranks, case):
    check_step(processes, ranks, case)


def _fits(case, ranks):
    try:
        check_pipeline(12, ranks=ranks, microbatches=case.microbatches, schedule=case.schedule, virtual=case.virtual)
    except ConfigError:
        return False
    return True


GRID = [
    (ranks, case)
    for ranks, schedule, virtual, microbatches, cache, checkpointing in itertools.product(
        (1, 2, 4), SCHEDULES, (1, 2, 3), (4, 8), ("all", "received", "off"), (None, "non_reentrant", "reentrant")
    )
    if _fits(
        case := Case(
            schedule=schedule,
            virtual=virtual,
            microbatches=microbatches,
            cache=cache,
            checkpointing=checkpointing,
        ),
        ranks,
    )
]


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize(("ranks", "case"), GRID, ids=[f"{ranks}-{case.name}" for ranks, case in GRID])
def test_the_whole_grid(processes, ranks, case):
    check_step(processes, ranks, case)


def test_the_grid_has_every_schedule_on_every_number_of_ranks():
    covered = {(ranks, case.schedule, case.virtual, case.microbatches) for ranks, case in GRID}
    assert {schedule for _, schedule, _, _ in covered} == set(SCHEDULES)
    assert {(ranks, virtual) for ranks, _, virtual, _ in covered} == set(itertools.product((1, 2, 4), (1, 2, 3)))


TRAINED = [
    (2, Case()),
    (2, Case(schedule="interleaved1f1b", virtual=2, microbatches=2)),
    (2, Case(schedule="interleavedzerobubble", virtual=2, microbatches=2)),
    (2, Case(schedule="zbv", virtual=2, microbatches=2, cache="received")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case"), TRAINED, ids=[f"{ranks}-{case.name}" for ranks, case in TRAINED])
def test_a_hundred_optimizer_steps_later_the_weights_are_the_same(processes, ranks, case):
    steps = 100
    model = small_model(case)
    optimizer = adamw([model])
    for step in range(steps):
        optimizer.zero_grad()
        one_process_step(model, case, step)
        optimizer.step()
    plain = exact = weights([model])
    if not is_one_order(case, ranks):
        parts, plan = routed(case, ranks)
        optimizer = adamw(parts)
        for step in range(steps):
            optimizer.zero_grad()
            routed_step(parts, plan, case, step)
            optimizer.step()
        exact = weights([part.decoder for part in parts])
    for result in processes.run(ranks, pipeline_training, case, steps):
        for name, weight in result.items():
            assert torch.equal(weight, exact[name]), name
            torch.testing.assert_close(weight, plain[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"dtype": torch.float32, "autocast": True}])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "interleavedzerobubble"])
def test_in_bfloat16_a_pipeline_is_as_exact_as_one_process(processes, options, schedule):
    virtual = 1 if schedule == "1f1b" else 2
    strategy = BlockAttnRes(sublayers_per_block=3)
    case = Case(schedule=schedule, virtual=virtual, strategy=strategy, **options)
    one, exact = small_model(case), small_model(Case(strategy=strategy))
    loss = one_process_step(one, case)
    one_process_step(exact, Case(strategy=strategy))
    wide = {name: parameter.grad for name, parameter in exact.named_parameters()}
    own_error = _error({name: parameter.grad for name, parameter in one.named_parameters()}, wide)
    results = processes.run(2, pipeline_step, case)
    merged = {name: gradient for result in results for name, gradient in result["gradients"].items()}
    assert results[0]["loss"] == results[1]["loss"]
    assert abs(results[0]["loss"] - loss) < 1e-6
    assert _error(merged, wide) < 1.1 * own_error


def _error(found, exact):
    """Distance of all gradients together, relative."""
    difference = sum((found[name].double() - exact[name]).square().sum() for name in exact)
    return (difference / sum(value.square().sum() for value in exact.values())).sqrt()


@pytest.mark.parametrize("phases", ["auto", "two"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_two_phase_reads_across_cuts(processes, phases, size):
    strategy = FullAttnRes(phases=phases) if size == 1 else BlockAttnRes(sublayers_per_block=size, phases=phases)
    case = Case(strategy=strategy, schedule="interleaved1f1b", virtual=2, cuts=(2, 5, 9))
    model = small_model(case)
    loss = one_process_step(model, case)
    for result in processes.run(2, pipeline_step, case):
        torch.testing.assert_close(result["loss"], loss, rtol=1e-13, atol=0)
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_runs_in_a_pipeline(processes, name):
    strategy = strategy_of(name, {})
    check_close(processes, Case(strategy=strategy, schedule="interleaved1f1b", virtual=2, microbatches=2, layers=4))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2", "smollm3"])
def test_every_kind_of_family_runs_in_a_pipeline(processes, family):
    check_close(processes, Case(family=family, layers=5, schedule="interleaved1f1b", virtual=2, microbatches=2))


@pytest.mark.parametrize("family", ["qwen3_moe", "kimi_linear", "deepseek_v3"])
def test_families_with_experts_run_in_a_pipeline(processes, family):  # their experts have no float64 kernel
    case = Case(family=family, layers=5, schedule="interleaved1f1b", virtual=2, microbatches=2, dtype=torch.float32)
    check_close(processes, case, tolerance=2e-4, smallest=1e-6)


def check_close(processes, case, *, tolerance=1e-9, smallest=1e-13):
    model = small_model(case)
    loss = one_process_step(model, case)
    seen = set()
    for result in processes.run(2, pipeline_step, case):
        torch.testing.assert_close(result["loss"], loss.double(), rtol=tolerance, atol=0)
        for name, gradient in result["gradients"].items():
            seen.add(name)
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=tolerance, atol=smallest)
    assert seen == {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("zbv", 2)])
def test_a_tied_head_has_both_gradients_on_both_stages(processes, schedule, virtual):
    case = Case(tied=True, schedule=schedule, virtual=virtual)
    check_close(processes, case)
    results = processes.run(2, pipeline_step, case)
    assert "model.embed_tokens.weight" in results[0]["tied"]


@pytest.mark.parametrize("schedule", ["interleaved1f1b", "zbv"])
def test_only_the_residual_path_trained(processes, schedule):
    check_close(processes, Case(frozen=True, schedule=schedule, virtual=2))
    check_close(processes, Case(frozen=True, tied=True, schedule=schedule, virtual=2))


def test_nothing_is_left_after_fifty_steps(processes):
    for counts in processes.run(2, live_tensors, Case(schedule="interleaved1f1b", virtual=2, microbatches=2), 50):
        assert len(counts) == 4
        assert len(set(counts)) == 1


@pytest.mark.parametrize("cache", ["all", "off"])
def test_a_rank_with_cache_holds_one_copy_of_each_source(processes, cache):
    case = Case(schedule="interleaved1f1b", virtual=3, cache=cache, strategy=FULL)
    for held, one_copy in processes.run(2, held_at_peak, case):
        if cache == "all":
            assert held == one_copy
        else:
            assert held > 1.2 * one_copy


def test_evaluation_takes_batches_of_any_size_between_steps(processes):
    case = Case(schedule="interleaved1f1b", virtual=2)
    model = small_model(case)
    step = one_process_step(model, case)
    model.eval()
    with torch.no_grad():
        expected = [
            cross_entropy(model(input_ids=inputs, use_cache=False).logits, targets)
            for inputs, targets in map(evaluation_batch, (3, 1, 2))
        ]
    for losses in processes.run(2, evaluate, case, (3, 1, 2)):
        torch.testing.assert_close(torch.stack(losses[:3]), torch.stack(expected), rtol=1e-12, atol=0)
        assert losses[3] == step


@pytest.mark.parametrize("phases", ["auto", "two"])
def test_split_backward_passes_with_two_phase_reads(processes, phases):
    strategy = BlockAttnRes(sublayers_per_block=3, phases=phases)
    for schedule in ("interleavedzerobubble", "zbv"):
        check_close(processes, Case(strategy=strategy, schedule=schedule, virtual=2, cuts=(2, 5, 9)))
