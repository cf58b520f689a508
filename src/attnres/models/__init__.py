"""Wiring: any supported Hugging Face decoder with any residual strategy."""

from attnres.models.convert import build, convert
from attnres.models.families import FAMILIES, Family

__all__ = ["FAMILIES", "Family", "build", "convert"]
