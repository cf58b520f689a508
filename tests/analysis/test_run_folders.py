"""Reading run and compare folders."""

import json

import numpy as np
import pytest

from analysis.synthetic import write_comparison, write_json, write_run
from attnres.analysis import load_comparison, load_run
from attnres.errors import CheckpointError, ConfigError, DataError


def rewrite(path, **changes):
    write_json(path, json.loads(path.read_text()) | changes)


def test_a_finished_run_is_read_whole(tmp_path):
    run = load_run(write_run(tmp_path / "block-seed3", seed=3, sublayers=6, sublayers_per_block=4, steps=100))
    assert run.name == "block-seed3"
    assert run.status == "finished"
    assert run.config["residual"] == {"type": "BlockAttnRes", "sublayers_per_block": 4}
    assert run.valid.steps.tolist() == [0, 25, 50, 75, 100]
    assert len(run.train) == 50
    assert run.result is not None
    assert run.result.valid_loss == run.valid.loss[-1]
    assert run.depth is not None
    assert run.depth.block_ends == (4, 6)
    assert run.depth.mixing_matrix.shape == (7, 7)


def test_an_unfinished_run_is_read_as_far_as_it_got(tmp_path):
    run = load_run(write_run(tmp_path / "run", steps=100, stop_at=51))
    assert run.result is None
    assert run.status == "unfinished at step 50"


def test_a_run_that_has_only_a_config_is_unfinished_at_step_0(tmp_path):
    write_json(tmp_path / "config.json", {})
    assert load_run(tmp_path).status == "unfinished at step 0"


def test_half_a_last_line_is_left_out_of_an_unfinished_run_only(tmp_path):
    for name, stop_at in (("stopped", 50), ("finished", None)):
        folder = write_run(tmp_path / name, steps=100, stop_at=stop_at)
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write('{"kind": "train", "st')
    assert load_run(tmp_path / "stopped").last_step == 50
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 56: is not JSON"):
        load_run(tmp_path / "finished")


def test_a_step_logged_again_after_a_resume_replaces_the_earlier_record(tmp_path):
    folder = write_run(tmp_path / "run", steps=100, stop_at=50)
    again = {"kind": "valid", "step": 25, "tokens": 1, "loss": 7.5, "seconds": 3.0}
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(again) + "\n")
    run = load_run(folder)
    assert run.valid.steps.tolist() == [0, 25, 50]
    assert run.valid.loss[1] == 7.5


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        pytest.param("config.json", "{", ConfigError, "is not JSON", id="config not JSON"),
        pytest.param("config.json", "[]", ConfigError, "holds a list; expected an object", id="config a list"),
        pytest.param("config.json", None, ConfigError, "cannot be read", id="config missing"),
        pytest.param("result.json", "{}", DataError, "valid_loss is None; expected a number", id="result empty"),
        pytest.param("result.json", b"\xff\xfe", DataError, "is not JSON", id="result binary"),
        pytest.param("environment.json", "7", DataError, "holds a int", id="environment a number"),
        pytest.param("metrics.jsonl", "{\n{}\n", DataError, "line 1: is not JSON", id="metrics damaged inside"),
        pytest.param(
            "metrics.jsonl", '{"kind": "valid"}\n', DataError, "line 1: step is None", id="metrics field missing"
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, name, content, error, message):
    folder = write_run(tmp_path / "run", steps=50)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(error, match=message) as caught:
        load_run(folder)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"output_magnitude": [1.0]}, r"output_magnitude has shape \[1\]; expected \[4\]", id="short"),
        pytest.param({"mixing_matrix": [[1.0], [1.0, 2.0]]}, "mixing_matrix is not an array", id="ragged"),
        pytest.param({"sublayers": ["mlp"]}, "expected one name for each of 4", id="kinds"),
        pytest.param({"block_ends": [2, 9]}, "expected sublayer counts from 1 to 4", id="block end outside"),
        pytest.param({"num_sublayers": None}, "num_sublayers is None", id="no count"),
    ],
)
def test_a_measurement_that_does_not_fit_is_refused(tmp_path, changes, message):
    folder = write_run(tmp_path / "run", sublayers=4, steps=50)
    rewrite(folder / "depth.json", **changes)
    with pytest.raises(DataError, match=message) as caught:
        load_run(folder)
    assert "depth.json" in str(caught.value)


def test_a_missing_folder_and_an_empty_folder_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such run folder"):
        load_comparison(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"neither compare\.json nor config\.json"):
        load_comparison(tmp_path)


def test_a_comparison_pairs_runs_with_seeds(tmp_path):
    comparison = load_comparison(write_comparison(tmp_path / "first", seeds=(5, 2), sublayers=4, steps=50))
    assert comparison.name == "first"
    assert [arm.label for arm in comparison.arms] == ["PreNorm", "Block AttnRes (S=4)", "Full AttnRes"]
    assert comparison.baseline == "prenorm"
    for arm in comparison.arms:
        assert [(seed, run.config["train"]["seed"]) for seed, run in arm.runs.items()] == [(5, 5), (2, 2)]


def test_unfinished_and_absent_runs_stay_visible(tmp_path):
    folder = write_comparison(
        tmp_path / "c",
        sublayers=4,
        steps=50,
        unfinished=("block-seed1", "full-seed0"),
        absent=("full-seed1", "full-seed2"),
    )
    _, block, full = load_comparison(folder).arms
    assert list(block.finished) == [0, 2]
    assert list(block.shown) == [0, 2]
    assert full.finished == {}
    assert list(full.shown) == [0]
    assert full.absent == ("full-seed1", "full-seed2")


def test_a_lone_run_is_a_comparison_without_a_baseline(tmp_path):
    comparison = load_comparison(write_run(tmp_path / "mine", seed=7, sublayers=4, steps=50))
    assert comparison.baseline is None
    assert comparison.seeds == (7,)
    assert [(arm.name, arm.label) for arm in comparison.arms] == [("mine", "BlockAttnRes")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"format": 2}, "format is 2; this version reads 1", id="format"),
        pytest.param({"baseline": "rezero"}, "baseline 'rezero' is not one of the arms", id="baseline"),
        pytest.param({"arms": []}, r"arms is \[\]; expected a list of str", id="no arms"),
        pytest.param({"seeds": [1, 1]}, "each may occur once", id="seed twice"),
        pytest.param({"runs": {"prenorm": ["prenorm-seed0"]}}, "arm prenorm has 1 runs for 2 seeds", id="too few runs"),
        pytest.param({"runs": {"prenorm": ["../x", "a"]}}, "is not the name of a folder beside it", id="run outside"),
        pytest.param({"runs": 3}, "runs is 3; expected an object", id="runs a number"),
    ],
)
def test_a_contradictory_compare_file_is_refused(tmp_path, changes, message):
    folder = write_comparison(tmp_path / "c", arms=("prenorm",), seeds=(0, 1), sublayers=2, steps=50)
    rewrite(folder / "compare.json", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_comparison(folder)
    assert "compare.json" in str(caught.value)


def test_a_comparison_without_any_run_is_refused(tmp_path):
    folder = write_comparison(tmp_path / "c", arms=("full",), seeds=(0,), absent=("full-seed0",))
    with pytest.raises(CheckpointError, match="none of the runs"):
        load_comparison(folder)


def test_runs_of_one_arm_with_different_depths_are_refused(tmp_path):
    folder = write_comparison(
        tmp_path / "c", arms=("full",), seeds=(0, 1), sublayers=4, steps=50, absent=("full-seed1",)
    )
    write_run(folder / "full-seed1", arm="full", seed=1, sublayers=6, steps=50)
    with pytest.raises(DataError, match=r"arm full have \[4, 6\] sublayers"):
        load_comparison(folder)


def test_an_infinite_loss_is_kept(tmp_path):
    folder = write_run(tmp_path / "run", steps=50)
    rewrite(folder / "result.json", valid_loss=float("nan"))
    result = load_run(folder).result
    assert result is not None
    assert np.isnan(result.valid_loss)
