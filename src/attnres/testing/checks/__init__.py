"""The checks, one module per area or two; importing this package fills `registry.CHECKS` in this order."""

import importlib

_MODULES = (
    "value",
    "gradient",
    "extremes",
    "dtypes",
    "determinism",
    "memory",
    "locality",
    "phases",
    "schedule",
    "output",
    "parameters",
    "backward",
    "golden",
)
for _module in _MODULES:
    importlib.import_module(f"{__name__}.{_module}")
