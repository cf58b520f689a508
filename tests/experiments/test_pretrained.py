"""Runs that start from a trained model of a Hugging Face folder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnres.analysis.probe import probe
from attnres.cli import main as cli
from attnres.data.shards import file_sha256
from attnres.errors import CheckpointError, ConfigError
from attnres.experiments.models import build_model, hf_config, self_contained
from attnres.experiments.pretrained import weights_sha256
from attnres.experiments.run import run
from attnres.experiments.trained import evaluate, load_trained
from attnres.optim import freeze_base, is_depth_parameter
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm
from attnres.train import DataConfig, ModelConfig, RunConfig, load_run_config, read_metrics
from experiments.pretrained_models import saved, tiny_llama
from experiments.runs import dataset, small_run

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "model", tiny_llama())


def start(folder: Path, data, residual=None, **train) -> RunConfig:
    base = small_run(data, **train)
    return replace(base, model=ModelConfig(pretrained=str(folder)), residual=residual or PreNorm())


@pytest.mark.parametrize("residual", [PreNorm(), BlockAttnRes(sublayers_per_block=2), FullAttnRes()], ids=repr)
def test_the_start_is_the_function_of_the_trained_model(folder, data, residual):
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = tiny_llama()(input_ids=ids).logits
        model = build_model(start(folder, data, residual)).eval()
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert model.base_model.residual.strategy == residual.with_read_scale("sum")


def test_a_run_records_config_content_weights_and_read_scale(folder, data, tmp_path):
    run(start(folder, data, BlockAttnRes(num_blocks=2)), tmp_path / "run", progress=False)
    config = load_run_config(tmp_path / "run")
    assert config.model.pretrained == str(folder)
    assert config.model.pretrained_sha256 == file_sha256(folder / WEIGHTS)
    assert json.loads(config.model.hf_config)["hidden_size"] == 16
    assert config.residual == BlockAttnRes(num_blocks=2, read_scale="sum")
    measured = json.loads((tmp_path / "run" / "depth_start.json").read_text(encoding="utf-8"))
    assert measured["mixing_matrix"][-1] == pytest.approx([1] * 5, rel=1e-5)


def test_a_run_goes_on_and_is_evaluated_without_the_trained_model(folder, data, tmp_path):
    config = start(folder, data, BlockAttnRes(sublayers_per_block=2), steps=4)
    run(config, tmp_path / "straight", progress=False)
    run(replace(config, train=replace(config.train, steps=2)), tmp_path / "resumed", progress=False)
    shutil.rmtree(folder)
    longer = replace(
        load_run_config(tmp_path / "resumed"), train=replace(load_run_config(tmp_path / "resumed").train, steps=4)
    )
    run(longer, tmp_path / "resumed", resume=True, progress=False)
    names = ("straight", "resumed")
    trained = [load_trained(tmp_path / name) for name in names]
    for first, second in zip(*(one.model.parameters() for one in trained), strict=True):
        assert first.shape == second.shape
    assert trained[1].model.base_model.residual.strategy.read_scale == "sum"
    last = [row["loss"] for row in read_metrics(tmp_path / "straight") if row["kind"] == "valid"][-1]
    assert evaluate(trained[0], sequences=4).loss == pytest.approx(last, rel=1e-6)
    with pytest.raises(ConfigError, match="it cannot be read"):
        run(config, tmp_path / "new", progress=False)
    assert not (tmp_path / "new").exists()


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_the_trained_model(folder, data, tmp_path):
    config = start(folder, data, FullAttnRes(), steps=2)
    run(config, tmp_path / "run", progress=False)
    expected = read_metrics(tmp_path / "run")[-1]["loss"]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "result.json").unlink()
    run(config, tmp_path / "run", resume=True, progress=False)
    assert read_metrics(tmp_path / "run")[-1]["loss"] == expected
    changed = {name: tensor + 1 for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(changed, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"cannot resume .*: model.pretrained_sha256 is"):
        run(config, tmp_path / "run", resume=True, progress=False)
    with pytest.raises(ConfigError, match=r"SHA-256 .*; allowed: .*, as recorded"):
        run(load_run_config(tmp_path / "run"), tmp_path / "run", resume=True, progress=False)


def test_weights_in_parts_have_one_checksum_and_are_loaded(data, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "parts", max_shard_size="5KB")
    assert not (tmp_path / "parts" / WEIGHTS).exists()
    built = build_model(self_contained(start(tmp_path / "parts", data)))
    assert torch.equal(built.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)
    before = weights_sha256(tmp_path / "parts")
    last = max((tmp_path / "parts").glob("*.safetensors"))
    save_file({name: -tensor for name, tensor in load_file(last).items()}, last, metadata={"format": "pt"})
    assert weights_sha256(tmp_path / "parts") != before


def test_weights_in_half_precision_are_trained_in_float32(data, tmp_path):
    model = build_model(start(saved(tmp_path / "half", tiny_llama().half()), data))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def _without_weights(folder):
    (folder / WEIGHTS).unlink()


def _without_config(folder):
    (folder / "config.json").unlink()


def _truncated(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def _no_safetensors(folder):
    (folder / WEIGHTS).write_bytes(b"not weights")


def _key_missing(folder):
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _key_too_many(folder):
    tensors = {**load_file(folder / WEIGHTS), "model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _another_shape(folder):
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**settings, "intermediate_size": 32}), encoding="utf-8")


def _converted_already(folder):
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**settings, "attnres": {"type": "PreNorm"}}), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_without_weights, CheckpointError, rf"has no {WEIGHTS} and no {WEIGHTS}.index.json"),
        (_without_config, ConfigError, r"model.pretrained is .*config.json; it cannot be read"),
        (_truncated, CheckpointError, "is cut short"),
        (_no_safetensors, CheckpointError, "not a safetensors file"),
        (_key_missing, CheckpointError, r"do not fit its config: missing: model.layers.1.mlp.up_proj.weight"),
        (_key_too_many, CheckpointError, r"not in this model: model.layers.0.self_attn.q_proj.bias"),
        (_another_shape, CheckpointError, r"of another shape: .*model.layers.0.mlp.down_proj.weight"),
        (_converted_already, ConfigError, "converted already; allowed: a plain one"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_by_name_and_nothing_is_left(
    folder, data, tmp_path, spoil, error, message
):
    spoil(folder)
    with pytest.raises(error, match=message) as raised:
        run(start(folder, data, FullAttnRes()), tmp_path / "run", progress=False)
    assert "\n" not in str(raised.value)
    assert str(folder) in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_than_the_data_s_is_refused(data, tmp_path):
    folder = saved(tmp_path / "model", tiny_llama(vocab_size=300))
    with pytest.raises(ConfigError, match=r"model.pretrained has vocab_size 300; allowed: 257, the data's"):
        run(start(folder, data), tmp_path / "run", progress=False)


def test_train_compare_eval_and_generate_start_from_a_folder(folder, data, tmp_path, capsys):
    out, both = tmp_path / "run", tmp_path / "both"
    options = [
        "--model.pretrained", str(folder), "--data.dataset", str(data.folder), "--data.vocab-size", "257",
        "--data.context", "16", "--train.batch-size", "2", "--train.eval-sequences", "4", "--train.eval-every", "0",
        "--train.precision", "fp32", "--train.threads", "1", "--optim.warmup-steps", "1",
    ]  # fmt: skip
    command = ["train", "--residual", "block", "--out", str(out), "--optim.train-only", "depth", *options]
    cli([*command, "--train.steps", "3"])
    cli(["train", "--out", str(out), "--resume", "--train.steps", "4"])
    shutil.copytree(folder, tmp_path / "aside")
    shutil.rmtree(folder)
    cli(["eval", str(out), "--json", "--sequences", "4"])
    cli(["generate", str(out), "--prompt", "the", "--max-new-tokens", "3"])
    (tmp_path / "aside").rename(folder)
    capsys.readouterr()
    arms = ["prenorm", "block:num_blocks=2@train_only=depth"]
    cli(["compare", "--arms", *arms, "--out", str(both), *options, "--train.steps", "2"])
    assert "train_only=depth" in (both / "table.md").read_text(encoding="utf-8")
    starts = [read_metrics(path.parent)[0]["loss"] for path in both.glob("*/metrics.jsonl")]
    assert len(starts) == 2
    assert starts[0] == pytest.approx(starts[1], rel=1e-6)


def test_a_model_with_frozen_weights_is_measured_like_any_other(folder, data):
    ids = torch.arange(24).view(2, 12)
    model = build_model(start(folder, data, BlockAttnRes(sublayers_per_block=2)))
    expected = probe(model, ids, ids)
    freeze_base(model)
    assert probe(model, ids, ids) == expected
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        name for name, _ in model.named_parameters() if is_depth_parameter(name)
    ]


def test_a_config_that_transformers_refuses_is_told_in_one_line():
    settings = {"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4, "vocab_size": 4096}
    with pytest.raises(ConfigError, match="Transformers cannot use this model config") as caught:
        hf_config(ModelConfig(hf_config=json.dumps(settings)), DataConfig())
    assert "4" in str(caught.value)
