"""What `train` and `compare` share: the preset that other options change."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from attnres.cli.parsing import peek
from attnres.errors import ConfigError
from attnres.experiments.arms import strategy_of
from attnres.experiments.compare import COMPARE
from attnres.experiments.describe import describe
from attnres.experiments.presets import preset
from attnres.residual import STRATEGIES, Strategy
from attnres.train import RunConfig, load_run_config

PresetName = Literal["tiny", "small"]
DEFAULT_PRESET: PresetName = "tiny"


def base_config(arguments: Sequence[str]) -> RunConfig:
    """What the options start from: the preset that is named, else with ``--resume`` the run itself.

    Raises:
        ConfigError: There is no such preset, or no such run.
    """
    name, out = peek(arguments, "--preset"), peek(arguments, "--out")
    if name is None and out is not None and "--resume" in arguments and not (Path(out) / COMPARE).is_file():
        return load_run_config(Path(out))
    return preset(name or DEFAULT_PRESET)


def residual_default(arguments: Sequence[str], default: Strategy) -> tuple[str, Strategy]:
    """The strategy that ``--residual NAME`` names, whose settings are then options of their own; else the default.

    Raises:
        ConfigError: There is no such strategy.
    """
    name = peek(arguments, "--residual")
    if name is None:
        return default.short_name, default
    if name not in STRATEGIES:
        word, colon, _ = name.partition(":")
        if colon and word in STRATEGIES:
            raise ConfigError(
                f"residual is {name!r}; allowed is the word {word!r} alone, settings are --residual.* options"
            )
        raise ConfigError(f"residual is {name!r}; allowed: {', '.join(STRATEGIES)}")
    by_count = any(argument.split("=")[0].replace("_", "-") == "--residual.num-blocks" for argument in arguments)
    return name, strategy_of(name, {"num_blocks": 1} if by_count and name == "block" else {})


def print_plan(config: RunConfig) -> None:
    """The resolved config and what it costs, for ``--dry-run``."""
    print(json.dumps({**config.to_dict(), "plan": dataclasses.asdict(describe(config))}, indent=2))
