"""The training loop.

It is short on purpose: what a step is, how it is saved and where numbers go live in files of their own, and the order
in which they happen is all that is decided here. That order is what makes a resumed run the uninterrupted one: metrics
of a step are on disk before its checkpoint, an evaluation comes before the checkpoint of the same step, and a step
whose numbers are not finite is never applied.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from torch import nn

from attnres.data.sampler import Sampler
from attnres.errors import CheckpointError, ConfigError, TrainingError
from attnres.optim import GroupedOptimizer, lr_multiplier
from attnres.parallel.mesh import Mesh
from attnres.train.batch import TokenData, check_data, checksums, read_windows
from attnres.train.callback import Callback, RunContext, callback_states, restore_callbacks
from attnres.train.checkpoint import CHECKPOINTS, FORMAT, Checkpoint, Checkpoints
from attnres.train.config import RunConfig
from attnres.train.evaluation import Evaluator
from attnres.train.files import replace_text, to_json
from attnres.train.folder import (
    RESULT,
    check_new,
    check_same_run,
    clean_run_folder,
    create_run_folder,
    differences,
    lock,
    update_config,
)
from attnres.train.forward import StepNumbers, backward
from attnres.train.memory import peak_memory_bytes, reset_peak_memory
from attnres.train.position import Position
from attnres.train.progress import Display, SilentDisplay, build_display
from attnres.train.result import build_result
from attnres.train.runtime import enable_activation_checkpointing, resolve, runtime
from attnres.train.single import SingleProcess
from attnres.train.tracker import JsonlTracker, Row, Tracker, build_trackers
from attnres.train.weights import load_weights

Resume = bool | Literal["fallback"]
"""``True``: from the newest checkpoint. ``"fallback"``: from the newest one that is whole."""


@final
class Trainer:
    """Trains one model in one run folder.

    Args:
        model: A decoder with the Hugging Face call, ``model(input_ids=..., use_cache=False).logits``. It is trained in
            place.
        data: A dataset, or `TokenArrays`.
        config: The run; settings left to ``"auto"`` are settled for this machine.
        folder: The run folder: new, or the one to resume.
        callbacks: Called as the run goes along.
        trackers: Where metrics go besides ``metrics.jsonl``; None takes those named in the config.
        progress: Whether to show progress on standard error; or a display of the caller's.
        mesh: The processes that train together, each with a trainer of its own; None is this one alone. Rank 0 owns
            the folder and calls callbacks and trackers.
        rebuild: Makes the model anew, as it was before the first step, for callbacks that ask for a whole one on a
            mesh; with False, its weights do not matter.

    Raises:
        ConfigError: The vocabularies of model, config and data differ, or the mesh is not the config's.
        DataError: The context is longer than a shard.
        BackendUnavailableError: A device, precision or tracker was asked for by name and is not here.
    """

    def __init__(
        self,
        model: nn.Module,
        data: TokenData,
        config: RunConfig,
        folder: Path | str,
        *,
        callbacks: Sequence[Callback] = (),
        trackers: Sequence[Tracker] | None = None,
        progress: bool | Display = True,
        mesh: Mesh | None = None,
        rebuild: Callable[[bool], nn.Module] | None = None,
    ):
        self.config = resolve(config)
        check_data(model, data, self.config)
        if (1 if mesh is None else mesh.size) != self.config.parallel.size:
            raise ConfigError(
                f"the config is for {self.config.parallel.size} processes ({self.config.parallel.mesh}); "
                f"allowed: {'a mesh of as many' if mesh is None else mesh.size}"
            )
        self.model, self.data, self.folder = model, data, Path(folder)
        self._mesh, self._rebuild = mesh, rebuild
        self._is_first = mesh is None or mesh.is_first
        self.callbacks = tuple(callbacks) if self._is_first else ()
        others = build_trackers(self.config.train.trackers) if trackers is None else trackers
        self._trackers: list[Tracker] = [JsonlTracker(), *others] if self._is_first else []
        steps = self.config.train.steps
        shown = build_display(self.folder.name, steps, enabled=progress) if isinstance(progress, bool) else progress
        self._display: Display = shown if self._is_first else SilentDisplay()
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS)
        self.position = Position()
        self._row: Row = {}

    def fit(self, *, resume: Resume = False) -> Row:
        """Train to the end and return what is in ``result.json``.

        Args:
            resume: Go on with the run in the folder, from its newest checkpoint (from the start where it has none).
                Steps may be more than before; a setting that decides numbers may not differ.

        Raises:
            ConfigError: The folder exists and ``resume`` is false, or it holds another run, or another process has it.
            CheckpointError: A checkpoint is damaged or does not fit the model.
            TrainingError: A loss or gradient was not finite. Checkpoints are as they were.
        """
        with runtime(self.config.train), ExitStack() as owned:
            self._check_alike()
            if not resume:
                self._on_first(lambda: check_new(self.folder))
                self._set_up()
                self._begin(None)
                self._on_first(lambda: create_run_folder(self.folder, self.config, self.data.tokenizer_path))
                self._on_first(lambda: owned.enter_context(lock(self.folder)))
                return self._run(None)
            self._on_first(lambda: check_same_run(self.folder, self.config))
            self._on_first(lambda: owned.enter_context(lock(self.folder)))
            self._on_first(self._clean)
            self._set_up()
            checkpoint = self._processes.newest(self.checkpoints, fallback=resume == "fallback")
            self._begin(checkpoint)
            return self._run(None if checkpoint is None else checkpoint.step)

    def _check_alike(self) -> None:
        """Raise unless all processes are about to train the same run on the same tokens."""
        if self._mesh is None:
            return
        told = self._mesh.gather((self.config, checksums(self.data)))
        for rank, (config, data) in enumerate(told):
            name, first, here = next(differences(told[0][0], config), ("", None, None))
            if name:
                other = f"{name} ({here!r}, not {first!r})"
                raise ConfigError(f"{self._mesh.name_of(rank)} has another {other} than rank 0; allowed: one config")
            if data != told[0][1]:
                raise ConfigError(f"{self._mesh.name_of(rank)} has other tokens than rank 0; allowed: one dataset")

    @property
    def optimizer(self) -> GroupedOptimizer:
        """Updates the parameters of this process."""
        return self._processes.optimizer

    def _on_first(self, do: Callable[[], Any]) -> None:
        """Do what only the owner of the folder does; its error is every process's."""
        with nullcontext() if self._mesh is None else self._mesh.agreed():
            if self._is_first:
                do()

    def _clean(self) -> None:
        clean_run_folder(self.folder)
        self.checkpoints.clean()

    def _set_up(self) -> None:
        """Make everything that follows from the config."""
        train, context = self.config.train, self.config.data.context
        enable_activation_checkpointing(self.model, train.activation_checkpointing)
        self.model.train()
        if self._mesh is None:
            self._processes = SingleProcess(self.model, self.config)
        else:
            from attnres.train.several import SeveralProcesses  # loads what one process does not need

            self._processes = SeveralProcesses(self.model, self.config, self._mesh)
            self.model = self._processes.model  # what is elsewhere need not stay in this process's memory
        self._shard = self.data.split("train")
        self.sampler = Sampler(
            len(self._shard), context=context, batch_size=train.batch_size * train.accumulation, seed=train.seed
        )
        self.evaluator = Evaluator(
            self._processes.evaluated,
            self._processes.eval_loss,
            self.data.split("valid"),
            context=context,
            sequences=train.eval_sequences,
            batch_size=train.batch_size,
            device=train.device,
            share=self._processes.share,
        )

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Put model, optimizer, data and random generators where the run starts or goes on."""
        if checkpoint is None:
            self._processes.start()
            self.position = Position()
            return
        state = checkpoint.state
        if state["data"] != checksums(self.data):
            raise ConfigError(f"cannot resume {self.folder}: it was trained on other tokens (their checksums differ)")
        if checkpoint.step > self.config.train.steps:
            raise CheckpointError(
                f"{checkpoint.path} is at step {checkpoint.step}; allowed: at most {self.config.train.steps}"
            )
        self._processes.load(checkpoint)
        self.sampler.load_state_dict(state["sampler"])
        restore_callbacks(self.callbacks, state["callbacks"])
        self._processes.restore_random_state(state)
        self.position = Position(**state["position"])

    def _run(self, resumed_at: int | None) -> Row:
        """The loop, with everything open that has to be closed again."""
        result: Row | None = None
        started: list[Tracker] = []
        reset_peak_memory(self.config.train.device)
        try:
            for tracker in self._trackers:
                tracker.start(self.folder, self.config.to_dict(), step=resumed_at)
                started.append(tracker)
            self._on_first(lambda: update_config(self.folder, self.config))
            self._display.start(self.position.step)
            self._loop()
            found: Row = self._processes.from_first(self._finish)
            result = found
            return found
        finally:
            self._display.stop()
            for tracker in started:
                tracker.finish(result)

    def _loop(self) -> None:
        train = self.config.train
        for callback in self.callbacks:
            callback.on_start(self._context())
        if self.position.step == 0:
            self._evaluate()
        while self.position.step < train.steps:
            self._step()
            if self._is_due(train.eval_every):
                self._evaluate()
            if self._is_due(train.checkpoint_every):
                self._save()

    def _is_due(self, every: int) -> bool:
        step = self.position.step
        return step == self.config.train.steps or (every > 0 and step % every == 0)

    def _step(self) -> None:
        """One optimizer step."""
        began = time.perf_counter()
        train, position = self.config.train, self.position
        multiplier = lr_multiplier(position.step, steps=train.steps, config=self.config.optim)
        starts = self.sampler.next_batch()
        batches = [
            read_windows(self._shard, self._processes.rows(part), self.config.data.context, train.device)
            for part in np.split(starts, train.accumulation)
        ]
        self.optimizer.zero_grad()
        numbers = backward(self._processes, batches, grad_clip=train.grad_clip)
        if not numbers.finite:
            raise TrainingError(self._not_finite(numbers, starts))
        self.optimizer.set_lr(multiplier)
        self.optimizer.step()
        seconds = time.perf_counter() - began
        position.step += 1
        position.tokens += self.config.tokens_per_step
        position.seconds += seconds
        self._log(
            kind="train",
            loss=numbers.loss,
            lr=self.config.optim.lr * multiplier,
            grad_norm=numbers.grad_norm,
            tokens_per_second=self.config.tokens_per_step / seconds,
        )
        for callback in self.callbacks:
            callback.on_step_end(self._context())

    def _evaluate(self) -> None:
        evaluation = self.evaluator()
        self._processes.rest()
        if not np.isfinite(evaluation.loss):
            raise TrainingError(
                f"the validation loss is {evaluation.loss} after step {self.position.step}; {self._last_checkpoint()}"
            )
        self._log(kind="valid", loss=evaluation.loss, bits_per_byte=evaluation.bits_per_byte)
        for callback in self.callbacks:
            callback.on_evaluate(self._context())

    def _save(self) -> None:
        for tracker in self._trackers:
            tracker.flush()
        state = {
            "format": FORMAT,
            "step": self.position.step,
            "position": {**vars(self.position), "peak_memory_bytes": self._peak_memory()},
            "sampler": self.sampler.state_dict(),
            "data": checksums(self.data),
            **self._processes.random_state(),
            "callbacks": callback_states(self.callbacks),
        }
        path = self._processes.save(self.checkpoints, state)
        self._on_first(lambda: self.checkpoints.prune(self.config.train.keep_checkpoints))
        for callback in self.callbacks:
            callback.on_checkpoint(self._context(), path)

    def _finish(self) -> Row:
        """Write ``result.json``."""
        sizes, memory = self._processes.sizes, self._peak_memory()
        result = build_result(self.folder, self.config, sizes, self.position, peak_memory_bytes=memory)
        for callback in self.callbacks:
            callback.on_end(self._context(), result)
        replace_text(self.folder / RESULT, to_json(result))  # last, so that a run with a result lacks nothing
        return result

    def _log(self, *, kind: str, **numbers: float) -> None:
        position = self.position
        self._row = {
            "kind": kind,
            "step": position.step,
            "tokens": position.tokens,
            **numbers,
            "seconds": position.seconds,
        }
        for tracker in self._trackers:
            tracker.log(self._row)
        self._display.update(self._row)

    def _context(self) -> RunContext:
        return RunContext(
            model=self.model,
            config=self.config,
            folder=self.folder,
            evaluator=self.evaluator,
            step=self.position.step,
            tokens=self.position.tokens,
            metrics=self._row,
            whole_model=self._whole_model,
        )

    def _whole_model(self) -> nn.Module:
        """The model on this process alone; on a mesh one that is made anew, with the newest checkpoint."""
        if self._mesh is None:
            return self.model
        if self._rebuild is None:
            raise ConfigError(
                "a callback asks for the whole model on a mesh; allowed with a trainer that can rebuild it"
            )
        saved = self.checkpoints.paths()
        source = saved[-1] if saved else self.config.train.init_from
        random_before = torch.get_rng_state()
        model = self._rebuild(not saved)
        if source is not None:
            load_weights(model, source, may_lack_depth=not saved)
        torch.set_rng_state(random_before)
        return model.to(self.config.train.device).train()

    def _peak_memory(self) -> int:
        return max(self.position.peak_memory_bytes, peak_memory_bytes(self.config.train.device))

    def _not_finite(self, numbers: StepNumbers, starts: np.ndarray) -> str:
        shown = ", ".join(str(start) for start in starts[:16])
        more = f" and {len(starts) - 16} more" if len(starts) > 16 else ""
        return (
            f"loss {numbers.loss} with gradient norm {numbers.grad_norm} at step {self.position.step + 1}; the update "
            f"was not applied. Batch: windows of {self.config.data.context} tokens of the train split "
            f"at {shown}{more}; {self._last_checkpoint()}"
        )

    def _last_checkpoint(self) -> str:
        paths = self.checkpoints.paths()
        return f"last good checkpoint: {paths[-1] if paths else 'none'}"
