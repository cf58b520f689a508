"""Keep memory once it has been touched, so that times are not those of the operating system handing out pages.

By default the C library gives large results back to the system when they are freed, and takes fresh pages for the next:
thousands of page faults per result, which take longer than writing it, come and go with the history of the process, and
say nothing about an operator. A GPU has a caching allocator for the same reason. Here the C library is told to keep
everything, and some memory is touched in advance. A training loop settles in much the same state by itself, only later.
"""

import ctypes
import platform

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of glibc's ``mallopt``."""

_PIECE = 2**24


def keep_memory(reserve_bytes: int) -> bool:
    """Let this process keep all memory it frees, and touch ``reserve_bytes`` of it now.

    Returns:
        Whether that is possible here: it takes glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 2**26))
    if not all(library.mallopt(parameter, value) for parameter, value in settings):
        return False
    pieces = [torch.ones(_PIECE, dtype=torch.uint8) for _ in range(reserve_bytes // _PIECE)]
    del pieces
    return True
