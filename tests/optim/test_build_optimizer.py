import copy

import pytest
import torch
from torch import nn

from attnres.errors import CheckpointError
from attnres.optim import GroupedOptimizer, OptimConfig, build_optimizer


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
