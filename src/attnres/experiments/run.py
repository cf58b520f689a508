"""One run from its config alone: data, model, training, and what is measured along depth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from attnres.analysis.probe import probe
from attnres.errors import AttnResError, ConfigError
from attnres.experiments.models import build_model, open_data, record_end_of_text, self_contained, unfilled_model
from attnres.models.convert import converted_base
from attnres.parallel.mesh import Mesh
from attnres.parallel.schedules import check_pipeline
from attnres.parallel.tensor import check_division
from attnres.parallel.tokens import check_tokens
from attnres.train import Callback, Checkpoints, Resume, RunConfig, RunContext, Trainer
from attnres.train.checkpoint import CHECKPOINTS
from attnres.train.files import replace_text, to_json
from attnres.train.progress import PlainDisplay

DEPTH = "depth.json"
DEPTH_AT_START = "depth_start.json"
Progress = bool | Literal["plain"]
"""Whether to show progress; ``"plain"`` prints lines even on a terminal, for several runs at once."""
PROBE_SEQUENCES = 16
"""Validation windows that the measurement along depth averages over."""


class DepthProbe(Callback):
    """Measures magnitudes and the mixing matrix of the trained model, into ``depth.json``.

    A run that starts from a pretrained model is measured before its first step as well, into ``depth_start.json``.
    """

    def on_start(self, context: RunContext) -> None:
        """Probe a pretrained model as it comes."""
        if context.step == 0 and context.config.model.pretrained is not None:
            self._measure(context, DEPTH_AT_START)

    def on_end(self, context: RunContext, result: dict[str, Any]) -> None:
        """Probe the first validation windows."""
        del result
        self._measure(context, DEPTH)

    def _measure(self, context: RunContext, name: str) -> None:
        inputs, targets = (torch.cat(parts) for parts in zip(*context.evaluator.batches(), strict=True))
        measured = probe(context.whole_model(), inputs[:PROBE_SEQUENCES], targets[:PROBE_SEQUENCES])
        replace_text(context.folder / name, to_json(measured.to_dict()))


def check_layout(runs: Sequence[RunConfig]) -> None:
    """Raise unless the processes that were started, the layers and the passes of a step fit the mesh of some runs.

    It looks at the settings alone, so that every rank comes to the same before anything begins.

    Args:
        runs: All on one mesh.

    Raises:
        ConfigError: They do not; the message has what would fit.
        UnsupportedModelError: Tensor ranks cannot divide a model.
    """
    runs[0].parallel.check_processes()
    for config in runs:
        check_fits(config)


def check_fits(config: RunConfig) -> None:
    """Raise unless the layers, the heads and the passes of a step fit the mesh of a run, whatever processes there are.

    Raises:
        ConfigError: They do not; the message has what would fit.
        UnsupportedModelError: Tensor ranks cannot divide the model.
    """
    layout = config.parallel
    if layout.stages == layout.tensor == 1:
        return
    with torch.device("meta"):
        model = build_model(config, weights=False)
    if layout.tensor > 1:
        _check_tensor(model, layout.tensor, config.data.context)
    if layout.stages > 1:
        _check_stages(model, config)


def _check_tensor(model: Any, ranks: int, tokens: int) -> None:
    try:
        check_division(model, ranks)
        check_tokens(model, ranks, tokens)
    except AttnResError as error:
        raise type(error)(f"parallel.tensor={ranks} does not fit: {error}") from error


def _check_stages(model: Any, config: RunConfig) -> None:
    layout = config.parallel
    try:
        check_pipeline(
            converted_base(model).residual.num_sublayers,
            ranks=layout.pipeline,
            microbatches=config.train.accumulation,
            schedule=layout.settled_schedule,
            virtual=layout.virtual,
            cuts=layout.cuts,
        )
    except ConfigError as error:
        passes = " (--train.accumulation: the passes of a step)" if "micro-batches" in str(error) else ""
        raise ConfigError(
            f"parallel.pipeline={layout.pipeline} with parallel.virtual={layout.virtual} does not fit: {error}{passes}"
        ) from error


def run(
    config: RunConfig,
    folder: Path,
    *,
    resume: Resume = False,
    progress: Progress = True,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """Train one run and measure it.

    Args:
        config: The run.
        folder: Where it goes; a new folder unless ``resume``.
        resume: Go on with the run in the folder.
        progress: Whether to show progress on standard error.
        mesh: The processes that train it together, each with this call; None is this one alone.

    Returns:
        What is in ``result.json``.

    Raises:
        AttnResError: The config, the data or the folder cannot be used, or training broke off.
    """
    config = self_contained(config)
    display = PlainDisplay(folder.name, config.train.steps) if progress == "plain" else progress
    saved = resume and any(Checkpoints(folder / CHECKPOINTS).paths())
    model = _model(config, mesh, weights=not saved)
    data = open_data(config.data) if mesh is None else mesh.first_then_others(lambda: open_data(config.data))
    record_end_of_text(model, config.model, data.tokenizer())
    trainer = Trainer(
        model,
        data,
        config,
        folder,
        callbacks=[DepthProbe()],
        progress=display,
        mesh=mesh,
        rebuild=lambda weights: build_model(config, weights=weights),
    )
    del model  # on a mesh the trainer keeps this rank's part only
    return trainer.fit(resume=resume)


def _model(config: RunConfig, mesh: Mesh | None, *, weights: bool) -> Any:
    """The model; on a mesh, rank 0 alone gives it values."""
    if mesh is None:
        return build_model(config, weights=weights)
    return mesh.first_or_others(lambda: build_model(config, weights=weights), lambda: unfilled_model(config))
