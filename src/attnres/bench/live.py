"""Memory in live tensors: the peak during a function, and what a backward keeps.

On the CPU the peak is taken from the allocator's own record of every allocation and release, the temporary ones inside
an operator included, so it is exact and the same every time, which the resident set of a process is not.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Largest number of bytes that ``function`` had allocated at once; what was there before does not count."""
    if device.type == "cuda":
        return _peak_cuda(function)
    return peak_of(_allocations(function))


def peak_of(changes: Iterable[tuple[int, int]]) -> int:
    """Peak of a sequence of (address, bytes), negative bytes for a release; releases of older memory are left out."""
    live: dict[int, int] = {}
    now = peak = 0
    for address, size in changes:
        now -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            now += size
            peak = max(peak, now)
    return peak


def _peak_cuda(function: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _allocations(function: Callable[[], Any]) -> list[tuple[int, int]]:
    """Every allocation and release on the CPU while ``function`` runs, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on standard error otherwise
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
        del result
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    changes.sort(key=lambda event: event["args"]["Ev Idx"])
    return [(event["args"]["Addr"], event["args"]["Bytes"]) for event in changes]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a function keeps for its backward beyond what it was given."""

    bytes: int
    """Of all saved memory that is not an input's, each piece once."""
    largest: int
    """Elements of the largest saved tensor that is not an input."""


def saved_by(function: Callable[[], Any], inputs: Iterable[Tensor]) -> Saved:
    """Run ``function`` and look at every tensor that autograd saves.

    A saved tensor is known by its memory: a view of an input costs nothing, and two views of one result count once.
    """
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    sizes: dict[int, int] = {}
    keep: list[Tensor] = []  # memory given back and used again would look like the same tensor
    largest = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal largest
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given and storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
            largest = max(largest, tensor.numel())
            keep.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    del result
    return Saved(bytes=sum(sizes.values()), largest=largest)
