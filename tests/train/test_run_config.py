import json
from typing import Any

import pytest

from attnres.errors import ConfigError
from attnres.optim import OptimConfig
from attnres.parallel.config import ParallelConfig
from attnres.residual import STRATEGIES, BlockAttnRes, FullAttnRes, PreNorm
from attnres.train import DataConfig, ModelConfig, RunConfig, TrainConfig

STRATEGY_CASES = [
    PreNorm(),
    FullAttnRes(read_scale="sum"),
    BlockAttnRes(sublayers_per_block=3),
    BlockAttnRes(num_blocks=2),
]


@pytest.mark.parametrize("residual", STRATEGY_CASES, ids=repr)
def test_a_config_survives_json(residual: Any) -> None:
    config = RunConfig(
        model=ModelConfig(family="qwen3", hidden_size=64),
        residual=residual,
        data=DataConfig(context=32),
        optim=OptimConfig(betas=(0.8, 0.99), schedule="cosine"),
        train=TrainConfig(grad_clip=None, threads=2, trackers=("tensorboard",)),
    )
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_strategy_is_told_apart_by_class_name() -> None:
    assert RunConfig(residual=BlockAttnRes(num_blocks=2)).to_dict()["residual"] == {
        "type": "BlockAttnRes",
        "read_scale": None,
        "phases": "auto",
        "sublayers_per_block": None,
        "num_blocks": 2,
        "remainder": "tail",
    }
    assert RunConfig(residual=PreNorm()).to_dict()["residual"] == {"type": "PreNorm"}


def test_every_registered_strategy_can_be_read() -> None:
    needed = {"BlockAttnRes": {"sublayers_per_block": 1}}
    for cls in STRATEGIES.values():
        read = RunConfig.from_dict({"residual": {"type": cls.__name__, **needed.get(cls.__name__, {})}})
        assert type(read.residual) is cls


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"residual": {"type": "PreNorm"}, "trian": {}},
            "unknown key 'trian'; allowed: model, residual, data, optim, train",
        ),
        ({"residual": {"type": "PreNorm"}, "train": {"step": 3}}, "unknown key 'train.step'; allowed: steps"),
        ({"residual": {"type": "PreNorm", "blocks": 3}}, "unknown key 'residual.blocks'"),
        ({"residual": {"type": "Nope"}}, "residual.type is 'Nope'; allowed: FullAttnRes, BlockAttnRes"),
        ({"residual": {}}, "residual.type is None"),
        ({"residual": "block"}, "residual is 'block'; allowed: an object"),
        ({}, "key 'residual' is missing"),
        (
            {"residual": {"type": "PreNorm"}, "train": 3},
            "train is 3; allowed: an object with the fields of TrainConfig",
        ),
        ({"residual": {"type": "PreNorm"}, "train": {"steps": "3"}}, "train.steps is '3'; allowed: a whole number"),
        ({"residual": {"type": "PreNorm"}, "train": {"steps": True}}, "train.steps is True; allowed: a whole number"),
        ({"residual": {"type": "PreNorm"}, "train": {"compile": 1}}, "train.compile is 1; allowed: true or false"),
        ({"residual": {"type": "PreNorm"}, "train": {"grad_clip": "no"}}, "train.grad_clip is 'no'; allowed: a number"),
        (
            {"residual": {"type": "PreNorm"}, "train": {"trackers": ["x"]}},
            r"train.trackers\[0\] is 'x'; allowed: 'tens",
        ),
        ({"residual": {"type": "PreNorm"}, "optim": {"betas": [0.9]}}, "optim.betas is .*; allowed: a list of 2"),
        ({"residual": {"type": "PreNorm"}, "optim": {"schedule": "step"}}, "optim.schedule is 'step'; allowed: 'wsd'"),
    ],
)
def test_a_wrong_entry_is_refused_by_its_dotted_key(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict(data)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ModelConfig(family="gpt"), "family is 'gpt'; allowed: llama"),
        (lambda: ModelConfig(num_attention_heads=3), "num_attention_heads is 3; allowed: a divisor of hidden_size"),
        (lambda: ModelConfig(num_key_value_heads=3), "num_key_value_heads is 3"),
        (lambda: ModelConfig(num_hidden_layers=0), "num_hidden_layers is 0"),
        (lambda: ModelConfig(rms_norm_eps=0.0), "rms_norm_eps"),
        (lambda: DataConfig(context=0), "context is 0"),
        (lambda: DataConfig(vocab_size=1), "vocab_size is 1"),
        (lambda: DataConfig(dataset=""), "dataset"),
        (lambda: TrainConfig(steps=0), "steps is 0"),
        (lambda: TrainConfig(eval_every=-1), "eval_every is -1"),
        (lambda: TrainConfig(grad_clip=0.0), "grad_clip is 0.0"),
        (lambda: TrainConfig(precision="fp16"), "precision is 'fp16'; allowed: auto, fp32, bf16"),
        (lambda: TrainConfig(device="tpu"), "device is 'tpu'"),
        (lambda: TrainConfig(eval_precision="fp16"), "eval_precision is 'fp16'; allowed: auto, fp32, bf16"),
        (lambda: TrainConfig(threads=0), "threads is 0"),
        (lambda: ModelConfig(pretrained=""), "pretrained is ''; allowed: a folder"),
        (lambda: TrainConfig(trackers=("mlflow",)), "trackers"),
        (lambda: RunConfig(residual="block"), "residual is 'block'; allowed: FullAttnRes, BlockAttnRes"),
    ],
)
def test_a_setting_outside_its_range_is_refused_by_name(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_warm_up_and_decay_longer_than_the_run_name_both_fields() -> None:
    with pytest.raises(ConfigError, match=r"optim.warmup_steps=90 and optim.decay_fraction=0.2 .* train.steps=100"):
        RunConfig(residual=PreNorm(), optim=OptimConfig(warmup_steps=90), train=TrainConfig(steps=100))


def test_two_starts_of_a_run_contradict_each_other_by_name() -> None:
    with pytest.raises(ConfigError, match=r"pretrained='here' and hf_config='config.json' contradict each other"):
        ModelConfig(pretrained="here", hf_config="config.json")
    with pytest.raises(ConfigError, match=r"model.pretrained='here' and train.init_from='there' contradict each other"):
        RunConfig(residual=PreNorm(), model=ModelConfig(pretrained="here"), train=TrainConfig(init_from="there"))
    with pytest.raises(ConfigError, match="pretrained_sha256 is 'abc' without pretrained"):
        ModelConfig(pretrained_sha256="abc")


def test_the_record_of_a_pretrained_run_survives_json() -> None:
    model = ModelConfig(pretrained="here", hf_config='{"model_type": "llama"}', pretrained_sha256="abc")
    config = RunConfig(residual=FullAttnRes(read_scale="sum"), model=model, train=TrainConfig(eval_precision="fp32"))
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_frozen_base_refuses_the_checkpointing_that_would_drop_its_gradients() -> None:
    optim = OptimConfig(train_only="depth")
    RunConfig(residual=FullAttnRes(), optim=optim, train=TrainConfig(activation_checkpointing="non_reentrant"))
    with pytest.raises(ConfigError, match=r"activation_checkpointing is 'reentrant' with optim.train_only='depth'"):
        RunConfig(residual=FullAttnRes(), optim=optim, train=TrainConfig(activation_checkpointing="reentrant"))


# The mesh


def test_a_run_recorded_before_there_were_meshes_is_one_of_a_single_process() -> None:
    recorded = RunConfig(residual=PreNorm()).to_dict()
    del recorded["parallel"]
    assert RunConfig.from_dict(recorded).parallel == ParallelConfig()


def test_a_mesh_survives_json() -> None:
    mesh = ParallelConfig(pipeline=2, data=2, virtual=2, cuts=(2, 5, 7), schedule="interleaved1f1b", cache="received")
    config = RunConfig(residual=PreNorm(), parallel=mesh)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (mesh.size, mesh.stages) == (4, 4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ParallelConfig(pipeline=0), "parallel.pipeline is 0; allowed: 1 or more"),
        (lambda: ParallelConfig(sharding="zero"), "parallel.sharding is 'zero'; allowed: ddp, fsdp"),
        (lambda: ParallelConfig(schedule="fast"), "parallel.schedule is 'fast'; allowed: gpipe, 1f1b"),
        (lambda: ParallelConfig(cache="some"), "parallel.cache is 'some'; allowed: all, received, off"),
        (
            lambda: ParallelConfig(pipeline=2, data=2, sharding="fsdp", schedule="zbv", virtual=2),
            r"sharding='fsdp' and parallel.schedule='zbv' contradict each other",
        ),
        (lambda: ParallelConfig(timeout=0.0), "parallel.timeout is 0.0; allowed: more than 0 seconds"),
        (lambda: ParallelConfig(pipeline=3, cuts=(4, 2)), r"parallel.cuts is \(4, 2\); allowed: 2 numbers .*ascending"),
        (lambda: ParallelConfig(pipeline=3, cuts=(4,)), r"allowed: 2 numbers of sublayers, .* for 3 stages"),
        (
            lambda: RunConfig(residual=PreNorm(), train=TrainConfig(batch_size=6), parallel=ParallelConfig(data=4)),
            r"batch_size is 6, which 4 data ranks .* cannot share evenly; .* such as 4 or 8",
        ),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_by_name(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_mesh_is_compared_with_the_processes_that_were_started() -> None:
    mesh = ParallelConfig(pipeline=2, data=2)
    mesh.check_processes({"WORLD_SIZE": "4", "RANK": "1"})
    ParallelConfig().check_processes({})
    with pytest.raises(ConfigError, match=r"takes 4 processes, but 6 .* pipeline x data of 1 x 6, 2 x 3, 3 x 2, 6 x 1"):
        mesh.check_processes({"WORLD_SIZE": "6", "RANK": "0"})
    with pytest.raises(ConfigError, match=r"takes 4 processes, but there is one; allowed: torchrun --nproc-per-node 4"):
        mesh.check_processes({})


def test_the_schedule_left_open_follows_the_stages_of_a_rank() -> None:
    assert ParallelConfig(pipeline=2).settled_schedule == "1f1b"
    assert ParallelConfig(pipeline=2, virtual=2).settled_schedule == "interleaved1f1b"
