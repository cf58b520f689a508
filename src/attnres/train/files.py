"""Replacing one file in one step, so that a reader or a crash sees the old text or the new one."""

import json
import os
import uuid
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Write a file aside, flush it to disk and rename it into place."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def to_json(value: Any) -> str:
    """Readable JSON with a final newline; numbers that are not finite are refused, as JSON has none."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
