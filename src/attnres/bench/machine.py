"""What a number was measured on. Every row of a result file carries it, since a time without it says nothing."""

import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

import attnres
from attnres.errors import ConfigError
from attnres.provenance import checkout, cpu_model

_BUSY_CORES = 0.2
_STAT = Path("/proc/stat")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Date, code and hardware of a run; the first columns of every result file."""

    date: str
    commit: str
    """Of the checkout that ran, ``+`` behind it when the checkout had changes; empty for an installed package."""
    attnres: str
    torch: str
    device: str
    processor: str
    """Model of the CPU, or name of the GPU."""
    threads: int
    allocator: str
    """``"kept"`` when freed memory stays with the process (`attnres.bench.allocator`), else ``"default"``."""
    load_average: float | None
    """Of the last minute, at the start. Earlier work of our own counts in it; `busy_cores` decides on the warning."""
    busy_cores: float | None
    """Cores at work while this process waited, at the start."""

    @property
    def is_busy(self) -> bool:
        """Whether others were at work too, so that times are distorted."""
        busy = self.load_average if self.busy_cores is None else self.busy_cores
        return busy is not None and busy > _BUSY_CORES


def measured_on(device: torch.device, *, kept_memory: bool = False) -> Machine:
    """Describe this machine now, and say on standard error when it is busy."""
    machine = Machine(
        date=datetime.now(UTC).isoformat(timespec="minutes"),
        commit=_commit(),
        attnres=attnres.__version__,
        torch=torch.__version__,
        device=device.type,
        processor=torch.cuda.get_device_name() if device.type == "cuda" else cpu_model(),
        threads=torch.get_num_threads(),
        allocator="kept" if kept_memory else "default",
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        busy_cores=_busy_cores(),
    )
    if machine.is_busy:
        print(f"warning: {_load(machine)}: numbers taken on a busy machine are distorted", file=sys.stderr)
    return machine


def device_of(name: str) -> torch.device:
    """The device that ``"auto"``, ``"cpu"`` or ``"cuda"`` means here.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda', but this torch finds no CUDA device; allowed here: cpu")
    return torch.device(("cuda" if has_cuda else "cpu") if name == "auto" else name)


def _load(machine: Machine) -> str:
    busy = "" if machine.busy_cores is None else f" and {machine.busy_cores:.1f} cores at work"
    return f"load average {machine.load_average}{busy}"


def _busy_cores(seconds: float = 0.3) -> float | None:
    """Cores that others keep busy, seen while we sleep."""
    before = _core_seconds()
    if before is None:
        return None
    time.sleep(seconds)
    after = _core_seconds()
    return None if after is None else round((after - before) / seconds, 2)


def _core_seconds() -> float | None:
    """Time that all cores together have worked: what is neither idle nor waiting for a disk."""
    try:
        ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _commit() -> str:
    found = checkout(exclude=("benchmarks/results",))  # what is measured changes its own files
    if found is None:
        return ""
    revision, changed = found
    return f"{revision[:10]}+" if changed else revision[:10]
