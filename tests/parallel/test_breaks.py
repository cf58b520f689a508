"""Unusual use of a pipeline: steps that add up, parts that are not trained, arguments, and mistakes that are told."""

import re

import pytest
import torch

from attnres.experiments.arms import strategy_of
from parallel.processes import RankError
from parallel.work_breaks import (
    after_a_loss_that_raises,
    bad_loss,
    cast_between_steps,
    different_evaluations,
    freeze,
    mask,
    masked,
    old_note,
    one_steps_the_other_evaluates,
    partly_frozen,
    plain_ddp,
    positions,
    refused,
    replicated,
    sharded,
    thawed,
    two_steps,
    wrong_argument,
)
from parallel.work_pipeline import (
    Case,
    batches,
    cross_entropy,
    evaluate,
    evaluation_batch,
    one_process_step,
    small_model,
)

INTERLEAVED = {"schedule": "interleaved1f1b", "virtual": 2}


def check(results, model):
    """All gradients of one process are there, and equal."""
    seen = set()
    for found in results:
        for name, gradient in found.items():
            seen.add(name)
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-13)
    assert seen == {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("case", [Case(tied=True), Case(tied=True, schedule="zbv", virtual=2), Case(**INTERLEAVED)])
def test_gradients_of_two_steps_add_up(processes, case):
    model = small_model(case)
    for step in range(2):
        one_process_step(model, case, step)
    check(processes.run(2, two_steps, case), model)


@pytest.mark.parametrize("which", ["lower", "all but the head"])
@pytest.mark.parametrize("schedule", ["interleaved1f1b", "interleavedzerobubble", "zbv"])
def test_what_is_trained_behind_what_is_not_has_its_gradients(processes, schedule, which):
    case = Case(schedule=schedule, virtual=2)
    model = small_model(case)
    freeze(model, which)
    one_process_step(model, case)
    check(processes.run(2, partly_frozen, case, which), model)


def test_a_parameter_that_is_trained_from_now_on_has_its_gradient(processes):
    case = Case()
    model = small_model(case)
    one_process_step(model, case)
    check(processes.run(2, thawed, case), model)


def test_weights_may_change_their_dtype_between_steps(processes):
    case = Case(dtype=torch.float32)
    expected = one_process_step(small_model(case).double(), case)
    for loss in processes.run(2, cast_between_steps, case):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_masks_and_positions_go_to_their_micro_batches(processes):
    case = Case(**INTERLEAVED)
    model = small_model(case)
    rows, places = mask(case).chunk(case.microbatches), positions(case).chunk(case.microbatches)
    total = 0.0
    for (inputs, targets), row, place in zip(batches(case), rows, places, strict=True):
        logits = model(input_ids=inputs, attention_mask=row, position_ids=place, use_cache=False).logits
        loss = cross_entropy(logits, targets) / case.microbatches
        loss.backward()
        total += loss.detach()
    results = processes.run(2, masked, case)
    torch.testing.assert_close(results[0]["loss"], total, rtol=1e-12, atol=0)
    check([result["gradients"] for result in results], model)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("attention_mask", torch.ones(16, 5), r"attention_mask has shape \[16, 5\]; allowed: 8 rows"),
        ("position_ids", torch.zeros(1, 5), r"position_ids has shape \[1, 5\]; allowed: 8 rows"),
        ("attention_mask", torch.tensor(1), r"attention_mask has shape \[\]; allowed: 8 rows"),
        ("attention_mask", {"full": None}, r"attention_mask is a dict; allowed: a tensor with a row for each sequence"),
        ("use_cache", False, r"use_cache is given; allowed: arguments that every stage can use"),
        ("token_type_ids", torch.zeros(8, 5), r"token_type_ids is given"),
    ],
)
def test_arguments_that_cannot_be_shared_out_are_refused(processes, name, value, expected):
    for message in processes.run(2, wrong_argument, name, value):
        assert re.match(rf"ConfigError: pipeline rank 0: {expected}", message)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleavedzerobubble"])
def test_every_placement_of_stages_evaluates(processes, schedule):
    case = Case(schedule=schedule, virtual=2)
    model = small_model(case).eval()
    with torch.no_grad():
        inputs, targets = evaluation_batch(3)
        expected = cross_entropy(model(input_ids=inputs, use_cache=False).logits, targets)
    for losses in processes.run(2, evaluate, case, (3,)):
        torch.testing.assert_close(losses[0], expected, rtol=1e-12, atol=0)


def test_several_stages_in_one_process_evaluate(processes):
    case = Case(**INTERLEAVED)
    ((*losses, step),) = processes.run(1, evaluate, case, (3, 1))
    assert step == one_process_step(small_model(case), case)
    model = small_model(case).eval()
    for (inputs, targets), loss in zip(map(evaluation_batch, (3, 1)), losses, strict=True):
        with torch.no_grad():
            expected = cross_entropy(model(input_ids=inputs, use_cache=False).logits, targets)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("schedule", ["interleavedzerobubble", "zbv"])
def test_a_strategy_whose_weights_meet_in_several_reads_runs_with_split_backward_passes(processes, schedule):
    case = Case(strategy=strategy_of("learned-block", {}), schedule=schedule, virtual=2, microbatches=2, layers=4)
    model = small_model(case)
    one_process_step(model, case)
    from parallel.work_pipeline import pipeline_step

    check([result["gradients"] for result in processes.run(2, pipeline_step, case)], model)


@pytest.mark.parametrize("case", [Case(), Case(**INTERLEAVED)])
def test_a_pipeline_goes_on_after_a_loss_that_raised(processes, case):
    ((first, loss),) = processes.run(1, after_a_loss_that_raises, case)
    assert first == "ValueError: no loss today"
    assert loss == one_process_step(small_model(case), case)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("socket", "RuntimeError: my own socket timed out"),
        ("vector", r"ConfigError: the loss is a tensor of shape \[2, 5\]; allowed: a tensor of one number"),
        ("number", r"ConfigError: the loss is 1\.0; allowed: a tensor of one number"),
        ("backward", "KeyError: 'nothing to go back to'"),
    ],
)
def test_what_is_wrong_with_a_loss_is_told_on_all_ranks(processes, kind, expected):
    with_the_loss, other = None, None
    other, with_the_loss = processes.run(2, bad_loss, kind, group_seconds=6)
    assert re.fullmatch(expected, with_the_loss)
    assert re.match(r"RankFailure: rank 0 stopped in a pipeline step, because rank 1 failed: ", other)
    assert expected.partition(": ")[2].replace("\\", "").strip("'")[:20] in other


def test_ranks_that_do_different_things_are_told(processes):
    for message in processes.run(2, one_steps_the_other_evaluates):
        assert re.match(
            r"ConfigError: pipeline rank 1 has \[an evaluation of \[2, 7\]\], pipeline rank 0 has \[4 ", message
        )
    for message in processes.run(2, different_evaluations):
        assert re.match(r"ConfigError: pipeline rank 1 has \[an evaluation of \[3, 7\]\]", message)


def test_a_mistake_that_all_recovered_from_is_not_blamed_later(processes):
    with pytest.raises(RankError) as caught:
        processes.run(3, old_note, group_seconds=15, timeout=40, grace_seconds=25)
    assert caught.value.results.keys() == {0, 1}
    for message in caught.value.results.values():
        assert "lost contact with rank 2" in message


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("classifier", "LlamaForSequenceClassification.score has parameters and is no language-model head"),
        (
            "tensor and pipeline",
            "ranks [0, 1] are tensor ranks and pipeline ranks of each other; allowed: two dimensions",
        ),
        ("pipeline, then tensor", "the model is a part of a pipeline"),
        ("ddp", "past the hooks of DistributedDataParallel; allowed: fully_shard of each stage as a whole"),
        ("layers", "when the layers that fully_shard divides are apart again"),
    ],
)
def test_what_does_not_go_together_is_refused(processes, what, expected):
    for message in processes.run(2, refused, what):
        assert message.startswith("UnsupportedModelError: ") or "ConfigError" in message
        assert expected in message


@pytest.mark.parametrize(
    ("case", "per_layer"),
    [(Case(), True), (Case(**INTERLEAVED, tied=True), True), (Case(schedule="zbv", virtual=2), False)],
)
def test_sharded_stages_add_up_over_steps_and_evaluations(processes, case, per_layer):
    model = small_model(case)
    for _ in range(2):
        one_process_step(model, case)
    check(processes.run(4, sharded, case, per_layer), model)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", [Case(), Case(tied=True), Case(schedule="interleaved1f1b", virtual=2)])
def test_stages_in_pytorchs_ddp_have_the_gradients_of_one_process(processes, case, ranks):
    model = small_model(case)
    one_process_step(model, case)
    check(processes.run(ranks, replicated, case), model)


@pytest.mark.parametrize("checkpointing", [None, "non_reentrant"])
def test_a_converted_model_in_pytorchs_ddp_has_the_gradients_of_one_process(processes, checkpointing):
    case = Case(microbatches=1, checkpointing=checkpointing)
    model = small_model(case)
    one_process_step(model, case)
    check(processes.run(2, plain_ddp, case), model)
