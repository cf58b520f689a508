"""A run on a mesh is the run of one process: metrics, weights, evaluations, checkpoints, resume, on every mesh."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attnres.errors import ConfigError
from attnres.parallel.config import SPLIT_SCHEDULES, ParallelConfig
from attnres.train import Trainer, find_checkpoint, read_checkpoint, read_metrics
from parallel.work_train import config_of, fit, fit_several, fit_with_another_rate, model_of
from train.tiny_run import tiny_data

DDP, FSDP = {"data": 2}, {"data": 2, "sharding": "fsdp"}
PIPELINE = {"pipeline": 2}
BOTH = {"pipeline": 2, "data": 2}
BOTH_FSDP = {**BOTH, "sharding": "fsdp"}
TENSOR = {"tensor": 2}
TWO = {"fsdp": FSDP, "pipeline": PIPELINE, "tensor": TENSOR}
TENSOR_DATA, TENSOR_PIPELINE = {"tensor": 2, "data": 2}, {"tensor": 2, "pipeline": 2}
GRID = (pytest.mark.slow, pytest.mark.grid)


def rows(folder: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second")
    return [{key: value for key, value in row.items() if key not in timed} for row in read_metrics(folder)]


def assert_same_rows(ours: Path, theirs: Path, rel: float = 2e-4) -> None:
    for row, expected in zip(rows(ours), rows(theirs), strict=True):
        assert row.pop("kind") == expected.pop("kind")
        assert row == pytest.approx(expected, rel=rel), (row, expected)


def assert_same_run(ours: Path, theirs: Path) -> None:
    """The same rows and weights to rounding."""
    assert_same_rows(ours, theirs)
    found, wanted = (read_checkpoint(find_checkpoint(folder)) for folder in (ours, theirs))
    assert found.model.keys() == wanted.model.keys()
    assert found.optimizer.keys() == wanted.optimizer.keys()
    for name, tensor in wanted.model.items():
        torch.testing.assert_close(found.model[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


def one_process(folder: Path, **others: Any) -> Path:
    fit(str(folder), {}, **others)
    return folder


@pytest.mark.parametrize("strategy", ["block", pytest.param("mhc", marks=GRID)])
def test_two_processes_train_as_one_does(processes: Any, tmp_path: Path, strategy: str) -> None:
    reference = one_process(tmp_path / "one", strategy=strategy)
    meshes = {"ddp": DDP, "fsdp": FSDP, "pipeline": PIPELINE, "tensor": TENSOR}
    cases = [(str(tmp_path / name), mesh, {"strategy": strategy}) for name, mesh in meshes.items()]
    first, second = processes.run(2, fit_several, cases)
    assert [run["result"] for run in first] == [run["result"] for run in second]
    for name in meshes:
        assert_same_run(tmp_path / name, reference)
        assert {path.name for path in (tmp_path / name).iterdir()} == {path.name for path in reference.iterdir()}
        result = json.loads((tmp_path / name / "result.json").read_text())
        expected = json.loads((reference / "result.json").read_text())
        for key in ("steps", "tokens", "parameters", "extra_parameters"):
            assert result[key] == expected[key]


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=GRID)], ids=["tied", "untied"])
def test_a_pipeline_and_data_ranks_together_train_as_one_process_does(
    processes: Any, tmp_path: Path, tied: bool
) -> None:
    reference = one_process(tmp_path / "one", tied=tied)
    cases = [(str(tmp_path / name), mesh, {"tied": tied}) for name, mesh in (("ddp", BOTH), ("fsdp", BOTH_FSDP))]
    processes.run(4, fit_several, cases)
    for name in ("ddp", "fsdp"):
        assert_same_run(tmp_path / name, reference)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=GRID)], ids=["tied", "untied"])
def test_tensor_ranks_with_others_train_as_one_process_does(processes: Any, tmp_path: Path, tied: bool) -> None:
    others = {"tied": tied, "grad_clip": 0.05}
    reference = one_process(tmp_path / "one", **others)
    meshes = {"data": TENSOR_DATA, "pipeline": TENSOR_PIPELINE}
    results = processes.run(4, fit_several, [(str(tmp_path / name), mesh, others) for name, mesh in meshes.items()])
    assert all([run["result"] for run in rank] == [run["result"] for run in results[0]] for rank in results)
    for name in meshes:
        assert_same_run(tmp_path / name, reference)
        norms = [row["grad_norm"] for row in rows(tmp_path / name) if row["kind"] == "train"]
        assert all(norm > 0.05 for norm in norms)


@pytest.mark.grid
@pytest.mark.slow
def test_muon_trains_on_a_mesh_as_on_one_process(processes: Any, tmp_path: Path) -> None:
    others = {"optim": {"optimizer": "muon"}}
    reference = one_process(tmp_path / "one", **others)
    meshes = {"ddp": BOTH, "fsdp": BOTH_FSDP, "data": TENSOR_DATA, "stages": TENSOR_PIPELINE}
    processes.run(4, fit_several, [(str(tmp_path / name), mesh, others) for name, mesh in meshes.items()])
    for name in meshes:  # Newton-Schulz rounds to bfloat16, and so may fall to either side
        for row, expected in zip(rows(tmp_path / name), rows(reference), strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def test_gradient_clipping_counts_every_number_once(processes: Any, tmp_path: Path) -> None:
    others = {"grad_clip": 0.01, "optim": {"optimizer": "adamw", "lr": 1e-3}}
    reference = one_process(tmp_path / "one", **others)
    cases = [(str(tmp_path / name), mesh, others) for name, mesh in (("ddp", BOTH), ("fsdp", BOTH_FSDP))]
    processes.run(4, fit_several, cases)
    for name in ("ddp", "fsdp"):
        assert_same_run(tmp_path / name, reference)
        norms = [row["grad_norm"] for row in rows(tmp_path / name) if row["kind"] == "train"]
        assert all(norm > 0.01 for norm in norms)


@pytest.mark.grid
@pytest.mark.slow
def test_checkpointing_compile_and_half_precision_run_on_a_mesh(processes: Any, tmp_path: Path) -> None:
    variants = {
        "checkpointing": {"activation_checkpointing": "non_reentrant"},
        "reentrant": {"activation_checkpointing": "reentrant"},
        "compile": {"compile": True},
        "bf16": {"precision": "bf16", "eval_precision": "fp32"},
    }
    cases = [
        (str(tmp_path / f"{name}-{mesh}"), layout, {"steps": 2, **others})
        for name, others in variants.items()
        for mesh, layout in TWO.items()
    ]
    processes.run(2, fit_several, cases)
    for name, others in variants.items():
        reference = one_process(tmp_path / name, steps=2, **{**others, "compile": False})
        for mesh in TWO:
            if name == "bf16":  # Adam divides gradients by their size, and those near zero are rounding alone
                assert_same_rows(tmp_path / f"{name}-{mesh}", reference, rel=0.02)
            else:
                assert_same_run(tmp_path / f"{name}-{mesh}", reference)


def test_an_evaluation_may_have_fewer_windows_than_ranks(processes: Any, tmp_path: Path) -> None:
    others = {"eval_sequences": 5, "steps": 1, "batch_size": 4}
    reference = one_process(tmp_path / "one", **others)
    processes.run(4, fit_several, [(str(tmp_path / "four"), {"data": 4, "sharding": "fsdp"}, others)])
    assert_same_run(tmp_path / "four", reference)


def test_rank_0_alone_has_callbacks_and_gets_the_whole_model(processes: Any, tmp_path: Path) -> None:
    cases = [(str(tmp_path / "run"), BOTH_FSDP, {"callbacks": True})]
    (first,), *others = processes.run(4, fit_several, cases)
    assert first["told"] == ["end 4"]
    assert all(rank[0]["told"] == [] and rank[0]["whole"] is None for rank in others)
    saved = read_checkpoint(find_checkpoint(tmp_path / "run"))
    assert all(torch.equal(saved.model[name], value) for name, value in first["whole"].items())
    assert saved.state["callbacks"]["0-Seen"]["total"] == first["total"]


SCHEDULES = [
    {"schedule": "gpipe"},
    {"virtual": 2, "cuts": (1, 4, 5)},
    {"virtual": 2, "schedule": "interleavedzerobubble"},
    {"virtual": 2, "schedule": "zbv"},
    {"virtual": 2, "schedule": "dualpipev"},
    {"cache": "off", "cuts": (3,)},
]


@pytest.mark.parametrize(
    "layout", [{"data": 1}, BOTH, BOTH_FSDP, TENSOR_PIPELINE], ids=["alone", "ddp", "fsdp", "tensor"]
)
@pytest.mark.grid
@pytest.mark.slow
def test_every_schedule_trains_as_one_process_does(processes: Any, tmp_path: Path, layout: dict[str, Any]) -> None:
    reference = one_process(tmp_path / "one")
    fitting = [one for one in SCHEDULES if layout != BOTH_FSDP or one.get("schedule") not in SPLIT_SCHEDULES]
    meshes = [{"pipeline": 2, **layout, **schedule} for schedule in fitting]
    cases = [(str(tmp_path / f"{index}"), mesh, {}) for index, mesh in enumerate(meshes)]
    processes.run(2 * layout.get("data", 1) * layout.get("tensor", 1), fit_several, cases, timeout=300)
    for index, _ in enumerate(meshes):
        assert_same_run(tmp_path / f"{index}", reference)


# Resume


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(DDP, marks=GRID), FSDP, pytest.param(PIPELINE, marks=GRID), TENSOR],
    ids=["ddp", "fsdp", "pipeline", "tensor"],
)
def test_resuming_on_the_same_mesh_is_bitwise(processes: Any, tmp_path: Path, mesh: dict[str, Any]) -> None:
    muon = {"optim": {"optimizer": "muon"}}
    cases = [
        (str(tmp_path / "whole"), mesh, {"steps": 6, **muon}),
        (str(tmp_path / "parts"), mesh, {"steps": 4, **muon}),
        (str(tmp_path / "parts"), mesh, {"steps": 6, "resume": True, **muon}),
    ]
    processes.run(2, fit_several, cases)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    ours, theirs = (read_checkpoint(find_checkpoint(tmp_path / run)) for run in ("parts", "whole"))
    for found, expected in ((ours.model, theirs.model), (ours.optimizer, theirs.optimizer)):
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert ours.state["random_of_ranks"] == theirs.state["random_of_ranks"]


def test_a_run_goes_on_over_meshes_of_all_kinds_and_ends_in_one_process(processes: Any, tmp_path: Path) -> None:
    reference = one_process(tmp_path / "one", steps=12)
    run = str(tmp_path / "run")
    meshes = {2: BOTH, 4: FSDP, 6: PIPELINE, 8: TENSOR_PIPELINE, 10: TENSOR, 12: {}}
    for steps, mesh in meshes.items():
        processes_of = ParallelConfig(**mesh).size
        case = (run, mesh, {"steps": steps, "resume": steps > 2})
        if processes_of == 1:
            fit_several([case])
        else:
            processes.run(processes_of, fit_several, [case])
    assert_same_run(tmp_path / "run", reference)
    assert rows(tmp_path / "run")[-1]["step"] == 12


def test_a_checkpoint_of_one_process_goes_on_on_a_mesh(processes: Any, tmp_path: Path) -> None:
    reference = one_process(tmp_path / "one", steps=4)
    fit(str(tmp_path / "run"), {}, steps=2)
    processes.run(4, fit_several, [(str(tmp_path / "run"), BOTH_FSDP, {"steps": 4, "resume": True})])
    assert_same_run(tmp_path / "run", reference)


def test_a_mesh_starts_from_the_weights_of_another_run(processes: Any, tmp_path: Path) -> None:
    start = {"init_from": str(one_process(tmp_path / "prenorm", strategy="prenorm", steps=2)), "steps": 2}
    reference = one_process(tmp_path / "one", **start)
    meshes = {"fsdp": BOTH_FSDP, "tensor": TENSOR_PIPELINE}
    processes.run(4, fit_several, [(str(tmp_path / name), mesh, start) for name, mesh in meshes.items()])
    for name in meshes:
        assert_same_run(tmp_path / name, reference)
        assert rows(tmp_path / name)[0]["loss"] == pytest.approx(rows(tmp_path / "prenorm")[-1]["loss"], rel=1e-4)


# Bad input


def test_a_folder_that_exists_is_refused_on_every_rank(processes: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(AssertionError) as caught:
        processes.run(2, fit_several, [(str(tmp_path / "run"), DDP, {})])
    errors = caught.value.errors  # pyright: ignore[reportAttributeAccessIssue]
    assert set(errors) == {0, 1}
    assert all("ConfigError: run folder" in text and "exists" in text for text in errors.values())
    assert list((tmp_path / "run").iterdir()) == []


def test_rows_that_cannot_be_shared_are_refused_with_what_would_fit() -> None:
    with pytest.raises(ConfigError, match=r"train.batch_size is 4, which 3 data ranks .* such as 3 or 6"):
        config_of({"data": 3})


def test_tensor_ranks_and_fsdp_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"sharding='fsdp' and parallel.tensor=2 contradict .* or tensor=1"):
        config_of({"tensor": 2, **FSDP})


@pytest.mark.parametrize(
    ("started", "allowed"),
    [
        (4, "allowed with 4: pipeline x data of 1 x 2, 2 x 1 beside parallel.tensor=2"),
        (3, "allowed with 3: pipeline x data of 1 x 3, 3 x 1 beside parallel.tensor=1"),
    ],
)
def test_a_mesh_that_does_not_fit_the_processes_says_what_would(started: int, allowed: str) -> None:
    config = ParallelConfig(pipeline=2, data=2, tensor=2)
    with pytest.raises(ConfigError) as caught:
        config.check_processes({"WORLD_SIZE": f"{started}", "RANK": "0"})
    expected = "parallel.pipeline=2 x parallel.data=2 x parallel.tensor=2 takes 8 processes"
    assert str(caught.value) == f"{expected}, but {started} were started; {allowed}"


def test_a_mesh_without_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the config is for 2 processes"):
        Trainer(model_of("block"), tiny_data(), config_of(DDP), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_processes_with_different_settings_are_refused_before_there_is_a_folder(processes: Any, tmp_path: Path) -> None:
    for message in processes.run(2, fit_with_another_rate, str(tmp_path / "run"), 1):
        assert message == (
            "rank 1 of 2 (pipeline 0, data 1) has another optim.lr (0.01, not 0.001) than rank 0; allowed: one config"
        )
    assert not (tmp_path / "run").exists()


def test_windows_of_an_evaluation_that_data_ranks_cannot_share_evenly(processes: Any, tmp_path: Path) -> None:
    others = {"eval_sequences": 7, "steps": 2}
    reference = one_process(tmp_path / "one", **others)
    processes.run(4, fit_several, [(str(tmp_path / "mesh"), BOTH_FSDP, others)], group_seconds=30, timeout=90)
    assert_same_rows(tmp_path / "mesh", reference)
