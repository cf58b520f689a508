"""Memory that nobody has touched stands in for a model's values until they are sent, and looks like the model."""

import pytest
import torch
from torch import nn

from attnres.models import build
from attnres.parallel.weights import allocate, named_tensors
from attnres.residual import BlockAttnRes
from models.small import ALL_CONFIGS
from strategies.cases import case_id, cases

RUN_HERE = sorted(set(ALL_CONFIGS) - {"kimi_linear"})  # its kernels may need a GPU; it is not run below, only built
BLOCK = BlockAttnRes(num_blocks=2)


def description(model: nn.Module) -> list[tuple[object, ...]]:
    return [
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter))
        for name, tensor in named_tensors(model).items()
    ]


def allocated(family: str, strategy: object = BLOCK) -> nn.Module:
    with torch.device("meta"):
        model = build(ALL_CONFIGS[family](layers=4), strategy)  # pyright: ignore[reportArgumentType]
    assert allocate(model)
    return model


@pytest.mark.parametrize("family", RUN_HERE)
def test_every_family_looks_as_if_it_had_been_built(family):
    model = allocated(family)
    assert description(model) == description(build(ALL_CONFIGS[family](layers=4), BLOCK))
    assert not any(tensor.is_meta for tensor in named_tensors(model).values())


@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_every_strategy_looks_as_if_it_had_been_built(strategy):
    assert description(allocated("llama", strategy)) == description(build(ALL_CONFIGS["llama"](layers=4), strategy))


def test_a_model_that_is_given_all_values_is_the_model():
    torch.manual_seed(0)
    source, model = build(ALL_CONFIGS["llama"](layers=4), BLOCK), allocated("llama")
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            tensor.copy_(named_tensors(source)[name])
    ids = torch.arange(6)[None]
    assert torch.equal(model(input_ids=ids).logits, source(input_ids=ids).logits)


def test_tied_weights_stay_tied_and_are_named_once():
    with torch.device("meta"):
        model = build(ALL_CONFIGS["llama"](tie_word_embeddings=True), BLOCK)
    assert allocate(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in named_tensors(model)


def test_a_tensor_that_nobody_could_send_leaves_the_model_as_it_is():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].table = torch.zeros(3)
    assert not allocate(model)
    assert all(parameter.is_meta for parameter in model.parameters())
