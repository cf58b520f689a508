import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attnres.errors import BackendUnavailableError, CheckpointError, ConfigError, DataError, TrainingError
from attnres.models import convert
from attnres.optim import OptimConfig
from attnres.parallel.config import ParallelConfig
from attnres.residual import BlockAttnRes
from attnres.train import Callback, RunContext, TokenArrays, Trainer, load_run_config, load_weights, read_metrics
from attnres.train.environment import describe_environment
from attnres.train.folder import lock
from train.tiny_run import (
    CONTEXT,
    OPTIM,
    VOCAB,
    LossSum,
    tiny_config,
    tiny_data,
    tiny_model,
    tiny_trainer,
)

CONSTANT = OptimConfig(lr=0.01, schedule="constant")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_folder_holds_config_environment_metrics_checkpoints_and_result(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = tiny_trainer(folder).fit()
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "checkpoints",
        "result.json",
    }
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00000009", "step-00000010"]
    assert json.loads((folder / "result.json").read_text()) == result
    assert load_run_config(folder) == tiny_config()
    environment = json.loads((folder / "environment.json").read_text())
    assert {"commit", "versions", "platform", "cpu", "threads", "date"} <= environment.keys()
    assert environment["processes"] == environment["hosts"] == result["processes"] == 1
    mesh = {"pipeline": 1, "data": 1, "tensor": 1, "virtual": 1}
    assert environment["mesh"] == result["mesh"] == mesh | dict.fromkeys(("schedule", "cuts", "cache", "sharding"))


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ({"pipeline": 2, "data": 3}, {"schedule": "1f1b", "cache": "all", "sharding": "ddp"}),
        ({"pipeline": 2, "virtual": 2, "cuts": (1, 2, 3)}, {"schedule": "interleaved1f1b", "cuts": [1, 2, 3]}),
        ({"data": 2, "sharding": "fsdp"}, {"schedule": None, "cache": None, "sharding": "fsdp"}),
    ],
)
def test_environment_and_result_name_the_mesh_with_the_schedule_it_came_to(
    layout: dict[str, Any], mesh: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(tiny_config(batch_size=6), parallel=ParallelConfig(**layout))
    environment = describe_environment(run)
    assert environment["mesh"] == environment["mesh"] | layout | mesh
    assert environment["processes"] == run.parallel.size
    assert environment["hosts"] is None
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert describe_environment(run)["hosts"] == 2


def test_the_result_sums_up_the_metrics(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path / "run")
    result = trainer.fit()
    rows = read_metrics(tmp_path / "run")
    assert result["valid_loss"] == rows[-1]["loss"]
    assert result["bits_per_byte"] == pytest.approx(rows[-1]["loss"] / math.log(2) / 3.0)
    assert result["steps"] == 10
    assert result["tokens"] == 10 * 2 * 2 * CONTEXT == rows[-1]["tokens"]
    assert result["parameters"] == sum(parameter.numel() for parameter in trainer.model.parameters())
    assert result["extra_parameters"] == 0
    assert result["peak_memory_bytes"] > 10_000_000
    assert result["seconds"] > 0
    train = [row for row in rows if row["kind"] == "train"]
    assert [row["lr"] for row in train[:2]] == pytest.approx([0.005, 0.01])


def test_training_lowers_the_loss_of_text_that_repeats(tmp_path: Path) -> None:
    tokens = np.tile(np.arange(8), 60).astype(np.uint16)
    data = TokenArrays(tokens[:400], tokens[400:], vocab_size=VOCAB)
    config = tiny_config(optim=CONSTANT, steps=40, eval_every=0, checkpoint_every=0)
    result = Trainer(tiny_model(), data, config, tmp_path / "run", progress=False).fit()
    assert result["valid_loss"] < 1.0


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_accumulation_is_the_large_batch_to_rounding(tmp_path: Path, optimizer: str) -> None:
    gradients = []
    for accumulation, batch_size in ((1, 4), (4, 1)):
        config = tiny_config(
            optim=OptimConfig(optimizer=optimizer, lr=1e-3), steps=1, accumulation=accumulation, batch_size=batch_size
        )
        model = tiny_model()
        model.config.attention_dropout = 0.0
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0
        trainer = Trainer(model, tiny_data(), config, tmp_path / f"{accumulation}", progress=False)
        trainer.fit()
        row = next(row for row in read_metrics(tmp_path / f"{accumulation}") if row["kind"] == "train")
        gradients.append((row["loss"], row["grad_norm"], {n: p.grad for n, p in model.named_parameters()}))
    (loss, norm, large), (loss_parts, norm_parts, parts) = gradients
    assert loss_parts == pytest.approx(loss, rel=1e-6)
    assert norm_parts == pytest.approx(norm, rel=1e-5)
    for name in large:
        torch.testing.assert_close(parts[name], large[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["reentrant", "non_reentrant"])
def test_activation_checkpointing_changes_no_bit(tmp_path: Path, mode: str) -> None:
    found = []
    for name in ("none", mode):
        config = tiny_config(steps=3, activation_checkpointing=name)
        trainer = tiny_trainer(tmp_path / name, config=config)
        trainer.fit()
        found.append(weights(trainer.model))
    assert_same(*found)


def test_compilation_runs_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    found = []
    for compiled in (False, True):
        config = tiny_config(steps=3, compile=compiled)
        trainer = tiny_trainer(tmp_path / f"{compiled}", config=config)
        trainer.fit()
        found.append(weights(trainer.model))
    assert_same(*found)
    assert sorted(path.name for path in (tmp_path / "True" / "checkpoints").iterdir()) == ["step-00000003"]


def test_threads_and_determinism_are_put_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    tiny_trainer(tmp_path / "run", config=tiny_config(steps=3, threads=2)).fit()
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_callbacks_are_told_everything_in_order(tmp_path: Path) -> None:
    told: list[str] = []

    class Listener(Callback):
        def on_start(self, context: RunContext) -> None:
            told.append("start")

        def on_step_end(self, context: RunContext) -> None:
            told.append(f"step {context.step}")

        def on_evaluate(self, context: RunContext) -> None:
            assert context.model.training
            assert context.metrics["kind"] == "valid"
            assert sum(len(inputs) for inputs, _ in context.evaluator.batches()) == 5
            told.append(f"evaluate {context.step}")

        def on_checkpoint(self, context: RunContext, path: Path) -> None:
            told.append(f"checkpoint {path.name}")

        def on_end(self, context: RunContext, result: dict[str, Any]) -> None:
            told.append(f"end {result['steps']}")

    tiny_trainer(tmp_path / "run", config=tiny_config(steps=3, eval_every=2), callbacks=[Listener()]).fit()
    assert told == [
        "start",
        "evaluate 0",
        "step 1",
        "step 2",
        "evaluate 2",
        "step 3",
        "evaluate 3",
        "checkpoint step-00000003",
        "end 3",
    ]


# Resume


def test_a_finished_run_trains_on_with_more_steps_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = tiny_trainer(tmp_path / "whole", config=tiny_config(optim=CONSTANT, steps=9))
    whole.fit()
    tiny_trainer(tmp_path / "parts", config=tiny_config(optim=CONSTANT, steps=6)).fit()
    parts = tiny_trainer(tmp_path / "parts", config=tiny_config(optim=CONSTANT, steps=9))
    result = parts.fit(resume=True)
    assert_same(weights(parts.model), weights(whole.model))
    assert result["steps"] == 9
    assert load_run_config(tmp_path / "parts").train.steps == 9
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name) if row["kind"] == "train"] for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]


def test_resuming_a_finished_run_changes_nothing_but_gives_its_result(tmp_path: Path) -> None:
    result = tiny_trainer(tmp_path / "run").fit()
    before = tree(tmp_path / "run")
    again = tiny_trainer(tmp_path / "run").fit(resume=True)
    after = tree(tmp_path / "run")
    assert {key: again[key] for key in again if key != "peak_memory_bytes"} == {
        key: result[key] for key in result if key != "peak_memory_bytes"
    }
    assert {path for path in before if before[path] != after[path]} <= {str(tmp_path / "run" / "result.json")}


def test_a_callback_goes_on_with_its_state(tmp_path: Path) -> None:
    whole, first, second = LossSum(), LossSum(), LossSum()
    tiny_trainer(tmp_path / "whole", config=tiny_config(optim=CONSTANT, steps=9), callbacks=[whole]).fit()
    tiny_trainer(tmp_path / "parts", config=tiny_config(optim=CONSTANT, steps=6), callbacks=[first]).fit()
    tiny_trainer(tmp_path / "parts", config=tiny_config(optim=CONSTANT, steps=9), callbacks=[second]).fit(resume=True)
    assert second.total == whole.total


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "train.seed is 0 there, but 1 was asked for"),
        ({"batch_size": 4}, "train.batch_size is 2 there, but 4 was asked for"),
        ({"precision": "bf16"}, "train.precision is 'fp32' there, but 'bf16' was asked for"),
        ({"optim": replace(OPTIM, lr=0.1)}, "optim.lr is 0.01 there, but 0.1 was asked for"),
        ({"residual": BlockAttnRes(num_blocks=2)}, r"residual\.type is '\w+' there, but 'BlockAttnRes' was asked for"),
        ({"steps": 9}, "train.steps is 10 there, but 9 was asked for; allowed: 10 or more"),
    ],
    ids=["seed", "batch-size", "precision", "lr", "strategy", "fewer-steps"],
)
def test_resuming_with_other_numbers_is_refused_by_name_and_touches_nothing(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tiny_trainer(tmp_path / "run").fit()
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=message):
        tiny_trainer(tmp_path / "run", config=tiny_config(**change)).fit(resume=True)
    assert tree(tmp_path) == before


def test_resuming_on_other_tokens_is_refused(tmp_path: Path) -> None:
    tiny_trainer(tmp_path / "run").fit()
    before = tree(tmp_path)
    trainer = Trainer(tiny_model(), tiny_data(seed=1), tiny_config(steps=12), tmp_path / "run", progress=False)
    with pytest.raises(ConfigError, match="other tokens"):
        trainer.fit(resume=True)
    assert tree(tmp_path) == before


def test_what_decides_no_number_may_change_on_resume(tmp_path: Path) -> None:
    tiny_trainer(tmp_path / "run").fit()
    config = tiny_config(steps=12, eval_every=3, checkpoint_every=1, keep_checkpoints=1)
    assert tiny_trainer(tmp_path / "run", config=config).fit(resume=True)["steps"] == 12
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000012"]


def test_leftovers_of_interrupted_writes_are_cleaned_on_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tiny_trainer(folder).fit()
    (folder / "checkpoints" / ".step-00000011.0a1b2c3d.partial").mkdir()
    (folder / "checkpoints" / ".step-00000011.0a1b2c3d.partial" / "model.safetensors").write_bytes(b"half")
    (folder / ".result.json.0a1b2c3d.partial").write_text("{")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    tiny_trainer(folder).fit(resume=True)
    assert not list(folder.rglob("*.partial"))
    assert (folder / "metrics.jsonl").read_text().endswith("}\n")


def test_a_run_in_use_is_not_resumed(tmp_path: Path) -> None:
    tiny_trainer(tmp_path / "run").fit()
    with lock(tmp_path / "run"), pytest.raises(ConfigError, match="in use by another process"):
        tiny_trainer(tmp_path / "run").fit(resume=True)


def test_resuming_where_there_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        tiny_trainer(tmp_path / "run").fit(resume=True)
    assert not (tmp_path / "run").exists()


# Damaged checkpoints


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_refused_by_name_and_fallback_goes_back_only_when_asked(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "run"
    tiny_trainer(folder).fit()
    reference = tree(folder / "checkpoints" / "step-00000010")
    flip_a_byte(folder / "checkpoints" / "step-00000010" / name)
    before = tree(folder)
    with pytest.raises(CheckpointError, match=rf"step-00000010 is damaged: {name}"):
        tiny_trainer(folder).fit(resume=True)
    assert tree(folder) == before
    tiny_trainer(folder).fit(resume="fallback")
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["damaged-step-00000010", "step-00000009", "step-00000010"]
    repaired = tree(folder / "checkpoints" / "step-00000010")
    tensors = [path for path in reference if path.endswith(".safetensors")]
    assert {path: repaired[path] for path in tensors} == {path: reference[path] for path in tensors}


def test_fallback_without_a_whole_checkpoint_names_them_all(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tiny_trainer(folder).fit()
    for path in (folder / "checkpoints").iterdir():
        (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000010.*step-00000009"):
        tiny_trainer(folder).fit(resume="fallback")


# Starting from other weights


def test_init_from_starts_block_attnres_from_a_prenorm_run(tmp_path: Path) -> None:
    source = tiny_trainer(tmp_path / "prenorm")
    source.fit()
    model = convert(tiny_model(seed=5), BlockAttnRes(sublayers_per_block=2))
    config = tiny_config(
        residual=BlockAttnRes(sublayers_per_block=2), steps=3, init_from=str(tmp_path / "prenorm"), eval_every=0
    )
    trainer = Trainer(model, tiny_data(), config, tmp_path / "block", progress=False)
    result = trainer.fit()
    assert result["extra_parameters"] == (4 + 1) * 2 * 16
    start = read_metrics(tmp_path / "block")[0]
    end = read_metrics(tmp_path / "prenorm")[-1]
    assert start["loss"] == pytest.approx(end["loss"], rel=1e-5)  # convert is lossless at zero queries


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: tiny_model(tied=False), "missing: lm_head.weight"),
        (lambda: nn.ModuleDict({"model": nn.Linear(1, 1)}), "not in this model: model.embed_tokens.weight"),
        (
            lambda: tiny_model(vocab_size=40),
            r"of another shape: model.embed_tokens.weight \[32, 16\] instead of \[40, 16\]",
        ),
    ],
    ids=["missing", "extra", "shape"],
)
def test_weights_that_do_not_fit_are_listed_and_nothing_is_loaded(tmp_path: Path, model: Any, message: str) -> None:
    tiny_trainer(tmp_path / "run", config=tiny_config(steps=3)).fit()
    target = model()
    before = weights(target)
    with pytest.raises(CheckpointError, match=message):
        load_weights(target, tmp_path / "run", may_lack_depth=True)
    assert_same(weights(target), before)


def test_depth_parameters_may_be_absent_only_when_asked(tmp_path: Path) -> None:
    tiny_trainer(tmp_path / "run", config=tiny_config(steps=3)).fit()
    model = convert(tiny_model(), BlockAttnRes(sublayers_per_block=2))
    with pytest.raises(CheckpointError, match="pseudo_query"):
        load_weights(model, tmp_path / "run")


def test_a_bad_init_from_leaves_no_run_folder(tmp_path: Path) -> None:
    config = tiny_config(init_from=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="nowhere"):
        tiny_trainer(tmp_path / "run", config=config).fit()
    assert not (tmp_path / "run").exists()


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path / "run", config=tiny_config(steps=3))
    trainer.fit()
    model = tiny_model(seed=9)
    load_weights(model, tmp_path / "run")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(weights(model), weights(trainer.model))


# Numbers that are not finite


class Poisoned(nn.Module):
    """A model whose loss (or only its gradient) is not finite from some pass on."""

    def __init__(self, passes: int, *, gradient_only: bool):
        super().__init__()
        self.inner, self.passes, self.gradient_only = tiny_model(), passes, gradient_only

    def forward(self, **inputs: Any) -> Any:
        output = self.inner(**inputs)
        if self.training:
            self.passes -= 1
        if self.training and self.passes < 0:
            if self.gradient_only:
                output.logits.register_hook(lambda gradient: gradient * float("inf"))
            else:
                output.logits = output.logits * float("nan")
        return output


@pytest.mark.parametrize("gradient_only", [False, True], ids=["loss", "gradient"])
def test_a_step_that_is_not_finite_stops_the_run_and_is_not_applied(tmp_path: Path, gradient_only: bool) -> None:
    folder = tmp_path / "run"
    model = Poisoned(passes=2 * 7, gradient_only=gradient_only)
    trainer = Trainer(model, tiny_data(), tiny_config(), folder, progress=False)
    before: dict[str, Any] = {}

    class Watch(Callback):
        def on_step_end(self, context: RunContext) -> None:
            before.update(weights=weights(model), starts=trainer.sampler.batch(context.step))

    trainer.callbacks = (Watch(),)
    with pytest.raises(TrainingError) as caught:
        trainer.fit()
    message = str(caught.value)
    assert "at step 8" in message
    assert ", ".join(str(start) for start in before["starts"]) in message
    assert message.endswith(f"last good checkpoint: {folder / 'checkpoints' / 'step-00000006'}")
    assert_same(weights(model), before["weights"])
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert read_metrics(folder)[-1]["step"] == 7
    assert not (folder / "result.json").exists()


def test_a_validation_loss_that_is_not_finite_stops_the_run_before_its_checkpoint(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path / "run", config=tiny_config(eval_every=3))

    class Break(Callback):
        def on_step_end(self, context: RunContext) -> None:
            if context.step == 6:
                with torch.no_grad():
                    next(context.model.parameters()).fill_(float("inf"))

    trainer.callbacks = (Break(),)
    with pytest.raises(TrainingError, match=r"after step 6; last good checkpoint: .*step-00000003"):
        trainer.fit()


# Bad input


def test_a_folder_that_exists_is_refused_and_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        tiny_trainer(folder).fit()
    assert tree(tmp_path) == {str(folder / "notes.txt"): b"mine"}


def test_a_vocabulary_that_does_not_match_the_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the vocabulary of the model is 40; allowed: 32"):
        Trainer(tiny_model(vocab_size=40), tiny_data(), tiny_config(), tmp_path / "run")


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_context_longer_than_a_shard_is_refused(tmp_path: Path, split: str) -> None:
    data = tiny_data(**{split: CONTEXT})
    with pytest.raises(DataError, match="context is 8"):
        Trainer(tiny_model(), data, tiny_config(), tmp_path / "run")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="no CUDA device"):
        tiny_trainer(tmp_path / "run", config=tiny_config(device="cuda"))


def test_a_model_without_activation_checkpointing_is_refused(tmp_path: Path) -> None:
    config = tiny_config(activation_checkpointing="reentrant")
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        Trainer(Poisoned(1, gradient_only=False), tiny_data(), config, tmp_path / "run").fit()
    assert not (tmp_path / "run").exists()


def test_auto_settings_are_settled_and_recorded(tmp_path: Path) -> None:
    config = tiny_config(device="auto", precision="auto", threads=None, steps=3)
    tiny_trainer(tmp_path / "run", config=config).fit()
    train = load_run_config(tmp_path / "run").train
    assert train.device in ("cpu", "cuda")
    assert train.precision in ("fp32", "bf16")
    assert train.threads == torch.get_num_threads()
    tiny_trainer(tmp_path / "run", config=config).fit(resume=True)
