"""Wiring: any supported Hugging Face decoder with any residual strategy."""

from attnres.models.classes import register
from attnres.models.config import config_from_dict, describe_strategy, parse_strategy
from attnres.models.convert import build, convert, unconvert
from attnres.models.families import FAMILIES, Family, SublayerParts
from attnres.models.scale import ScaleReport, scale_report

__all__ = [
    "FAMILIES",
    "Family",
    "ScaleReport",
    "SublayerParts",
    "build",
    "config_from_dict",
    "convert",
    "describe_strategy",
    "parse_strategy",
    "register",
    "scale_report",
    "unconvert",
]
