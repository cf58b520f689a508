"""Make a folder of a converted model readable without attnres, by code that it brings along."""

from importlib import resources
from pathlib import Path
from typing import Any

from attnres.errors import UnsupportedModelError
from attnres.models.families import Family
from attnres.residual import BlockAttnRes, FullAttnRes, Strategy

CODE_FILE = "modeling_attnres.py"
_AUTO_MAP = {
    "AutoConfig": "modeling_attnres.AttnResConfig",
    "AutoModelForCausalLM": "modeling_attnres.AttnResForCausalLM",
}


def check_remote(strategy: Strategy) -> None:
    """Refuse what the code cannot compute.

    Raises:
        UnsupportedModelError: The strategy is not one of the paper's two.
    """
    if not isinstance(strategy, FullAttnRes | BlockAttnRes):
        raise UnsupportedModelError(
            f"code for readers without attnres has Full and Block AttnRes; the strategy is {strategy.label}"
        )


def remote_fields(family: Family) -> dict[str, Any]:
    """Fields that a ``config.json`` needs beside the code."""
    return {"auto_map": dict(_AUTO_MAP), "attnres_family": family.to_dict()}


def names_remote_code(config: Any) -> bool:
    """Whether a config asks for the code."""
    return (getattr(config, "auto_map", None) or {}).get("AutoConfig") == _AUTO_MAP["AutoConfig"]


def write_remote_code(folder: Any) -> None:
    """Put the code into a folder."""
    (Path(folder) / CODE_FILE).write_text(remote_code_text(), encoding="utf-8")


def remote_code_text() -> str:
    """The code."""
    return (resources.files("attnres.models.remote") / CODE_FILE).read_text(encoding="utf-8")
