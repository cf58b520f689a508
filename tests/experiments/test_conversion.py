"""The conversion study as a whole, on a model of two layers."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from attnres.analysis import load_comparison
from attnres.experiments.conversion import (
    DEPTH_LEARNING_RATE,
    DEPTH_WEIGHTS,
    FIGURE,
    LEARNING_RATE,
    arms,
    comparison,
    conversion,
    depth_weights,
    distance_from_even,
    main,
    run_study,
    table,
)
from attnres.optim import is_depth_parameter
from attnres.train import load_run_config, read_checkpoint, read_metrics
from experiments.pretrained_models import saved, tiny_llama
from experiments.runs import dataset

PRENORM, DEPTH_ONLY, ALL = arms(2)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversion")
    pretrained = saved(folder / "model", tiny_llama())
    data = dataset(folder)
    base = conversion(pretrained=str(pretrained), dataset=str(data.folder), vocab_size=257, steps=4)
    optim = replace(base.optim, lr=1e-3, depth_lr_scale=10.0, warmup_steps=1)
    train = replace(base.train, precision="fp32", batch_size=2, eval_sequences=4)
    base = replace(base, data=replace(base.data, context=16), optim=optim, train=train)
    run_study(comparison(base, sublayers_per_block=2, seeds=2), folder / "out", progress=False, isolate=False)
    return folder


def test_all_arms_start_from_the_same_held_out_loss(study):
    losses = {run.parent.name: _losses(run.parent)[0] for run in (study / "out").glob("*/metrics.jsonl")}
    assert len(losses) == 6
    assert max(losses.values()) - min(losses.values()) < 1e-5


def test_the_depth_arm_trains_the_residual_path_and_nothing_else(study):
    start = load_file(study / "model" / "model.safetensors")
    for arm, only_depth in ((DEPTH_ONLY, True), (ALL, False), (PRENORM, False)):
        trained = _trained(study, arm)
        base = {name: tensor for name, tensor in trained.items() if not is_depth_parameter(name)}
        assert base.keys() == start.keys()
        assert all(torch.equal(base[name], start[name]) for name in base) == only_depth
        assert any("pseudo_query" in name and tensor.any() for name, tensor in trained.items()) == (arm != PRENORM)


def test_the_depth_weights_are_even_before_and_are_not_after(study):
    written = json.loads((study / "out" / DEPTH_WEIGHTS).read_text(encoding="utf-8"))
    assert list(written) == [DEPTH_ONLY, ALL]
    for arm in written.values():
        assert [len(row) for row in arm["start"]] == [1, 2, 2, 3, 3]
        for row in (*arm["start"], *arm["end"]):
            assert sum(row) == pytest.approx(1)
        assert all(max(row) - min(row) < 1e-6 for row in arm["start"])
        assert max(arm["distance_from_even"]["start"]) < 1e-6
        assert min(arm["distance_from_even"]["end"]) > 1e-3
    assert (study / "out" / FIGURE).read_text(encoding="utf-8").startswith("<svg")


def test_depth_weights_take_one_column_a_block():
    measured = {"block_ends": [2, 3], "mixing_matrix": [[9, 0, 0, 0], [1, 3, 0, 0], [1, 1, 1, 0], [2, 1, 1, 5]]}
    assert depth_weights(measured) == [[1], [0.25, 0.75], [0.5, 0.5], [0.25, 0.125, 0.625]]
    assert distance_from_even([[1.0], [0.25, 0.75]]) == pytest.approx(0.125)


def test_the_table_has_each_arm_before_and_after(study):
    rows = [row.split("|") for row in table(study / "out").splitlines()[2:]]
    assert [row[1].strip() for row in rows] == [
        "PreNorm",
        "Block AttnRes (S=2), train_only=depth",
        "Block AttnRes (S=2)",
    ]
    folders = load_comparison(study / "out").arms
    for row, arm in zip(rows, folders, strict=True):
        losses = [_losses(study / "out" / run.name) for run in arm.runs.values()]
        start, end = (sum(loss[index] for loss in losses) / len(losses) for index in (0, -1))
        assert float(row[2]) == pytest.approx(start, abs=6e-5)
        assert float(row[3]) == pytest.approx(end, abs=6e-5)


def test_a_finished_study_is_not_run_again(study):
    names = list((study / "out").glob("*/result.json"))
    before = {path: path.stat().st_mtime_ns for path in names}
    base = load_run_config(study / "out" / "prenorm-seed0")
    run_study(comparison(base, sublayers_per_block=2, seeds=2), study / "out", progress=False, isolate=False)
    assert {path: path.stat().st_mtime_ns for path in names} == before


def test_the_recipe_is_paired_and_evaluates_in_float32(study):
    data = study / "data"
    recipe = comparison(
        conversion(pretrained=str(study / "model"), dataset=str(data), vocab_size=257), sublayers_per_block=2
    )
    runs = [config for _, config in recipe.runs()]
    assert recipe.seeds == (0, 1, 2)
    assert [config.train.seed for config in runs] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert {config.train.eval_precision for config in runs} == {"fp32"}
    assert {config.optim.lr for config in runs} == {LEARNING_RATE}
    assert all(config.optim.lr * config.optim.depth_lr_scale == pytest.approx(DEPTH_LEARNING_RATE) for config in runs)
    assert [config.optim.train_only for config in runs] == 3 * ["all", "depth", "all"]


def test_a_missing_model_or_dataset_is_one_line_and_nothing_is_left(tmp_path, capsys):
    data = dataset(tmp_path)
    for pretrained, folder in ((tmp_path / "none", data.folder), (tmp_path, tmp_path / "none")):
        with pytest.raises(SystemExit) as stop:
            main(["--pretrained", str(pretrained), "--data", str(folder), "--out", str(tmp_path / "out")])
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        assert str(tmp_path) in message
        assert not (tmp_path / "out").exists()


def _losses(folder):
    return [row["loss"] for row in read_metrics(folder) if row["kind"] == "valid"]


def _trained(study, arm):
    listed = json.loads((study / "out" / "compare.json").read_text(encoding="utf-8"))
    return read_checkpoint(study / "out" / listed["runs"][arm][0] / "checkpoints" / "step-00000004").model
