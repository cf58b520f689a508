"""Make Transformers' auto classes know converted models, without importing Transformers along with attnres.

``import attnres`` is light, and Transformers is not. So where Transformers is not imported yet, its registry of configs
is watched for, and told when it comes.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

REGISTRY = "transformers.models.auto.configuration_auto"


def register_when_imported() -> None:
    """Register with Transformers' auto classes now, or as soon as they are imported."""
    if REGISTRY in sys.modules:
        _register(sys.modules[REGISTRY])
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """A finder that finds one module as the others do, and registers when that has been executed."""

    def __init__(self) -> None:
        self._is_looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != REGISTRY or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
            _register(module)

        loader.exec_module = execute_and_register


def _register(registry: Any) -> None:
    """Register a config class that makes the right one, of the model's own family, when it is asked for."""
    from transformers.configuration_utils import PreTrainedConfig

    class AttnResConfig(PreTrainedConfig):
        """Stands for the configs of all converted models, whatever their family."""

        model_type = "attnres"

        def __new__(cls, **config: Any) -> Any:
            return cls.from_dict(config) if config else super().__new__(cls)

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            from attnres.models import config_from_dict, register

            config = config_from_dict(config_dict, **kwargs)
            register(type(config[0] if isinstance(config, tuple) else config))
            return config

    AttnResConfig.__module__ = __name__
    globals()["AttnResConfig"] = AttnResConfig
    registry.CONFIG_MAPPING.register("attnres", AttnResConfig, exist_ok=True)
