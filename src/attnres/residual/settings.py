"""Checks that every strategy makes of its settings: each is of the type that it is declared with."""

import math
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from attnres.errors import ConfigError

WORDS = {bool: "true or false", int: "a whole number", float: "a finite number"}


def check_settings(settings: Any) -> None:
    """Raise unless booleans, whole numbers and numbers are that; a list of whole numbers becomes a tuple.

    Raises:
        ConfigError: A setting has another type, or is not finite.
    """
    for name, kinds in _declared(type(settings)).items():
        value = getattr(settings, name)
        if tuple[int, ...] in kinds:
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(settings, name, value)  # frozen; as JSON has it
            if not isinstance(value, tuple) or any(type(item) is not int for item in value):
                raise ConfigError(f"{name} is {value!r}; allowed are whole numbers, as in (2, 5)")
        elif not any(_is(value, kind) for kind in kinds):
            allowed = [WORDS[kind] for kind in kinds if kind in WORDS] + ["None"] * (NoneType in kinds)
            raise ConfigError(f"{name} is {value!r}; allowed is {' or '.join(allowed)}")


@cache
def _declared(cls: type) -> dict[str, tuple[Any, ...]]:
    """Fields that are booleans, numbers or tuples of whole numbers, and with what they may be."""
    hints = get_type_hints(cls)
    kinds = {field.name: get_args(hints[field.name]) or (hints[field.name],) for field in fields(cls)}
    kinds |= {name: (hints[name],) for name in kinds if hints[name] == tuple[int, ...]}
    checked = {*WORDS, tuple[int, ...]}
    return {name: choices for name, choices in kinds.items() if any(choice in checked for choice in choices)}


def _is(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind
