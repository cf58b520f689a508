import pytest

from attnres.errors import ConfigError
from attnres.optim import OptimConfig, lr_multiplier


def curve(steps: int, **settings: object) -> list[float]:
    config = OptimConfig(**settings)
    return [lr_multiplier(step, steps=steps, config=config) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
def test_warm_up_rises_to_the_peak_and_no_step_has_rate_zero(schedule: str) -> None:
    values = curve(20, schedule=schedule, warmup_steps=5)
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert min(values) > 0
    assert max(values) == 1.0


def test_constant_stays_at_the_peak() -> None:
    assert set(curve(10, schedule="constant", warmup_steps=2)[2:]) == {1.0}


def test_wsd_is_flat_and_then_falls_linearly_towards_the_floor() -> None:
    values = curve(10, schedule="wsd", warmup_steps=2, decay_fraction=0.4, min_lr_ratio=0.2)
    assert values[2:7] == [1.0] * 5
    assert values[6:] == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_falls_from_the_peak_towards_the_floor() -> None:
    values = curve(12, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    assert values[2] == 1.0
    assert values[7] == pytest.approx(0.55)
    assert values[2:] == sorted(values[2:], reverse=True)
    assert 0.1 < values[-1] < 0.15


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_past_the_end_the_rate_is_the_floor(schedule: str) -> None:
    config = OptimConfig(schedule=schedule, min_lr_ratio=0.25)
    assert lr_multiplier(50, steps=10, config=config) == pytest.approx(0.25)


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_a_run_that_is_all_warm_up_does_not_divide_by_zero(schedule: str) -> None:
    assert curve(4, schedule=schedule, warmup_steps=4, decay_fraction=0.0) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", "sgd"),
        ("schedule", "linear"),
        ("lr", 0.0),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("momentum", 1.0),
        ("weight_decay", -0.1),
        ("depth_lr_scale", -1.0),
        ("warmup_steps", -1),
        ("decay_fraction", 1.5),
        ("min_lr_ratio", -0.5),
    ],
)
def test_a_setting_outside_its_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        OptimConfig(**{field: value})
