import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from attnres.errors import CheckpointError, ConfigError
from attnres.models import build
from attnres.optim import GroupedOptimizer, OptimConfig, build_optimizer, is_depth_parameter
from attnres.residual import STRATEGIES, BlockAttnRes, PreNorm


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8))


def train(model: nn.Module, optimizer: GroupedOptimizer, steps: int, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(8, (5,), generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_going_on_from_a_saved_state_is_bitwise_the_uninterrupted_run(name: str) -> None:
    config = OptimConfig(optimizer=name, lr=0.05)
    model = small_model()
    optimizer = build_optimizer(model, config)
    train(model, optimizer, 3, seed=1)
    other = copy.deepcopy(model)
    restored = build_optimizer(other, config)
    restored.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 3, seed=2)
    train(other, restored, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    saved, again = optimizer.state_dict(), restored.state_dict()
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[key], again[key]) for key in saved)


def test_a_state_is_keyed_by_name_and_holds_tensors_only() -> None:
    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(optimizer="muon"))
    assert optimizer.state_dict() == {}
    train(model, optimizer, 1, seed=0)
    state = optimizer.state_dict()
    assert {"1.weight/momentum_buffer", "1.bias/exp_avg", "0.weight/step", "2.weight/exp_avg_sq"} <= state.keys()
    assert all(isinstance(value, torch.Tensor) for value in state.values())


def test_both_optimizers_move_their_parameters() -> None:
    model = small_model()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = build_optimizer(model, OptimConfig(optimizer="muon"))
    assert [type(part).__name__ for part in optimizer.parts] == ["Muon", "AdamW"]
    train(model, optimizer, 1, seed=0)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nobody.weight/exp_avg": torch.zeros(2)}, "nobody.weight"),
        ({"1.weight/momentum_buffer": torch.zeros(2, 2)}, "1.weight/momentum_buffer"),
        ({"1.weight/exp_avg": torch.zeros(6, 4)}, "momentum_buffer"),
    ],
    ids=["unknown-name", "wrong-shape", "state-of-another-optimizer"],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: dict, message: str) -> None:
    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(optimizer="muon"))
    train(model, optimizer, 1, seed=0)
    before = {key: value.clone() for key, value in optimizer.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(before | change)
    assert all(torch.equal(before[key], value) for key, value in optimizer.state_dict().items())


def small_decoder(strategy) -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return build(LlamaConfig(vocab_size=32, num_key_value_heads=1, **shape), strategy)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("short_name", ["full", "block", "denseformer", "learned-block"])
def test_only_what_the_residual_strategy_learns_moves_when_asked(short_name: str, optimizer: str) -> None:
    settings = {"sublayers_per_block": 2} if short_name == "block" else {}
    model = small_decoder(STRATEGIES[short_name](**settings))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    built = build_optimizer(model, OptimConfig(optimizer=optimizer, lr=0.1, weight_decay=0.1, train_only="depth"))
    for seed in range(2):
        torch.manual_seed(seed)
        built.zero_grad()
        ids = torch.randint(32, (2, 9))
        model(input_ids=ids, labels=ids).loss.backward()
        built.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved
    assert all(is_depth_parameter(name) for name in moved)
    assert {group["name"] for group in built.param_groups} == {"depth"}
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} >= moved
    assert all(is_depth_parameter(name) for name, parameter in model.named_parameters() if parameter.grad is not None)


def test_the_depth_rate_is_its_own_with_and_without_a_frozen_base() -> None:
    for train_only in ("all", "depth"):
        config = OptimConfig(lr=0.01, depth_lr_scale=5.0, train_only=train_only)
        built = build_optimizer(small_decoder(BlockAttnRes(num_blocks=2)), config)
        rates = {group["name"]: group["lr"] for group in built.param_groups}
        assert rates["depth"] == pytest.approx(0.05)


def test_a_strategy_that_learns_nothing_has_no_depth_to_train_and_nothing_is_frozen() -> None:
    model = small_decoder(PreNorm())
    with pytest.raises(ConfigError, match=r"optim.train_only is 'depth', but this residual strategy has no parameters"):
        build_optimizer(model, OptimConfig(train_only="depth"))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_unknown_choice_of_what_is_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="train_only is 'head'; allowed"):
        OptimConfig(train_only="head")
