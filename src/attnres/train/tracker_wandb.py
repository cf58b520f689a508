"""Metrics to Weights & Biases."""

import json
import uuid
from pathlib import Path
from typing import Any, final

from attnres.errors import BackendUnavailableError
from attnres.train.files import replace_text, to_json


@final
class WandbTracker:
    """Logs to the W&B project ``attnres``; a resumed run goes on under the same id, kept in ``wandb.json``.

    W&B ignores rows of steps it has seen, so the rows repeated after a resume do no harm.

    Raises:
        BackendUnavailableError: W&B is not installed.
    """

    def __init__(self) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise BackendUnavailableError("tracker 'wandb' needs W&B: pip install 'attnres[wandb]'") from error
        self._wandb = wandb

    def start(self, folder: Path, config: dict[str, Any], *, step: int | None) -> None:
        """Open or reopen the W&B run."""
        del step
        identity = folder / "wandb.json"
        if not identity.exists():
            replace_text(identity, to_json({"id": uuid.uuid4().hex}))
        run_id = json.loads(identity.read_text(encoding="utf-8"))["id"]
        self._run = self._wandb.init(
            project="attnres", name=folder.name, id=run_id, resume="allow", config=config, dir=str(folder)
        )

    def log(self, row: dict[str, Any]) -> None:
        """Log every number of a row as ``kind/name``."""
        numbers = {f"{row['kind']}/{name}": value for name, value in row.items() if name not in ("kind", "step")}
        self._run.log(numbers, step=row["step"])

    def flush(self) -> None:
        """W&B sends in the background; there is nothing to do."""

    def finish(self, result: dict[str, Any] | None) -> None:
        """Write the result as the run's summary and close it."""
        self._run.summary.update(result or {})
        self._run.finish(exit_code=0 if result is not None else 1)
