"""What a folder is, by its ``config.json``: that of a run, or that of a Hugging Face model."""

import json
from pathlib import Path
from typing import Literal

from attnres.train.folder import CONFIG


def kind_of(folder: Path) -> Literal["run", "hugging-face"] | None:
    """Whose config a folder has; None where there is none, or none that can be told."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict):
        return None
    return "hugging-face" if "model_type" in settings else "run" if "residual" in settings else None
