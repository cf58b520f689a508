"""Data ranks compute what one process computes: loss, every gradient, their norm, and the weights after many steps."""

from typing import Any

import pytest

from parallel.work_data import STRATEGIES, several

EXACT = 5e-12
"""Of float64 numbers that were added up in another order, several steps long."""


def run(processes: Any, cases: list[dict[str, Any]], size: int = 2) -> list[dict[str, float]]:
    results = processes.run(size, several, cases)
    assert all(rank == results[0] for rank in results[1:]) or any(case["sharding"] == "fsdp" for case in cases)
    return results[0]


def assert_equal(found: dict[str, float], case: dict[str, Any], bound: float = EXACT) -> None:
    for what in ("loss", "gradient", "norm", "weight"):
        assert found[what] < bound, (what, case, found)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_loss_gradients_norm_and_weights_are_those_of_one_process(processes: Any, sharding: str) -> None:
    cases = [{"strategy": name, "sharding": sharding} for name in STRATEGIES]
    for case, found in zip(cases, run(processes, cases), strict=True):
        assert_equal(found, case)
        share = found["local"] / found["total"]
        assert share == 1 if sharding == "ddp" else 0.49 < share < 0.52


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_activation_checkpointing_changes_nothing(processes: Any, sharding: str) -> None:
    cases = [
        {"strategy": "block", "sharding": sharding, "checkpointing": mode} for mode in ("reentrant", "non_reentrant")
    ]
    for case, found in zip(cases, run(processes, cases), strict=True):
        assert_equal(found, case)


def test_twenty_steps_of_either_optimizer_stay_together(processes: Any) -> None:
    cases = [
        {"strategy": "block", "sharding": sharding, "optimizer": optimizer, "steps": 20}
        for sharding in ("ddp", "fsdp")
        for optimizer in ("adamw", "muon")
    ]
    for case, found in zip(cases, run(processes, cases), strict=True):
        assert_equal(found, case)


def test_experts_are_sharded_and_give_the_same_gradients(processes: Any) -> None:
    cases = [
        {"strategy": "block", "sharding": sharding, "family": family, "precision": precision}
        for sharding in ("ddp", "fsdp")
        for family, precision in (("qwen3-moe", "fp64"), ("kimi-linear", "fp32"))
    ]
    for case, found in zip(cases, run(processes, cases), strict=True):
        assert_equal(found, case, EXACT if case["precision"] == "fp64" else 1e-3)
        assert found["local"] / found["total"] == pytest.approx(1.0 if case["sharding"] == "ddp" else 0.5, abs=0.05)


def test_single_and_half_precision_agree_to_rounding(processes: Any) -> None:
    cases = [
        {"strategy": "full", "sharding": sharding, "precision": precision, "steps": 1}
        for sharding in ("ddp", "fsdp")
        for precision in ("fp32", "bf16")
    ]
    for case, found in zip(cases, run(processes, cases), strict=True):
        bound = 1e-4 if case["precision"] == "fp32" else 0.05
        assert max(found["loss"], found["norm"], found["gradient"]) < bound, (case, found)


@pytest.mark.grid
@pytest.mark.slow
def test_layers_compiled_one_by_one_work_on_data_ranks(processes: Any) -> None:
    cases = [{"strategy": "block", "sharding": sharding, "compiled": True} for sharding in ("ddp", "fsdp")]
    for case, found in zip(cases, run(processes, cases), strict=True):
        assert_equal(found, case)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_the_whole_grid_agrees(processes: Any, size: int, sharding: str) -> None:
    cases = [
        {"strategy": strategy, "sharding": sharding, "optimizer": optimizer, "checkpointing": mode, "family": family}
        for strategy in ("full", "block", "prenorm", "mhc")
        for optimizer in ("adamw", "muon")
        for mode in ("none", "reentrant", "non_reentrant")
        for family in ("llama", "qwen3-moe")
    ]
    for case, found in zip(cases, run(processes, cases, size), strict=True):
        assert_equal(found, case, 1e-8)
