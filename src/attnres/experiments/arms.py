"""Arms of a comparison as words: ``block``, ``block:num_blocks=4``, or ``cut-block:boundaries=2+5+9``.

An arm may also differ in its optimizer settings, behind an at sign: ``block:num_blocks=4@train_only=depth``.
"""

import re
from typing import Any, get_origin, get_type_hints

from attnres.errors import ConfigError
from attnres.optim import OptimConfig
from attnres.residual import STRATEGIES, BlockAttnRes, Strategy
from attnres.train import RunConfig
from attnres.train.serialize import from_dict, to_dict

DEFAULTS: dict[str, dict[str, Any]] = {BlockAttnRes.short_name: {"sublayers_per_block": 4}}
"""Settings of a strategy that has to have some; four sublayers a block is the paper's best of its ablation."""


def parse_arm(word: str) -> Strategy:
    """The strategy that a word stands for.

    Args:
        word: A strategy's short name, optionally followed by ``:key=value`` pairs separated by commas. Several numbers
            are joined by pluses.

    Raises:
        ConfigError: The name or a key is unknown, or a value is not allowed.

    Examples:
        >>> parse_arm("block:num_blocks=4").label
        'Block AttnRes (N=4)'
        >>> parse_arm("cut-block:boundaries=2+5+9").label
        'Block AttnRes (cuts 2+5+9)'
    """
    name, _, settings = word.partition("@")[0].partition(":")
    if name not in STRATEGIES:
        raise ConfigError(f"arm is {word!r}; allowed: {', '.join(STRATEGIES)}, each with settings as in NAME:key=value")
    given = _settings(word, settings)
    try:
        return strategy_of(name, given)
    except ConfigError as error:
        raise ConfigError(f"arm {word!r}: {error}") from error


def arm_optim(word: str, base: OptimConfig) -> OptimConfig:
    """The optimizer settings of an arm: those of the comparison, but for what the word says behind its at sign.

    Raises:
        ConfigError: A key is unknown, or a value is not allowed.

    Examples:
        >>> arm_optim("full@train_only=depth,lr=1e-3", OptimConfig()).lr
        0.001
    """
    given = _settings(word, word.partition("@")[2])
    try:
        return from_dict(OptimConfig, {**to_dict(base, unions={}), **given}, unions={})
    except ConfigError as error:
        raise ConfigError(f"arm {word!r}: {error}") from error


def arm_label(word: str) -> str:
    """Name of an arm for readers.

    Examples:
        >>> arm_label("full@train_only=depth")
        'Full AttnRes, train_only=depth'
    """
    _, at, settings = word.partition("@")
    return parse_arm(word).label + (f", {settings.replace(',', ', ')}" if at else "")


def strategy_of(name: str, settings: dict[str, Any]) -> Strategy:
    """The strategy of a short name with settings, and with its defaults where none is given.

    Raises:
        ConfigError: A key is unknown, or a value is not allowed.
    """
    cls = STRATEGIES[name]
    hints = get_type_hints(cls)
    several = {key for key in settings if get_origin(hints.get(key)) is tuple and isinstance(settings[key], int)}
    settings = {key: [value] if key in several else value for key, value in settings.items()}
    defaults = {} if {"sublayers_per_block", "num_blocks"} & settings.keys() else DEFAULTS.get(name, {})
    config = RunConfig.from_dict({"residual": {"type": cls.__name__, **defaults, **settings}})
    return config.residual


def arm_folder(word: str, seed: int) -> str:
    """Name of the run folder of an arm and seed.

    Examples:
        >>> arm_folder("block:num_blocks=4", 0)
        'block-num-blocks-4-seed0'
    """
    told_apart = word.replace("=-", "=minus-")
    return f"{re.sub('[^A-Za-z0-9.]+', '-', told_apart).strip('-')}-seed{seed}"


def _settings(word: str, text: str) -> dict[str, Any]:
    pairs = [_setting(word, part) for part in text.split(",") if part]
    given = dict(pairs)
    if len(given) < len(pairs):
        raise ConfigError(f"arm is {word!r}; allowed is each setting once")
    return given


def _setting(word: str, part: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    if not equals:
        raise ConfigError(f"arm is {word!r}; allowed after the colon: key=value pairs separated by commas")
    return key.strip().replace("-", "_"), _value(value.strip())


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if re.fullmatch(r"\d+(\+\d+)+", text):
        return [int(part) for part in text.split("+")]
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
