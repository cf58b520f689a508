"""Named runs: functions that return a complete `RunConfig`, to be varied with `dataclasses.replace`.

The norm's eps is 1e-8 throughout, not Llama's 1e-6. A read that is the mean of n sources sees the eps of the norm after
it n^2 times as large, and at the start, where embeddings have a standard deviation of 0.02, 1e-6 would no longer be
small: the arms of a comparison would not start from the same function (docs/decisions/0002-norm-eps.md).
"""

from collections.abc import Callable

from attnres.errors import ConfigError
from attnres.optim import OptimConfig
from attnres.residual import PreNorm
from attnres.train import DataConfig, ModelConfig, RunConfig, TrainConfig


def tiny() -> RunConfig:
    """A demonstration: 12 sublayers, 1.6 M parameters, 0.3 M tokens."""
    return RunConfig(
        model=ModelConfig(
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-8,
        ),
        residual=PreNorm(),
        data=DataConfig(vocab_size=4096, context=128),
        optim=OptimConfig(lr=4e-3, warmup_steps=20),
        train=TrainConfig(steps=160, batch_size=16, eval_every=20, eval_sequences=64, checkpoint_every=80),
    )


def small() -> RunConfig:
    """A study on two CPU cores: 10 sublayers, 3.0 M parameters, 4.1 M tokens, by AdamW."""
    return RunConfig(
        model=ModelConfig(
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=5,
            num_attention_heads=3,
            num_key_value_heads=3,
            rms_norm_eps=1e-8,
        ),
        residual=PreNorm(),
        data=DataConfig(vocab_size=4096, context=128),
        optim=OptimConfig(optimizer="adamw", lr=3e-3, warmup_steps=50),
        train=TrainConfig(steps=1000, batch_size=32, eval_every=100, eval_sequences=256, checkpoint_every=250),
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {"tiny": tiny, "small": small}
"""Every preset by its word on the command line."""


def preset(name: str) -> RunConfig:
    """The preset of a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset is {name!r}; allowed: {', '.join(PRESETS)}")
    return PRESETS[name]()
