"""Publishing a folder in one step: others see all of it, or nothing.

A folder is filled aside, in the same parent and so on the same file system, flushed to disk, and renamed into place.
A crash leaves at most a hidden ``.NAME.*.partial`` beside it, never half a dataset under the name asked for.
"""

import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def publish_folder(target: Path, *, replace: bool) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends without an error it is flushed and becomes ``target``.

    Args:
        target: Where the folder shall be; missing parents are made.
        replace: Whether a folder that is there by then gives way. Whether it *may* is the caller's to check.

    Raises:
        FileExistsError: Something is there and ``replace`` is false. It stays as it was.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(
            errno.ENOTDIR, "not a folder, so nothing can be made in it", str(target.parent)
        ) from error
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir()
    try:
        yield partial
        for path in (partial, *partial.rglob("*")):
            _sync(path)
        (_replace if replace else _rename)(partial, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    """Write a new text file and flush it to disk."""
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _rename(partial: Path, target: Path) -> None:
    # POSIX lets a rename take the place of an empty folder, which is not ours to take.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "already exists", str(target))
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, "already exists", str(target)) from error
        raise


def _replace(partial: Path, target: Path) -> None:
    """Put ``partial`` in the place of ``target``; what was there is under the name ``partial`` afterwards."""
    if not os.path.lexists(target):
        _rename(partial, target)
    elif not _exchange(partial, target):
        _swap_in_two_steps(partial, target)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically; False where the system cannot."""
    rename: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _swap_in_two_steps(partial: Path, target: Path) -> None:
    aside = partial.with_suffix(".replaced")
    target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        aside.rename(target)
        raise
    aside.rename(partial)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
