"""The processes of a run: how they find each other, agree, and end together.

One rank's error is every rank's: what can fail on one of them is done inside `Mesh.agreed`, which compares notes before
anybody goes on to a collective that would wait for ever. What cannot be foreseen, as when a rank is killed, breaks the
next transfer of the others, and `attnres.parallel.failures` finds out which one is missing.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from attnres import errors
from attnres.errors import AttnResError, ConfigError, TrainingError
from attnres.parallel.config import ParallelConfig, restarts
from attnres.parallel.failures import RankFailure, told_to_all

T = TypeVar("T")
PATIENCE_SECONDS = 3600.0
"""How long ranks wait for what rank 0 does alone, where the time-out of transfers is shorter."""


@final
class Mesh:
    """The place of this process among those of a run.

    Args:
        config: Sizes of the mesh.
        device: ``"cpu"`` or ``"cuda"``; the default process group is the whole mesh.

    Raises:
        ConfigError: The process group has another number of ranks.
    """

    def __init__(self, config: ParallelConfig, *, device: str):
        if dist.get_world_size() != config.size:
            raise ConfigError(
                f"the mesh of {config.mesh} takes {config.size} ranks; the process group has {dist.get_world_size()}"
            )
        self.config, self.device = config, device
        self.devices = _device_mesh(config, device)
        self.rank, self.size = dist.get_rank(), config.size
        # what rank 0 does alone (text to tokens, a look along depth) may take longer than any transfer
        limit = timedelta(seconds=max(config.timeout, PATIENCE_SECONDS))
        self._patient: Any = dist.new_group(backend="gloo", timeout=limit)
        self.pipeline_rank = self.devices.get_local_rank("pipeline")
        self.data_rank = self.devices.get_local_rank("data")
        self.place = self.rank // config.tensor
        """Number of the place in pipeline and data; tensor ranks share it, and draw the same random numbers."""
        self.barrier()  # a rank that ends at once would else close what another one still connects

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all and owns the run folder."""
        return self.rank == 0

    @property
    def data_mesh(self) -> DeviceMesh:
        """Ranks that hold the same layers and read other rows."""
        return self.devices["data"]

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Group of `data_mesh`."""
        return self.devices.get_group("data")

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """Ranks that hold the other layers and read the same rows, first stage first."""
        return self.devices.get_group("pipeline")

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """Ranks that divide the weights of the same layers and the tokens of the same rows."""
        return self.devices["tensor"]

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """Group of `tensor_mesh`."""
        return self.devices.get_group("tensor")

    @contextmanager
    def agreed(self, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Leave the block on all ranks, or raise on all ranks: the error of the lowest rank that has one.

        There must be no collective inside, or a rank with an error leaves the others in it.

        Args:
            group: Of all ranks, to compare notes over; None is the default one.
        """
        found: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  # it is raised below, on every rank
            found = error
        reports = self.gather(None if found is None else Report.of(found), group)
        failed = {rank: report for rank, report in enumerate(reports) if report is not None}
        if not failed:
            return
        rank, report = next(iter(failed.items()))
        if found is not None and rank == self.rank:
            raise found
        alike = set(failed) == set(range(self.size))
        raise report.error("" if alike or rank == 0 else f"{self.name_of(rank)}: ") from found

    def gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """The values of all ranks, in order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank, however long it takes; an error of it is raised on every rank.

        Raises:
            Exception: What ``make`` raises.
        """
        made: list[Any] = [None]
        with self.agreed(self._patient):
            if self.is_first:
                made = [make()]
        dist.broadcast_object_list(made, src=0)
        return made[0]

    def first_or_others(self, first: Callable[[], T], others: Callable[[], T]) -> T:
        """What rank 0 makes in one way, however long it takes, and every other rank in another."""
        made: list[T] = []
        with self.agreed(self._patient):
            made.append(first() if self.is_first else others())
        return made[0]

    def first_then_others(self, make: Callable[[], T]) -> T:
        """Let rank 0 make something on disk that the others then find there."""
        with self.agreed(self._patient):
            made = make() if self.is_first else None
        with self.agreed():
            made = made if self.is_first else make()
        assert made is not None
        return made

    def barrier(self) -> None:
        """Wait for all ranks."""
        with self.agreed():
            pass

    def name_of(self, rank: int) -> str:
        """A rank by its number and its place."""
        place, tensor = divmod(rank, self.config.tensor)
        pipeline, data = divmod(place, self.config.data)
        beside = f", tensor {tensor}" if self.config.tensor > 1 else ""
        return f"rank {rank} of {self.size} (pipeline {pipeline}, data {data}{beside})"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn the loss of another rank into one line that says which, and leave word of an error of this one.

        Raises:
            RankFailure: Another rank failed, or was lost.
        """
        explained: RankFailure | None = None
        with ended_by_signal() as ignore_signals, told_to_all(None, "the run"):
            try:
                yield
            except RankFailure as error:
                explained = error  # another rank's failure is not ours to tell of
            except BaseException:
                ignore_signals()  # what follows is the explanation
                raise
        if explained is not None:
            raise explained


def _device_mesh(config: ParallelConfig, device: str) -> DeviceMesh:
    """The mesh, in whose groups a rank waits as long as the config says; those of PyTorch's own wait half an hour."""
    names = ("pipeline", "data", "tensor")
    ranks = torch.arange(config.size).view(config.pipeline, config.data, config.tensor)
    groups = []
    for dimension in range(ranks.ndim):
        rows = ranks.movedim(dimension, -1).flatten(0, -2).tolist()
        group, _ = dist.new_subgroups_by_enumeration(rows, timeout=timedelta(seconds=config.timeout))
        groups.append(group)
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


@dataclass(frozen=True, kw_only=True)
class Report:
    """An error in a form that can be sent."""

    kind: str
    """Name of its class, where it is one of ours."""
    text: str
    """Its message."""

    @classmethod
    def of(cls, error: Exception) -> "Report":
        """The report of an error."""
        if isinstance(error, AttnResError):
            return cls(kind=type(error).__name__, text=str(error))
        return cls(kind="", text=f"{type(error).__name__}: {error}")

    def error(self, prefix: str) -> AttnResError:
        """The error again, with who had it in front."""
        kind: type[AttnResError] = getattr(errors, self.kind, TrainingError) if self.kind else TrainingError
        return kind(f"{prefix}{self.text}")


@final
class JobRecord:
    """What torchrun keeps of a job from one start to the next: what the job has begun, and whether it was refused.

    So a job that is started again after it lost a rank goes on with its own run, and never with one that was there
    before it.

    Args:
        store: One that outlives the processes.
    """

    def __init__(self, store: Store):
        self._store = PrefixStore("attnres/job", store)

    def note(self, key: str) -> None:
        """Note something for later starts."""
        self._store.set(key, "")

    def has(self, key: str) -> bool:
        """Whether it was noted."""
        return self._store.check([key])


def job_record(environment: Mapping[str, str] = os.environ) -> JobRecord | None:
    """The record of the launcher that started this process; None where it keeps none."""
    store = _launcher_store(timedelta(seconds=30), environment)
    return None if store is None else JobRecord(store)


def _launcher_store(timeout: timedelta, environment: Mapping[str, str] = os.environ) -> Store | None:
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False, timeout=timeout)


@contextmanager
def launched_mesh(config: ParallelConfig, *, device: str) -> Iterator[Mesh]:
    """Join the other processes that torchrun started, and part from them at the end.

    Args:
        config: The mesh.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL; each process takes the GPU of its local rank).

    Raises:
        ConfigError: Other numbers of processes were started.
        RankFailure: Another rank failed or was lost.
    """
    config.check_processes()
    limit = timedelta(seconds=config.timeout)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    _join("nccl" if device == "cuda" else "gloo", limit)
    try:
        mesh = Mesh(config, device=device)
        with mesh.watched():
            yield mesh
    finally:
        dist.destroy_process_group()


def _join(backend: str, limit: timedelta) -> None:
    """Make the default process group.

    Where torchrun's store outlives the processes, each start needs keys of its own: else a rank could find the address
    that another one had before the job was started again, and wait there for ever.
    """
    store = _launcher_store(limit)
    if store is None:
        dist.init_process_group(backend, timeout=limit)
        return
    own = PrefixStore(f"attnres/start-{restarts()}", store)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)


class Ended(RuntimeError):
    """The launcher asked this process to end, as it does when another one was lost."""

    def __init__(self) -> None:
        super().__init__("connection closed: the launcher ended this process")


@contextmanager
def ended_by_signal() -> Iterator[Callable[[], None]]:
    """Raise `Ended` at a SIGTERM inside the block; what is yielded makes this process deaf to further ones."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def ignore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def end(number: int, frame: Any) -> None:
        del number, frame
        ignore()
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield ignore
    finally:
        signal.signal(signal.SIGTERM, before)
