"""Finding the adapter that a user names: one of ours, a file of theirs, or a class in an importable module."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from attnres.errors import ConfigError
from attnres.testing.adapter import Adapter


def load_adapter(place: str) -> Adapter:
    """The adapter at ``path/to/file.py``, ``path/to/file.py:Class`` or ``module:Class``.

    While it is imported and made, the folder of the file (of a module: the current folder) is the first to import from.

    Raises:
        ConfigError: There is no such file, module or class, it is not one adapter, or it cannot be imported or made.
    """
    where, _, name = place.rpartition(":") if ":" in place and not place.endswith(".py") else (place, "", "")
    is_file = where.endswith(".py")
    with _importable(Path(where).resolve().parent if is_file else Path.cwd()):
        module = _from_file(Path(where)) if is_file else _from_module(where)
        chosen = _choose(module, where, name)
        adapter = _told(chosen, f"adapter {chosen.__name__} cannot be made")
        _check(adapter)
    return adapter


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _choose(module: ModuleType, where: str, name: str) -> type[Adapter]:
    own = {key: value for key, value in vars(module).items() if _is_adapter(value, module)}
    classes = {key: value for key, value in own.items() if not inspect.isabstract(value)} or own
    if name:
        chosen = getattr(module, name, None)
        if not (inspect.isclass(chosen) and issubclass(chosen, Adapter)):
            raise ConfigError(f"{where} has no adapter {name!r}; it has: {', '.join(classes) or 'none'}")
    elif len(classes) != 1:
        found = ", ".join(classes) or "none"
        raise ConfigError(
            f"{where} defines {len(classes)} adapters ({found}); allowed: one, or name it as {where}:Class"
        )
    else:
        (chosen,) = classes.values()
    if inspect.isabstract(chosen) or not hasattr(chosen, "name"):
        raise ConfigError(f"adapter {chosen.__name__} is not complete: it needs a name and a read()")
    return chosen


def _is_adapter(value: object, module: ModuleType) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, Adapter)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
    )


def _check(adapter: Adapter) -> None:
    """What every table and every check needs of it."""
    for word in ("name", "version"):
        value: object = getattr(adapter, word)
        if not isinstance(value, str):
            raise ConfigError(f"{word} of adapter {type(adapter).__name__} is {value!r}, which is no str")
    dtypes: Any = adapter.dtypes
    if not isinstance(dtypes, tuple | list) or not all(isinstance(one, torch.dtype) for one in dtypes) or not dtypes:
        raise ConfigError(f"dtypes of adapter {type(adapter).__name__} is {dtypes!r}; allowed: one or more torch.dtype")


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"adapter is {str(path)!r}, and there is no such file")
    name = f"attnres_testing_adapter_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    _told(lambda: loader.exec_module(module), f"{path} cannot be imported")
    return module


def _from_module(name: str) -> ModuleType:
    return _told(lambda: importlib.import_module(name), f"module {name!r} of an adapter cannot be imported")


_Made = TypeVar("_Made")


def _told(make: Callable[[], _Made], what: str) -> _Made:
    """What ``make`` makes; whatever it raises is a mistake of the adapter's, told in one line."""
    try:
        return make()
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ImportError | SyntaxError) else f"{type(error).__name__}: "
        raise ConfigError(" ".join(f"{what}: {kind}{error}".split())) from error
