"""A pool of processes for tests of several ranks: started once, because importing PyTorch four times takes longer than
most of the tests, and given a fresh gloo group for each call.

A function that runs there has to be importable, so it lives in a module of this folder that is no test module.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GROUP_SECONDS = 60.0
"""Time-out of every collective and transfer inside a call."""
GRACE_SECONDS = 5.0
"""How long the other ranks may still answer once one of them has failed."""


class RankError(AssertionError):
    """A rank failed, or did not answer; holds what each rank said."""

    def __init__(self, message: str, errors: dict[int, str], results: dict[int, Any]):
        super().__init__(message)
        self.errors = errors
        """Traceback by rank, of those that failed."""
        self.results = results
        """What the others returned; a rank that gave no answer is in neither."""


class Processes:
    """Runs functions on several ranks."""

    def __init__(self, size: int = 4):
        self._size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 120.0,
        group_seconds: float = GROUP_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> list[Any]:
        """Call ``function(*arguments)`` on each of some ranks, with a default process group, and return the results.

        Raises:
            RankError: A rank raised, ended, or gave no answer in time. The processes are started anew after that.
        """
        workers = self._started()[:world_size]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, connection) in enumerate(workers):
                place = (rank, world_size, str(Path(folder) / "store"), group_seconds)
                connection.send((function, arguments, place))
            answers = self._collect([connection for _, connection in workers], timeout, grace_seconds)
        errors = {rank: text for rank, (kind, text) in answers.items() if kind == "error"}
        missing = [rank for rank in range(world_size) if rank not in answers]
        if errors or missing:
            self.stop()
            texts = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items()))
            results = {rank: result for rank, (kind, result) in answers.items() if kind == "ok"}
            raise RankError(f"{function.__name__}: no answer from ranks {missing}\n{texts}", errors, results)
        return [answers[rank][1] for rank in range(world_size)]

    def stop(self) -> None:
        """Kill the processes."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def _started(self) -> list[tuple[Any, Connection]]:
        context = multiprocessing.get_context("spawn")
        new: list[Connection] = []
        while len(self._workers) < self._size:
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
            new.append(here)
        for here in new:  # imports do not count as time of a call
            here.recv()
        return self._workers

    @staticmethod
    def _collect(connections: list[Connection], timeout: float, grace: float) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        end = time.monotonic() + timeout
        while len(answers) < len(connections) and time.monotonic() < end:
            open_ = [connection for rank, connection in enumerate(connections) if rank not in answers]
            for ready in wait(open_, timeout=max(0.0, end - time.monotonic())):
                rank = connections.index(ready)  # pyright: ignore[reportArgumentType]
                try:
                    answers[rank] = connections[rank].recv()
                except EOFError:
                    answers[rank] = ("error", "the process ended")
                if answers[rank][0] == "error":
                    end = min(end, time.monotonic() + grace)
        return answers


def _work(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # a group is there when every rank has it: a rank that is done at once would else close what others still connect
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    warnings.simplefilter("error")  # as in the tests' own process
    import torch

    import attnres.models  # noqa: F401  # with what most calls need

    torch.set_num_threads(1)
    connection.send(("ready", ""))
    while True:
        try:
            function, arguments, place = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", _call(function, arguments, *place)))
        except BaseException:  # noqa: BLE001  # whatever it is, the test is told
            connection.send(("error", traceback.format_exc()))


def _call(
    function: Callable[..., Any], arguments: Any, rank: int, world_size: int, store: str, group_seconds: float
) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_seconds),
    )
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()
