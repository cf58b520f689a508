"""Every strategy, in the settings it is tested in."""

from typing import Any

from attnres.residual import STRATEGIES, Strategy

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "block": [{"sublayers_per_block": 3}],
    "input-dependent": [{}, {"query_from": "read"}, {"norm_query": False, "sublayers_per_block": 3}],
    "input-independent": [{}, {"normalization": "none"}, {"sublayers_per_block": 3}],
    "sigmoid": [{}, {"renormalize": True}, {"sublayers_per_block": 3}],
    "no-key-norm": [{}, {"sublayers_per_block": 3}],
    "window": [{"window": 3}, {"window": 1}, {}],
    "multi-head": [{}, {"norm_per_head": True}, {"sublayers_per_block": 3}],
    "denseformer": [{}, {"sublayers_per_average": 3}],
    "mhc": [{}, {"streams": 2}],
}
"""Settings by short name; one without an entry is tested as it comes. The first is the one that is trained."""


def cases() -> list[Strategy]:
    """Each strategy in each of its settings."""
    return [cls(**settings) for name, cls in STRATEGIES.items() for settings in SETTINGS.get(name, [{}])]


def case_id(strategy: Strategy) -> str:
    default = type(strategy)(**SETTINGS.get(strategy.short_name, [{}])[0])
    changed = {key: value for key, value in vars(strategy).items() if value != getattr(default, key)}
    return strategy.short_name + "".join(f"-{key}={value}" for key, value in changed.items())
