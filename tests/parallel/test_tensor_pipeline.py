"""Tensor ranks and pipeline ranks together: the same model, and the bytes of a hop divided by the tensor ranks."""

from collections import Counter
from typing import Any

import pytest

from attnres.residual import FullAttnRes, PreNorm
from attnres.residual.rivals.postnorm import PostNorm
from parallel.processes import RankError
from parallel.work_tensor_pipeline import (
    BLOCK,
    drop,
    groups,
    limits,
    lost,
    memory,
    misuse,
    own_logits,
    step,
    train,
    twice,
)

EXACT = 1e-12


def check(processes: Any, case: dict[str, Any], options: dict[str, Any]) -> None:
    results = processes.run(4, step, case, options)
    for result in results:
        error, name, count = result["gradient"]
        assert count > 0
        assert error < EXACT, name
        assert result["loss"] < EXACT
        assert result["evaluation"] < EXACT
        assert result["held"] == 0
        assert Counter(result["rows"]) == Counter(result["predicted"])


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ({}, {}),
        ({"tie_word_embeddings": True, "checkpointing": "no"}, {"schedule": "gpipe", "cuts": (3,)}),
        ({"strategy": PreNorm()}, {"cuts": (1,)}),
        ({"checkpointing": "reentrant"}, {"cuts": (1, 4, 5), "schedule": "interleaved1f1b", "virtual": 2}),
        ({"tie_word_embeddings": True}, {"schedule": "zbv", "virtual": 2}),
        ({}, {"schedule": "interleavedzerobubble", "virtual": 2, "microbatches": 6}),
        ({}, {"virtual": 2, "schedule": "loopedbfs", "cache": "off"}),
        ({"num_key_value_heads": 4}, {"pipeline": 1, "microbatches": 2}),
        ({"num_key_value_heads": 4}, {"pipeline": 4}),
    ],
    ids=[
        "1f1b",
        "inside a layer",
        "inside the first",
        "interleaved",
        "both ends on a rank",
        "split backward",
        "no cache",
        "one stage",
        "4",
    ],
)
def test_loss_gradients_and_bytes_are_those_of_one_process(processes, case, options):
    check(processes, case, options)


@pytest.mark.parametrize("strategy", [FullAttnRes(), PreNorm(), PostNorm()], ids=lambda strategy: strategy.label)
def test_other_strategies(processes, strategy):
    check(processes, {"strategy": strategy}, {})


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "phi3", "olmo2", "gpt_neox"])
def test_other_families(processes, family):
    check(processes, {"family": family}, {})


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("checkpointing", [None, "no", "reentrant"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": schedule, "virtual": virtual, "cache": cache}
        for schedule, virtual in (
            ("gpipe", 1),
            ("1f1b", 1),
            ("loopedbfs", 2),
            ("interleaved1f1b", 2),
            ("interleavedzerobubble", 2),
            ("zbv", 2),
            ("dualpipev", 2),
        )
        for cache in ("all", "received", "off")
    ],
    ids=str,
)
def test_every_schedule(processes, options, tied, checkpointing):
    check(processes, {"tie_word_embeddings": tied, "checkpointing": checkpointing, "strategy": BLOCK}, options)


@pytest.mark.parametrize("options", [{}, {"schedule": "interleaved1f1b", "virtual": 2}], ids=["1f1b", "interleaved"])
def test_weights_agree_after_training_with_clipping(processes, options):
    results = processes.run(4, train, 6, options)
    for result in results:
        for expected, found in result["norms"]:
            assert found == pytest.approx(expected, rel=1e-12)
        error, name, _ = result["weights"]
        assert error < 1e-10, name
    for first, second in ((0, 1), (2, 3)):
        queries, others = results[first]["queries"], results[second]["queries"]
        assert queries
        assert all((queries[name] == others[name]).all() for name in queries)


def test_losses_of_own_tokens_add_up(processes):
    for error, (gradient, name, count) in processes.run(4, own_logits):
        assert count > 0
        assert error < EXACT
        assert gradient < EXACT, name


def test_ranks_that_disagree_end_on_all_ranks_with_one_line(processes):
    for said in processes.run(4, misuse):
        assert "head is the embedding" in said["own logits, tied"]
        assert "tensor rank 1 has [pipeline rank" in said["other micro-batches"]
        assert "M=4" in said["other micro-batches"]
        assert "tensor ranks differ" in said["other shape"]
        assert "schedule is 'nonsense'; allowed: gpipe, 1f1b" in said["other schedule"]
        assert "has been replaced since its gradients are watched" in said["fsdp around stages"]
        assert (
            "3 micro-batches were given" in said["one rank has too few"]
            or "tensor ranks differ" in said["one rank has too few"]
        )


def test_weights_that_differ_are_told_by_parallelize_on_every_rank_of_the_group(processes):
    results = processes.run(4, misuse)
    for first, second in ((0, 1), (2, 3)):
        widths = {results[rank]["other width"] for rank in (first, second)}
        odd = [results[rank]["divides on one only"] for rank in (first, second)]
        if first == 0:
            (line,) = widths
            assert "tensor rank 1 has [" in line
            assert odd == ["nothing", "nothing"]
        else:
            assert widths == {"nothing"}
            assert "gate_proj.out_features is 45, which 2 tensor ranks do not divide" in odd[0]
            assert odd[1] == odd[0].replace("ConfigError: ", "ConfigError: tensor rank 0: ")


def test_a_parallelized_model_is_in_one_pipeline(processes):
    for second, alone in processes.run(4, twice):
        assert second == (
            "UnsupportedModelError: the parallelized model is in a pipeline already; allowed: one pipeline for each"
        )
        assert alone.startswith("UnsupportedModelError: the parallelized model is in a pipeline; allowed: its step")


@pytest.mark.parametrize(
    ("how", "at", "expected"),
    [
        ("killed", 1, "lost contact with rank 1, whose process has ended ("),
        ("failing", 3, "because rank 3 failed: ValueError: no such token at all"),
    ],
)
def test_the_rank_that_was_lost_is_named_on_all_others(processes, how, at, expected):
    """Also where it is in another row and column of the mesh, whose transfers break later and elsewhere."""
    with pytest.raises(RankError) as caught:
        processes.run(4, lost, how, at, group_seconds=30, timeout=60, grace_seconds=40)
    said = caught.value.results
    assert said.keys() == {0, 1, 2, 3} - {at}, caught.value
    for message in said.values():
        assert message.startswith("RankFailure: rank ")
        assert expected in message


def test_dropout_draws_alike_or_is_refused(processes):
    even, uneven = processes.run(4, drop, 8), processes.run(4, drop, 6)
    assert {said for said, _ in even} == {"nothing"}
    assert all((weight[0] == even[0][1][0]).all() for _, weight in even)
    for said, _ in uneven:
        assert said.startswith("ConfigError: there is dropout, and 4 tensor ranks with different shares of 6 tokens")


def test_optimizers_get_every_parameter_in_whatever_form_they_are_given(processes):
    for sizes in processes.run(2, groups):
        assert len(sizes["list"]) == 2
        assert sizes.pop("one") == [1]
        assert all(found == sizes["list"] for found in sizes.values())


def test_the_time_out_of_a_run_is_that_of_all_its_groups(processes):
    for found in processes.run(4, limits, 25.0):
        assert found == {"pipeline": 25.0, "data": 25.0, "tensor": 25.0}


def test_a_rank_has_its_part_of_its_stages_only(processes):
    sizes = processes.run(4, memory)
    assert all(own < 0.4 * whole for own, whole in sizes)
