"""A Hugging Face config as its user gave it: read from a file or from its content, with every mistake in one line."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from attnres.errors import AttnResError, ConfigError


def read_settings(source: str, *, name: str) -> dict[str, Any]:
    """The settings in a ``config.json``, or in its content.

    Args:
        source: Path, or JSON text.
        name: What it was given as, for messages.

    Raises:
        ConfigError: It cannot be read, or has no ``model_type``.
    """
    inline = source.lstrip().startswith("{")
    place = "its content" if inline else source
    try:
        settings = json.loads(source if inline else Path(source).read_text(encoding="utf-8"))
        if not isinstance(settings["model_type"], str):
            raise TypeError(f"model_type is {settings['model_type']!r}")
    except OSError as error:
        raise ConfigError(f"{name} is {place}; it cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{name} is {place}; allowed: a config.json with a model_type ({error!r})") from error
    return settings


def config_of(settings: Mapping[str, Any]) -> PreTrainedConfig:
    """The config that settings with a ``model_type`` describe.

    Raises:
        ConfigError: Transformers finds something wrong with them.
    """
    others = {name: value for name, value in settings.items() if name != "model_type"}
    with told_in_one_line():
        return AutoConfig.for_model(settings["model_type"], **others)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """What Transformers finds wrong with a config is the user's to mend, but it has no exception class for it.

    Raises:
        ConfigError: With what Transformers said.
    """
    try:
        yield
    except AttnResError:
        raise
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        RuntimeError,
        ArithmeticError,
    ) as error:
        raise ConfigError(f"Transformers cannot use this model config: {error}") from error
