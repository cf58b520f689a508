"""What a dry run says of a mesh: stages, parameters and hops, against models that are really cut."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from attnres.errors import ConfigError, UnsupportedModelError
from attnres.experiments.layout import lay_out
from attnres.experiments.models import build_model
from attnres.experiments.presets import tiny
from attnres.parallel import parallelize
from attnres.parallel.config import ParallelConfig
from attnres.residual import BlockAttnRes, FullAttnRes


def on_mesh(*, residual=None, tied=True, family="llama", passes=4, **layout):
    base = tiny()
    return replace(
        base,
        residual=residual or BlockAttnRes(sublayers_per_block=4),
        model=replace(base.model, tie_word_embeddings=tied, family=family),
        train=replace(base.train, accumulation=passes),
        parallel=ParallelConfig(**layout),
    )


def parameters(config):
    with torch.device("meta"):
        return build_model(config).num_parameters()


@pytest.mark.parametrize("tied", [True, False])
def test_stages_have_all_parameters_once_and_a_tied_embedding_at_both_ends(tied):
    config = on_mesh(tied=tied, pipeline=3, data=2)
    shares = lay_out(config)
    assert [share.ranks for share in shares] == [(0, 1), (2, 3), (4, 5)]
    embedding = config.data.vocab_size * config.model.hidden_size
    assert sum(share.parameters for share in shares) == parameters(config) + tied * embedding
    assert [stage.sublayers for share in shares for stage in share.stages] == [(0, 3), (4, 7), (8, 11)]
    assert [stage.layers for share in shares for stage in share.stages] == [(0, 1), (2, 3), (4, 5)]
    assert [stage.receives for share in shares for stage in share.stages] == ["token ids", "E, b4", "E, b4, b8"]


def test_stages_in_a_v_come_back_to_the_first_rank_and_a_cut_layer_is_in_two():
    first, last = lay_out(on_mesh(pipeline=2, virtual=2, schedule="zbv", cuts=(3, 5, 9)))
    assert [(stage.stage, stage.sublayers, stage.layers) for stage in first.stages] == [
        (0, (0, 2), (0, 1)),
        (3, (9, 11), (4, 5)),
    ]
    assert [stage.receives for stage in last.stages] == ["E, partial", "nothing: the stage before is on the same rank"]
    assert first.stages[1].receives == "b4, b8, partial"


def test_every_strategy_says_what_it_sends():
    (_, share) = lay_out(on_mesh(residual=FullAttnRes(), pipeline=2))
    assert share.stages[0].receives == "E, b1 to b6 (6)"


def test_fsdp_divides_what_ddp_repeats():
    whole, divided = (lay_out(on_mesh(data=4, sharding=sharding))[0] for sharding in ("ddp", "fsdp"))
    assert whole.parameters == parameters(on_mesh())
    assert divided.parameters == -(-whole.parameters // 4)
    assert whole.ranks == divided.ranks == (0, 3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_tensor_ranks_have_what_a_divided_model_has_on_one_of_them(family, tied):
    config = on_mesh(family=family, tied=tied, tensor=2)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with torch.device("meta"):
            model = build_model(config)
        parallelize(model, init_device_mesh("cpu", (2,)))
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in model.parameters()]
        assert lay_out(config)[0].parameters == sum(part.numel() for part in parts)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("layout", "error", "told"),
    [
        ({"pipeline": 2, "passes": 1}, ConfigError, "too few for the schedule 1f1b.*train.accumulation"),
        ({"pipeline": 13, "passes": 16}, ConfigError, "13 stages, but the model has 12 sublayers"),
        ({"tensor": 3}, ConfigError, "parallel.tensor=3 does not fit: num_attention_heads is 4"),
        ({"tensor": 2, "family": "kimi_linear"}, UnsupportedModelError, "parallel.tensor=2 does not fit"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(layout, error, told):
    with pytest.raises(error, match=told):
        lay_out(on_mesh(**layout))
