"""Memory that was touched is used again without page faults."""

import platform
import subprocess
import sys

import pytest

# in a process of its own: it cannot be undone
PROGRAM = """
import resource, torch
from attnres.bench.allocator import keep_memory

assert keep_memory(2**28)
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros(2**24)
before = faults()
for megabytes in (16, 4, 100, 16):
    torch.ones(megabytes * 2**18)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 500  # of the 34 816 pages that were written
