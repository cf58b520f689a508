"""Compiles every kernel for sm_90 on a machine without a GPU, and looks at the machine code.

Run as a script with a folder for Triton's cache: a launch is replaced by a compilation, so the operators run as they
are up to the point where a GPU would begin. `ptxas` and `cuobjdump` come with Triton.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SINGLE, HALF, BRAIN, DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_LIMIT = 227 * 1024
READS = 8


class NoDevice:
    """A driver that knows what to compile for and has nothing to run it on."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Code:
    """What one kernel became."""

    case: str
    kernel: str
    registers: int
    stack: int
    shared: int
    warps: int
    ptx: str

    def __str__(self) -> str:
        wide = len(re.findall(r"(?:ld|st)\.global[.\w]*\.v4\.b32", self.ptx))
        ahead = len(re.findall(r"cp\.async\.c[ag]", self.ptx))
        sizes = f"{self.registers:4} registers {self.stack:4} stack {self.shared:7} shared {self.warps:3} warps"
        return f"{self.case:34} {self.kernel:22} {sizes} {wide:3} wide accesses {ahead:3} asynchronous copies"


def compile_instead_of_launching(found: list[Code], case: list[str]) -> None:
    """Makes every launch a compilation that is noted in ``found``."""
    driver.set_active(NoDevice())
    run, seen = JITFunction.run, set()

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if (case[0], kernel.hash) not in seen:
            seen.add((case[0], kernel.hash))
            found.append(examine(case[0], self.fn.__name__, kernel))
        return kernel

    JITFunction.run = note


def examine(case: str, name: str, kernel: Any) -> Code:
    """Registers and stack as `cuobjdump` reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    meta = kernel.metadata
    return Code(case, name, registers, stack, meta.shared, meta.num_warps, kernel.asm["ptx"])


def all_operators(width: int, count: int, kinds: tuple[torch.dtype, ...], with_norm: bool, tokens: int = 4) -> None:
    """Every operator once, forward and backward."""
    from attnres.ops.triton.launchers import OPERATORS as run

    work, first = DOUBLE if DOUBLE in kinds else SINGLE, kinds[0]
    sources = [torch.zeros(tokens, width, dtype=kinds[index % len(kinds)]) for index in range(count)]
    query, row, wide = torch.zeros(width), torch.zeros(tokens, width, dtype=work), torch.zeros(READS, width)
    norm, settings = query if with_norm else None, (1e-6, 1.0, 1e-6)
    run["depth_attention"](sources, query, query, norm, *settings, first)
    upstream = (row.to(first), None, None)
    run["depth_attention_backward"](*upstream, sources, query, query, norm, *settings, [True] * count)
    run["inter_block"](sources, wide, wide, 1e-6)
    run["inter_block_backward"]([row] * READS, [None] * READS, sources, wide, wide, 1e-6, [row] * count)
    near = sources[:1]
    run["intra_block"](row, row[:, 0], near, near[0], query, query, norm, *settings, first)
    run["intra_block_backward"](row, row, near, row[:, :1], query, query, 1e-6, 1.0, work)


def main(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    found, case = [], [""]
    compile_instead_of_launching(found, case)
    for width, count, kinds, with_norm in [
        (7168, 9, (BRAIN,), False),
        (7168, 9, (BRAIN,), True),
        (7168, 57, (BRAIN,), False),
        (7168, 9, (SINGLE, BRAIN), True),
        (1000, 5, (HALF, DOUBLE, BRAIN, SINGLE), True),
        (129, 1, (BRAIN,), False),
        (20000, 9, (BRAIN,), True),
    ]:
        case[0] = f"width {width}, {count} sources, {len(kinds)} dtypes{', norm' if with_norm else ''}"
        all_operators(width, count, kinds, with_norm)
    print(*found, sep="\n")
    check(found)


def check(found: list[Code]) -> None:
    """Fails where the code would not run, spills, or moves rows in small pieces."""
    for code in found:
        assert code.shared <= SHARED_LIMIT, f"{code}: more shared memory than there is"
        if "width 7168" not in code.case or code.kernel == "_write_table":
            continue
        assert "1 dtypes" not in code.case or code.stack == 0, f"{code}: spills"
        assert re.search(r"v4\.b32|cp\.async\.cg", code.ptx), f"{code}: no access of 16 bytes"
        if code.kernel in ("_read", "_read_backward", "_inter_block"):
            assert "cp.async.cg" in code.ptx, f"{code}: rows are not on their way before they are needed"


if __name__ == "__main__":
    main(sys.argv[1])
