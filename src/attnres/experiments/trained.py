"""A trained model back from its run folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from attnres.data import load_tokenizer
from attnres.experiments.models import build_model, open_data, record_end_of_text
from attnres.train import Evaluation, Evaluator, RunConfig, load_run_config, load_weights, resolve_device
from attnres.train.forward import build_eval_loss
from attnres.train.runtime import runtime


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model with the config and tokenizer of its run."""

    model: Any
    config: RunConfig
    tokenizer: Tokenizer
    checkpoint: Path


def load_trained(folder: Path) -> Trained:
    """The model of a run's newest checkpoint, in evaluation mode.

    Raises:
        ConfigError: The folder is not a run folder.
        CheckpointError: There is no checkpoint, or it is damaged.
        DataError: The tokenizer is missing.
    """
    config = load_run_config(folder)
    model = build_model(config, weights=False)
    checkpoint = load_weights(model, folder)
    model.to(resolve_device(config.train.device)).eval()
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    record_end_of_text(model, config.model, tokenizer)
    return Trained(model=model, config=config, tokenizer=tokenizer, checkpoint=checkpoint)


def evaluate(trained: Trained, *, split: str = "valid", sequences: int | None = None) -> Evaluation:
    """Loss of a trained model on a split, in the precision that the run evaluated in.

    Args:
        trained: The model.
        split: ``"train"`` or ``"valid"``.
        sequences: Windows to read, evenly spread; None reads all of them.

    Raises:
        DataError: The dataset of the run is missing or damaged.
    """
    train, context = trained.config.train, trained.config.data.context
    shard = open_data(trained.config.data).split(split)
    evaluator = Evaluator(
        trained.model,
        build_eval_loss(trained.model, train),
        shard,
        context=context,
        sequences=len(shard) // context if sequences is None else sequences,
        batch_size=train.batch_size,
        device=train.device,
    )
    with runtime(train):
        return evaluator()
