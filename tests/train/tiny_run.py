"""The smallest run that has everything a checkpoint must hold: tied weights, dropout, both optimizers, a callback.

Also a program: ``python tiny_run.py FOLDER`` makes the runs that `test_kill_and_resume` looks at. Each is a process of
its own, forked before PyTorch computes anything, and killed by a real SIGKILL.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnres.optim import OptimConfig
from attnres.residual import PreNorm
from attnres.train import Callback, DataConfig, RunConfig, RunContext, TokenArrays, TrainConfig, Trainer

VOCAB = 32
CONTEXT = 8
OPTIM = OptimConfig(lr=0.01, schedule="wsd", warmup_steps=2, decay_fraction=0.3)
TRAIN = TrainConfig(
    steps=10,
    batch_size=2,
    accumulation=2,
    eval_every=4,
    eval_sequences=5,
    checkpoint_every=3,
    keep_checkpoints=2,
    precision="fp32",
    threads=1,
    device="cpu",
)


def tiny_config(*, optim: OptimConfig = OPTIM, residual: Any = None, **train: Any) -> RunConfig:
    return RunConfig(
        residual=residual or PreNorm(),
        data=DataConfig(vocab_size=VOCAB, context=CONTEXT),
        optim=optim,
        train=replace(TRAIN, **train),
    )


def tiny_model(*, seed: int = 0, tied: bool = True, vocab_size: int = VOCAB) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        attention_dropout=0.1,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def tiny_data(*, seed: int = 0, train: int = 400, valid: int = 120) -> TokenArrays:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCAB, train + valid, dtype=np.uint16)
    return TokenArrays(tokens[:train], tokens[train:], vocab_size=VOCAB, bytes_per_token=3.0)


class LossSum(Callback):
    """A callback with a state: the sum of all losses of the run."""

    def __init__(self) -> None:
        self.total = 0.0

    def on_step_end(self, context: RunContext) -> None:
        self.total += context.metrics["loss"]

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def tiny_trainer(folder: Path, *, config: RunConfig | None = None, **arguments: Any) -> Trainer:
    defaults = {"callbacks": [LossSum()], "progress": False}
    return Trainer(tiny_model(), tiny_data(), config or tiny_config(), folder, **(defaults | arguments))


KILLS = {
    "first-step": ("attnres.train.trainer.backward", 1),
    "before-first-checkpoint": ("attnres.train.trainer.backward", 3),
    "after-first-checkpoint": ("attnres.train.trainer.backward", 4),
    "in-an-evaluation": ("attnres.train.evaluation.read_windows", 8),
    "last-step": ("attnres.train.trainer.backward", 10),
    "first-save-no-file-flushed": ("attnres.train.checkpoint.sync", 1),
    "second-save-half-flushed": ("attnres.train.checkpoint.sync", 6),
    "save-before-the-manifest": ("attnres.train.checkpoint._manifest", 2),
    "save-before-the-rename": ("attnres.data.folders._rename", 3),
    "between-save-and-prune": ("attnres.train.checkpoint.Checkpoints.prune", 3),
    "while-deleting-an-old-one": ("attnres.train.checkpoint.shutil.rmtree", 4),
    "before-the-result": ("attnres.train.trainer.build_result", 1),
    "while-writing-the-result": ("attnres.train.files.os.replace", 1),
}
"""Where a run is killed: the function that is about to be called, and at which of its calls."""


@contextmanager
def killed_at(target: str, call: int) -> Iterator[None]:
    owner, _, name = target.rpartition(".")
    holder = _resolve(owner)
    original: Callable[..., Any] = getattr(holder, name)
    calls = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with mock.patch.object(holder, name, counting):
        yield


def _resolve(dotted: str) -> Any:
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(dotted)


def in_a_child(work: Callable[[], object], *, kill_after: float | None = None) -> int:
    """Run in a forked process; return its exit status, negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        work()
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fit(folder: Path, *, precision: str = "fp32", resume: bool = False) -> None:
    tiny_trainer(folder, config=tiny_config(precision=precision)).fit(resume=resume)


def killed_fit(folder: Path, target: str, call: int) -> None:
    with killed_at(target, call):
        fit(folder)


def killed_by_timer(folder: Path) -> None:
    """Start and resume until it is done, each process living a little longer than the one before."""
    for attempt in range(1, 100):
        started = (folder / "config.json").exists()
        if in_a_child(lambda started=started: fit(folder, resume=started), kill_after=0.03 * attempt) == 0:
            return
    raise RuntimeError("the run never got to its end")


def main(root: Path) -> None:
    for name in ("reference", "again"):
        assert in_a_child(lambda name=name: fit(root / name)) == 0
    assert in_a_child(lambda: fit(root / "reference-bf16", precision="bf16")) == 0
    for name, (target, call) in KILLS.items():
        folder = root / name
        assert in_a_child(lambda: killed_fit(folder, target, call)) == -signal.SIGKILL, name  # noqa: B023
        assert in_a_child(lambda: fit(folder, resume=True)) == 0, name  # noqa: B023
    killed_by_timer(root / "timer")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
