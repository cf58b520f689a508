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
    "mhc": [{}, {"streams": 2}, {"map_eps": 1e-3, "output": "learned"}],
    "mhc-lite": [{}, {"streams": 3}],
    "hyper-connections": [{}, {"dynamic": False, "streams": 2}, {"tanh": False}],
    "ddl": [{}, {"streams": 1}, {"value": "linear", "beta_hidden": 5}, {"value": "constant", "streams": 2}],
    "mrla": [{}, {"form": "base"}, {"form": "base", "heads": 2, "taps": 5}],
    "projected": [{}, {"channel_groups": 4}],
    "layerscale": [{}, {"init": None}],
    "hybridnorm": [{}, {"first_prenorm": True}],
    "keel": [{}, {"alpha": 2.5}],
    "siamese": [{}, {"depth_scaling": False}],
    "laurel": [{}, {"normalization": "sigmoid"}, {"normalization": "none"}],
    "highway": [{}, {"per_channel": True}, {"gate_bias": -2.0}],
    "nanochat": [{}, {"back_out": False}],
    "low-rank-query": [{"rank": 2}, {"query_from": "read", "rank": 2}, {"rank": 3, "sublayers_per_block": 3}],
    "block-lagged": [{"rank": 2}, {"phases": "one", "rank": 2}, {"rank": 3, "sublayers_per_block": 3}],
    "sliced-key": [{}, {"rank": 5, "sublayers_per_block": 3}, {"block_average": True, "sublayers_per_block": 3}],
    "top-k": [{"k": 3}, {"k": 1}, {"sublayers_per_block": 3, "k": 3}],
    "delta": [{}, {"null_score": "learned"}, {"sublayers_per_block": 3}],
    "gated": [{}, {"sublayers_per_block": 3}],
    "hybrid": [{}, {"first_sublayer": 2, "sublayers_per_block": 3}, {"first_sublayer": 0}],
    "cut-block": [{"boundaries": (2, 5)}, {"boundaries": (1, 2, 3, 7)}, {"phases": "two", "boundaries": (2, 5)}],
    "learned-block": [{}, {"read_scale": "sum"}],
    "rms-block": [{"sublayers_per_block": 3}, {"sublayers_per_block": 1}, {"sublayers_per_block": 3, "phases": "two"}],
    "wav": [{}, {"sublayers_per_block": 3}, {"read_scale": "sum"}],
    "block-mhc": [{"streams": 2}, {"streams": 3, "sublayers_per_block": 3}, {"sublayers_per_block": 1}],
    "inkling2": [{"sublayers_per_block": 3}, {"reads": "one", "sublayers_per_block": 3}],
    "cumulative": [{}, {"sublayers_per_block": 3}, {"phases": "two", "sublayers_per_block": 3}],
}
"""Settings by short name; one without an entry is tested as it comes. The first is the one that is trained."""


def cases() -> list[Strategy]:
    """Each strategy in each of its settings."""
    return [cls(**settings) for name, cls in STRATEGIES.items() for settings in SETTINGS.get(name, [{}])]


def case_id(strategy: Strategy) -> str:
    default = type(strategy)(**SETTINGS.get(strategy.short_name, [{}])[0])
    changed = {key: value for key, value in vars(strategy).items() if value != getattr(default, key)}
    return strategy.short_name + "".join(f"-{key}={value}" for key, value in changed.items())
