"""One line on every rank when one of them fails.

A rank that fails leaves a note in the store that the process group was started with, and goes. The others find their
next transfer broken, or timed out; they look for a note, and otherwise for who has said nothing at all.
"""

import contextlib
import re
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from attnres.errors import AttnResError

NOTE = "attnres/failed"
ANSWER_SECONDS = 5.0
"""How long a rank that lost contact waits for the others to say something."""


class RankFailure(AttnResError):
    """Another rank failed, or was lost."""


@contextlib.contextmanager
def told_to_all(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """Tell the other ranks of a group when something fails here, and say here what failed there.

    Args:
        group: The ranks that wait for each other; None is all of them.
        doing: What they do together, for messages: "a training step".

    Raises:
        RankFailure: Another rank failed or was lost. One line says which, and why as far as it is known.
    """
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
        raise RankFailure(_explain(group, doing, error)) from error
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


def _explain(group: dist.ProcessGroup | None, doing: str, error: BaseException) -> str:
    here = dist.get_rank()
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != here]
    _leave_note("")  # this rank is alive, and has not failed itself
    notes: dict[int, str] = {}
    end = time.monotonic() + ANSWER_SECONDS
    while len(notes) < len(others) and time.monotonic() < end and not any(notes.values()):
        notes |= {rank: note for rank in others if rank not in notes and (note := _read_note(rank)) is not None}
        time.sleep(0.05)
    failed = {rank: note for rank, note in notes.items() if note}
    if failed:
        rank, note = next(iter(failed.items()))
        return f"rank {here} stopped in {doing}, because rank {rank} failed: {note}"
    silent = [rank for rank in others if rank not in notes]
    if silent:
        who = ", ".join(map(str, silent))
        return f"rank {here} stopped in {doing}: lost contact with rank {who} ({_first_line(error)})"
    return f"rank {here} stopped in {doing}: the ranks lost contact ({_first_line(error)})"


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
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(frames[-1].filename).as_posix() if frames else ""
    return "/torch/distributed/" in file or "/attnres/parallel/" in file


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line)[:200] or type(error).__name__  # without the place in gloo's own source
