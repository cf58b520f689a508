"""Settings to JSON and back: nested dataclasses, and unions told apart by class name.

A run folder must say exactly what ran, and a file edited by hand must fail on the line that is wrong, so reading checks
every key and every type and names what it would have taken.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from attnres.errors import ConfigError

T = TypeVar("T")
Unions = Mapping[type, Mapping[str, type]]
"""Base class -> its concrete dataclasses by class name."""


def to_dict(config: Any, *, unions: Unions) -> dict[str, Any]:
    """The fields of a dataclass as JSON values; a member of a union gets ``"type"``, its class name, in front."""
    hints = get_type_hints(type(config))
    return {
        field.name: _to_json(getattr(config, field.name), tagged=hints[field.name] in unions, unions=unions)
        for field in fields(config)
    }


def _to_json(value: Any, *, tagged: bool, unions: Unions) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        tag = {"type": type(value).__name__} if tagged else {}
        return tag | to_dict(value, unions=unions)
    if isinstance(value, tuple | list):
        return [_to_json(item, tagged=False, unions=unions) for item in value]
    return value


def from_dict(cls: type[T], data: Any, *, unions: Unions, path: str = "") -> T:
    """Build a dataclass from what `to_dict` made of one; absent keys take their defaults.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type; the message has the dotted key.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or cls.__name__} is {data!r}; allowed: an object with the fields of {cls.__name__}")
    known = {field.name: field for field in fields(cls)}  # pyright: ignore[reportArgumentType]
    for key in data:
        if key not in known:
            raise ConfigError(f"unknown key {_join(path, key)!r}; allowed: {', '.join(known) or 'none'}")
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"key {_join(path, name)!r} is missing")
    hints = get_type_hints(cls)
    return cls(**{key: _value(hints[key], value, unions, _join(path, key)) for key, value in data.items()})


def _value(declared: Any, value: Any, unions: Unions, path: str) -> Any:
    if declared in unions:
        return _member(unions[declared], value, unions, path)
    if isinstance(declared, type) and is_dataclass(declared):
        return from_dict(declared, value, unions=unions, path=path)
    origin, options = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return _optional(options, value, unions, path)
    if origin is Literal:
        if any(value == option and type(value) is type(option) for option in options):
            return value
    elif origin is tuple:
        return _tuple(options, value, unions, path)
    elif declared is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif type(value) is declared:
        return value
    raise ConfigError(f"{path} is {value!r}; allowed: {_describe(declared)}")


def _member(members: Mapping[str, type], value: Any, unions: Unions, path: str) -> Any:
    allowed = f"an object whose type is one of {', '.join(members)}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {value!r}; allowed: {allowed}")
    if value.get("type") not in members:
        raise ConfigError(f"{path}.type is {value.get('type')!r}; allowed: {', '.join(members)}")
    settings = {key: item for key, item in value.items() if key != "type"}
    return from_dict(members[value["type"]], settings, unions=unions, path=path)


def _optional(options: tuple[Any, ...], value: Any, unions: Unions, path: str) -> Any:
    """A value that may be None; no setting has another plain union, which JSON could not tell apart."""
    if value is None and NoneType in options:
        return None
    declared = next(option for option in options if option is not NoneType)
    return _value(declared, value, unions, path)


def _tuple(options: tuple[Any, ...], value: Any, unions: Unions, path: str) -> tuple[Any, ...]:
    repeated = len(options) == 2 and options[1] is Ellipsis
    if not isinstance(value, list | tuple) or (not repeated and len(value) != len(options)):
        count = "any number" if repeated else str(len(options))
        raise ConfigError(f"{path} is {value!r}; allowed: a list of {count} of {_describe(options[0])}")
    declared = [options[0]] * len(value) if repeated else list(options)
    return tuple(
        _value(kind, item, unions, f"{path}[{index}]")
        for index, (kind, item) in enumerate(zip(declared, value, strict=True))
    )


def _describe(declared: Any) -> str:
    if get_origin(declared) is Literal:
        return ", ".join(repr(option) for option in get_args(declared))
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(
        declared, str(declared)
    )


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else str(key)
