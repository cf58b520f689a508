"""What the tests of training on a mesh run on the ranks."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig

from attnres.errors import ConfigError
from attnres.models import build
from attnres.optim import OptimConfig
from attnres.parallel.config import ParallelConfig
from attnres.parallel.mesh import Mesh
from attnres.parallel.weights import allocate, named_tensors
from attnres.residual import STRATEGIES, BlockAttnRes, FullAttnRes, PreNorm
from attnres.train import Callback, RunConfig, RunContext, Trainer
from parallel.work_data import forget_groups, quiet_dynamo
from train.tiny_run import VOCAB, tiny_config, tiny_data

RESIDUALS = {
    "block": BlockAttnRes(sublayers_per_block=3),
    "full": FullAttnRes(),
    "prenorm": PreNorm(),
    "mhc": STRATEGIES["mhc"](),
}
OPTIM = OptimConfig(optimizer="adamw", lr=1e-3, schedule="constant")


class Seen(Callback):
    """What a callback is told, and the sum of losses as a state of its own."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.total = 0.0

    def on_step_end(self, context: RunContext) -> None:
        self.total += context.metrics["loss"]

    def on_end(self, context: RunContext, result: dict[str, Any]) -> None:
        self.told.append(f"end {result['steps']}")
        self.whole = {name: p.detach().clone() for name, p in context.whole_model().named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def model_of(strategy: str, *, tied: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        max_position_embeddings=64,
    )
    return build(shape, RESIDUALS[strategy], dtype=torch.float32)


def unfilled(strategy: str, *, tied: bool) -> Any:
    """The same model with NaN in place of every value."""
    with torch.device("meta"):
        model = model_of(strategy, tied=tied)
    assert allocate(model)
    with torch.no_grad():
        for tensor in named_tensors(model).values():
            tensor.fill_(torch.nan)
    return model


def config_of(parallel: dict[str, Any], *, strategy: str = "block", optim: dict[str, Any] | None = None, **train: Any):
    settings: dict[str, Any] = {"batch_size": 4, "accumulation": 4, "steps": 4, "eval_every": 2, "checkpoint_every": 2}
    config: RunConfig = tiny_config(
        optim=replace(OPTIM, **(optim or {})), residual=RESIDUALS[strategy], **(settings | train)
    )
    return replace(config, parallel=ParallelConfig(**parallel))


def fit(
    folder: str,
    parallel: dict[str, Any],
    *,
    resume: Any = False,
    strategy: str = "block",
    tied: bool = True,
    optim: dict[str, Any] | None = None,
    callbacks: bool = False,
    **train: Any,
) -> dict[str, Any]:
    """Train on the mesh of the default group, or alone where the mesh is of one process."""
    config = config_of(parallel, strategy=strategy, optim=optim, **train)
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager")), quiet_dynamo():
        return _fit(Path(folder), config, resume=resume, strategy=strategy, tied=tied, callbacks=callbacks)


def _fit(folder: Path, config: RunConfig, *, resume: Any, strategy: str, tied: bool, callbacks: bool) -> dict[str, Any]:
    mesh = Mesh(config.parallel, device="cpu") if config.parallel.size > 1 else None
    seen = Seen()
    trainer = Trainer(
        model_of(strategy, tied=tied) if mesh is None or mesh.is_first else unfilled(strategy, tied=tied),
        tiny_data(),
        config,
        folder,
        callbacks=[seen],
        progress=False,
        mesh=mesh,
        rebuild=lambda weights: model_of(strategy, tied=tied, seed=0 if weights else 9),
    )
    result = trainer.fit(resume=resume)
    told = {"told": seen.told, "total": seen.total, "whole": getattr(seen, "whole", None)} if callbacks else {}
    return {"result": result, **told}


def fit_several(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """One call of the pool for many runs."""
    forget_groups()
    return [fit(folder, parallel, **others) for folder, parallel, others in cases]


def fit_with_another_rate(folder: str, rank: int) -> str:
    """Train with another learning rate on one rank; what this one is told."""
    forget_groups()
    rate = 1e-2 if torch.distributed.get_rank() == rank else 1e-3
    try:
        fit(folder, {"data": 2}, optim={"lr": rate})
    except ConfigError as error:
        return str(error)
    return "nothing"
