"""Finding the adapter that a user names: one of ours, a file of theirs, or a class in an importable module."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from attnres.errors import ConfigError
from attnres.testing.adapter import Adapter


def load_adapter(place: str) -> Adapter:
    """The adapter at ``path/to/file.py``, ``path/to/file.py:Class`` or ``module:Class``.

    Raises:
        ConfigError: There is no such file, module or class, or it is not one adapter.
    """
    where, _, name = place.rpartition(":") if ":" in place and not place.endswith(".py") else (place, "", "")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_module(where)
    classes = {key: value for key, value in vars(module).items() if _is_adapter(value, module)}
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
    return chosen()


def _is_adapter(value: object, module: ModuleType) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, Adapter)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
    )


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"adapter is {str(path)!r}, and there is no such file")
    name = f"attnres_testing_adapter_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"{path} cannot be imported: {error}") from error
    return module


def _from_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"module {name!r} of an adapter cannot be imported: {error}") from error
