"""One line on every rank when one of them fails.

A rank that fails leaves a note in the store that the process group was started with, and goes. The others find their
next transfer broken, or timed out; they look for a note, then for a process that has ended without one, and otherwise
for who has said nothing at all. The first two may be any rank: on a mesh, one that fails breaks the transfers of its
neighbours in one direction, whose end breaks those of theirs in another.
"""

import contextlib
import os
import re
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from attnres.errors import AttnResError

NOTE, PROCESS = "attnres/failed", "attnres/process"
ANSWER_SECONDS = 5.0
"""How long a rank that lost contact waits for the others to say something."""


class RankFailure(AttnResError):
    """Another rank failed, or was lost."""


@contextlib.contextmanager
def told_to_all(group: dist.ProcessGroup | None, doing: str, *, beside: Iterable[int] = ()) -> Iterator[None]:
    """Tell the other ranks of a group when something fails here, and say here what failed there.

    Args:
        group: The ranks that wait for each other directly; None is all of them.
        doing: What they do together, for messages: "a training step".
        beside: Further ranks that these wait for, by their numbers in the default group.

    Raises:
        RankFailure: Another rank failed or was lost. One line says which, and why as far as it is known.
    """
    _introduce()
    _take_note_back()
    try:
        yield
    except AttnResError as error:
        _leave_note(str(error))
        raise
    except (RuntimeError, dist.DistError) as error:
        if not _is_lost_contact(error):
            _leave_note(f"{type(error).__name__}: {error}")
            raise
        raise RankFailure(_explain({*dist.get_process_group_ranks(group), *beside}, doing, error)) from error
    except Exception as error:
        _leave_note(f"{type(error).__name__}: {error}")
        raise


_has_note = False


def _leave_note(text: str) -> None:
    global _has_note
    with contextlib.suppress(Exception):
        line = " ".join(text.split())[:500]
        _store().set(f"{NOTE}/{dist.get_rank()}", line.encode())
        _has_note = True


def _take_note_back() -> None:
    """Forget an error that all have recovered from, so that it is not blamed for a later one."""
    global _has_note
    if _has_note:
        with contextlib.suppress(Exception):
            _store().delete_key(f"{NOTE}/{dist.get_rank()}")
        _has_note = False


def _explain(together: set[int], doing: str, error: BaseException) -> str:
    here = dist.get_rank()
    others = [rank for rank in range(dist.get_world_size()) if rank != here]
    near = sorted(together - {here})
    _leave_note("")  # this rank is alive, and has not failed itself
    notes: dict[int, str] = {}
    ended: list[int] = []
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end and not ended and not any(notes.values()) and not set(near) <= notes.keys():
        time.sleep(0.05)
        ended = [rank for rank in others if _has_ended(rank)]  # before its note is looked for
        notes |= {rank: note for rank in others if rank not in notes and (note := _read_note(rank)) is not None}
        ended = [rank for rank in ended if rank not in notes]
    why = f"({_first_line(error)})"
    failed = {rank: note for rank, note in notes.items() if note}
    if failed:
        rank, note = next(iter(failed.items()))
        return f"rank {here} stopped in {doing}, because rank {rank} failed: {note}"
    if ended:
        who = ", ".join(map(str, ended))
        return f"rank {here} stopped in {doing}: lost contact with rank {who}, whose process has ended {why}"
    silent = [rank for rank in near if rank not in notes]
    if silent:
        return f"rank {here} stopped in {doing}: lost contact with rank {', '.join(map(str, silent))} {why}"
    return f"rank {here} stopped in {doing}: the ranks lost contact {why}"


_introduced: weakref.WeakSet[Any] = weakref.WeakSet()


def _introduce() -> None:
    """Let the others know which process this rank is."""
    world = dist.group.WORLD
    if world is not None and world not in _introduced:
        with contextlib.suppress(Exception):
            _store().set(f"{PROCESS}/{dist.get_rank()}", f"{_machine()} {os.getpid()}".encode())
            _introduced.add(world)


def _has_ended(rank: int) -> bool:
    """Whether the process of a rank is known to have ended: where it ran on this machine and Linux can be asked."""
    with contextlib.suppress(Exception):
        store, key = _store(), f"{PROCESS}/{rank}"
        if store.check([key]):
            machine, _, process = store.get(key).decode().rpartition(" ")
            return machine == _machine() and _is_gone(Path("/proc", process, "stat"))
    return False


def _machine() -> str:
    """What processes that see each other's numbers have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _is_gone(stat: Path) -> bool:
    try:
        state = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"  # ended, and not yet asked about by its parent


def _read_note(rank: int) -> str | None:
    with contextlib.suppress(Exception):
        store, key = _store(), f"{NOTE}/{rank}"
        if store.check([key]):
            return store.get(key).decode()
    return None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _is_lost_contact(error: BaseException) -> bool:
    """Whether a transfer broke because of another rank: PyTorch has no class for that in all its backends.

    Only where it is raised from a transfer: what a user's own code says of sockets and time-outs is its own error.
    """
    if not isinstance(error, dist.DistError) and not _is_from_transfer(error):
        return False
    text = str(error).lower()
    signs = ("connection closed", "connection reset", "timed out", "timeout", "broken pipe", "gloo", "nccl", "socket")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)


def _is_from_transfer(error: BaseException) -> bool:
    """Whether it comes from PyTorch's distributed code, or ours, with nothing but PyTorch's own frames inside that."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).as_posix()
        if "/torch/distributed/" in file or "/attnres/parallel/" in file:
            return True
        if "/torch/" not in file:
            return False
    return False


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0].partition(". ")[0]  # gloo goes on with advice for its authors
    return re.sub(r"^\[\S+:\d+\] ", "", line)[:200] or type(error).__name__  # without the place in gloo's own source
