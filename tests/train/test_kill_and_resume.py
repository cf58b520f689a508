import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train import tiny_run

TIMES = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-W", "error", tiny_run.__file__, str(root)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return root


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def state(checkpoint: Path) -> dict[str, Any]:
    found = json.loads((checkpoint / "state.json").read_text())
    del found["position"]["seconds"], found["position"]["peak_memory_bytes"]
    return found


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def assert_bitwise_equal(run: Path, reference: Path) -> None:
    assert files(run) == files(reference)
    assert metrics(run) == metrics(reference)
    for checkpoint in (reference / "checkpoints").iterdir():
        for name in ("model.safetensors", "optimizer.safetensors"):
            ours = run / "checkpoints" / checkpoint.name / name
            assert ours.read_bytes() == (checkpoint / name).read_bytes(), f"{checkpoint.name}/{name}"
        assert state(run / "checkpoints" / checkpoint.name) == state(checkpoint)


def test_two_runs_of_one_config_are_bitwise_equal(runs: Path) -> None:
    assert_bitwise_equal(runs / "again", runs / "reference")


@pytest.mark.parametrize("name", [*tiny_run.KILLS, "timer"])
def test_a_run_killed_and_resumed_is_bitwise_the_uninterrupted_one(runs: Path, name: str) -> None:
    assert_bitwise_equal(runs / name, runs / "reference")


def test_the_reference_run_moved_and_has_every_line_once(runs: Path) -> None:
    rows = metrics(runs / "reference")
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 11))
    assert [row["step"] for row in rows if row["kind"] == "valid"] == [0, 4, 8, 10]
    assert len({row["loss"] for row in rows}) == len(rows)


def test_precision_reaches_the_model(runs: Path) -> None:
    exact, rounded = metrics(runs / "reference"), metrics(runs / "reference-bf16")
    assert exact != rounded
    assert [row["loss"] for row in exact] == pytest.approx([row["loss"] for row in rounded], rel=1e-2)
