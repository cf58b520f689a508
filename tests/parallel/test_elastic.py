"""Under torchrun, for real: a rank that is killed comes back, a mesh that does not fit is refused, nothing hangs."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from attnres.cli import main
from attnres.train import find_checkpoint, read_checkpoint, read_metrics
from experiments.runs import dataset
from parallel import elastic_run

SMALL = [
    "--model.hidden-size", "16", "--model.intermediate-size", "24", "--model.num-hidden-layers", "2",
    "--model.num-attention-heads", "2", "--model.num-key-value-heads", "1", "--data.context", "16",
    "--optim.warmup-steps", "1", "--train.batch-size", "4", "--train.accumulation", "2", "--train.eval-sequences", "4",
    "--train.precision", "fp32", "--train.threads", "1", "--train.steps", "6", "--train.checkpoint-every", "2",
]  # fmt: skip
GRID = (pytest.mark.slow, pytest.mark.grid)
"""Of tests that start torchrun once more: all combinations of what the others cover."""


def grid(test: Any) -> Any:
    """Mark a test so."""
    return pytest.mark.slow(pytest.mark.grid(test))


BLOCK = ["--residual", "block", "--residual.sublayers-per-block", "2"]
FSDP = ["--parallel.data", "2", "--parallel.sharding", "fsdp"]
PIPELINE = ["--parallel.pipeline", "2"]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = dataset(tmp_path_factory.mktemp("data"))
    return [*SMALL, "--data.dataset", str(data.folder), "--data.vocab-size", str(data.vocab_size)]


def torchrun(
    *arguments: str, size: int = 2, restarts: int = 0, kill: tuple[str, str, str] = ("none", "none", "0")
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += ["--max-restarts", str(restarts), elastic_run.__file__, *kill, "--", *arguments]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("attnres: error:")]


def rows(folder: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second")
    return [{key: value for key, value in row.items() if key not in timed} for row in read_metrics(folder)]


def assert_bitwise_equal(ours: Path, theirs: Path) -> None:
    assert rows(ours) == rows(theirs)
    found, expected = (read_checkpoint(find_checkpoint(folder)) for folder in (ours, theirs))
    for ours_, theirs_ in ((found.model, expected.model), (found.optimizer, expected.optimizer)):
        assert ours_.keys() == theirs_.keys()
        assert [name for name in ours_ if not torch.equal(ours_[name], theirs_[name])] == []
    assert found.state["random_of_ranks"] == expected.state["random_of_ranks"]
    assert not list(ours.rglob("*.partial"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, options: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    done = torchrun("train", "--out", str(folder), *BLOCK, *options, *FSDP)
    assert done.returncode == 0, done.stderr
    return folder


KILLS = {
    "before the first checkpoint": ("1", "attnres.train.several.clip_gradients", "2"),
    "in a step, rank 0": ("0", "attnres.train.several.clip_gradients", "5"),
    "in a save": ("1", "attnres.train.checkpoint.write_tensors", "4"),
}
"""The rank that dies, the function it is about to call, and which of its calls."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if "step" in name else GRID) for name in KILLS])
def test_a_killed_rank_comes_back_and_the_run_ends_bitwise_where_it_would_have(
    tmp_path: Path, options: list[str], reference: Path, name: str
) -> None:
    folder = tmp_path / "run"
    done = torchrun("train", "--out", str(folder), *BLOCK, *options, *FSDP, restarts=3, kill=KILLS[name])
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr or "-9" in done.stderr or "restart" in done.stderr.lower()
    assert_bitwise_equal(folder, reference)


@grid
def test_a_killed_tensor_rank_comes_back_as_well(tmp_path: Path, options: list[str]) -> None:
    mesh = ["--parallel.tensor", "2", "--model.num-key-value-heads", "2"]
    for name, settings in {"whole": {}, "killed": {"restarts": 3, "kill": KILLS["in a step, rank 0"]}}.items():
        done = torchrun("train", "--out", str(tmp_path / name), *BLOCK, *options, *mesh, **settings)
        assert done.returncode == 0, done.stderr
    assert_bitwise_equal(tmp_path / "killed", tmp_path / "whole")


@grid
def test_a_save_cut_short_leaves_the_last_good_one(tmp_path: Path, options: list[str]) -> None:
    folder = tmp_path / "run"
    began = time.monotonic()
    done = torchrun("train", "--out", str(folder), *BLOCK, *options, *FSDP, kill=KILLS["in a save"])
    assert done.returncode != 0
    assert time.monotonic() - began < 60
    assert any("rank 1" in line for line in errors(done)), done.stderr
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert read_checkpoint(find_checkpoint(folder)).step == 2


@grid
def test_a_run_that_was_there_before_is_not_gone_on_with_by_a_restart(
    tmp_path: Path, options: list[str], reference: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in reference.rglob("*")}
    done = torchrun("train", "--out", str(reference), *BLOCK, *options, *FSDP, restarts=1)
    assert done.returncode != 0
    assert errors(done) == [
        f"attnres: error: run folder {reference} exists; allowed: a new path, or resuming the run in it"
    ]
    assert {path: path.stat().st_mtime_ns for path in reference.rglob("*")} == before


REFUSED = {
    "processes": (["--parallel.pipeline", "3"], r"takes 3 processes, but 2 were started; .* 1 x 2, 2 x 1"),
    "passes": ([*PIPELINE, "--train.accumulation", "1"], r"too few for the schedule 1f1b.*train.accumulation"),
    "layers": ([*PIPELINE, "--parallel.virtual", "4"], r"8 stages, but the model has 4 sublayers"),
    "cuts": ([*PIPELINE, "--parallel.cuts", "4"], r"cuts are \[4\]; allowed: below 4, the number of sublayers"),
    "rows": (["--parallel.data", "2", "--train.batch-size", "3"], r"batch_size is 3, which 2 data ranks"),
    "heads": (["--parallel.tensor", "2"], r"parallel.tensor=2 does not fit: num_key_value_heads is 1, which 2 tensor"),
    "fsdp": ([*FSDP, "--parallel.tensor", "2"], r"sharding='fsdp' and parallel.tensor=2 contradict"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_mesh_that_does_not_fit_is_refused_before_anything_starts_and_rank_0_says_why(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, rank: int
) -> None:
    mesh, message = REFUSED[name]
    for variable, value in (("WORLD_SIZE", "2"), ("RANK", str(rank))):
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as stop:
        main(["train", "--out", str(tmp_path / "run"), *BLOCK, *options, *mesh])
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (1 if rank == 0 else 0)
    assert rank != 0 or re.search(message, said[0]), said
    assert not (tmp_path / "run").exists()


def test_torchrun_ends_at_once_where_the_mesh_does_not_fit(tmp_path: Path, options: list[str]) -> None:
    mesh, message = REFUSED["processes"]
    done = torchrun("train", "--out", str(tmp_path / "run"), *BLOCK, *options, *mesh)
    assert done.returncode != 0
    (line,) = errors(done)
    assert re.search(message, line), line
    assert not (tmp_path / "run").exists()


def test_a_mesh_without_torchrun_is_refused(tmp_path: Path, options: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--out", str(tmp_path / "run"), *options, *PIPELINE])
    assert stop.value.code == 2
    assert "takes 2 processes, but there is one; allowed: torchrun --nproc-per-node 2" in capsys.readouterr().err


@grid
def test_a_pipeline_run_is_evaluated_and_exported_by_one_process(
    tmp_path: Path, options: list[str], reference: Path, capsys: Any
) -> None:
    folder = tmp_path / "run"
    done = torchrun("train", "--out", str(folder), *BLOCK, *options, *PIPELINE)
    assert done.returncode == 0, done.stderr
    assert (folder / "depth.json").is_file()
    for run in (folder, reference):
        main(["eval", str(run)])
    ours, theirs = (line.split("loss")[1] for line in capsys.readouterr().out.splitlines())
    assert ours == theirs
    main(["export", str(folder), str(tmp_path / "exported")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    saved = read_checkpoint(find_checkpoint(folder)).model
    assert all(torch.equal(value, saved[name]) for name, value in model.named_parameters() if name in saved)


@grid
def test_compare_runs_its_arms_one_after_the_other_on_the_mesh(tmp_path: Path, options: list[str]) -> None:
    arms = ["--arms", "prenorm", "block:sublayers_per_block=2"]
    done = torchrun("compare", *arms, "--out", str(tmp_path / "out"), *options, *FSDP)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").is_file()
    assert len(list((tmp_path / "out").glob("*/result.json"))) == 2
    refused = torchrun("compare", *arms, "--out", str(tmp_path / "two"), *options, *FSDP, "--jobs", "2")
    (line,) = errors(refused)
    assert "jobs is 2 on a mesh" in line
    assert not (tmp_path / "two").exists()
