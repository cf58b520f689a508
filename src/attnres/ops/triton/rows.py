"""A list of sources as a kernel sees it: addresses and row strides, no stack and no copy.

Few sources travel as integers in the kernel's own parameters, padded to `FEW` sizes: nothing is written to memory and
one launch suffices. More sources, and those that start at odd places, go through a table in device memory, which a
small kernel fills whose parameters carry the addresses. So there is no copy from host memory that a captured graph
could find changed or a second stream could find missing, and nothing is cached that could be freed under a graph.

Either way a kernel takes the sources in a runtime loop, so one compiled kernel serves all numbers of sources of a size,
and that loop can be pipelined through shared memory. (Unrolled over typed pointers, each number of sources would be a
compilation, and the compiler keeps many rows alive at once and spills.)

Addresses are integers and not typed pointers, so that alignment and dtype of each single source do not multiply the
compilations; what all have in common is one constant, `Rows.layout`.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# (the type checker does not know what triton.jit makes of a function)

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnres.ops.triton import launch

FEW = (1, 4, 8, 16)
"""Sizes to which a short list is padded; a longer one goes through a table."""
WRITER_CHUNK = 64
"""Table entries that one launch of the writer fills."""
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""Dtypes as a kernel names them."""
ABSENT = 4
"""Code of a tensor that is not there: reads as zeros, and nothing is written to it."""
CODE_BITS = 3


@dataclass(frozen=True)
class Rows:
    """Equally shaped tensors as rows ``[tokens, width]`` with one stride each."""

    tensors: tuple[Tensor | None, ...]
    """What the addresses point to, kept alive; None reads as zeros and takes no result."""
    strides: tuple[int, ...]
    """Elements from one row to the next."""
    tokens: int
    width: int

    @property
    def count(self) -> int:
        """Number of tensors."""
        return len(self.tensors)

    @cached_property
    def some(self) -> Tensor:
        """A tensor that is there."""
        return next(tensor for tensor in self.tensors if tensor is not None)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where each first row starts; an absent tensor repeats another's address, which is never used."""
        return tuple((self.some if tensor is None else tensor).data_ptr() for tensor in self.tensors)

    @cached_property
    def byte_strides(self) -> tuple[int, ...]:
        """Bytes from one row to the next."""
        pairs = zip(self.strides, self.tensors, strict=True)
        return tuple(0 if tensor is None else stride * tensor.element_size() for stride, tensor in pairs)

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """The dtype of each, as a kernel names it."""
        return tuple(ABSENT if tensor is None else CODES[tensor.dtype] for tensor in self.tensors)

    @property
    def itemsize(self) -> int:
        """Bytes that a kernel sets aside for an element: one of each dtype that occurs."""
        return sum(dtype.itemsize for dtype in {tensor.dtype for tensor in self.tensors if tensor is not None})

    @cached_property
    def few(self) -> int:
        """The size that the list is padded to if it travels in the kernel's parameters, else 0."""
        alike = len(set(self.strides)) == 1 and all(address % 16 == 0 for address in self.addresses)
        return next((size for size in FEW if self.count <= size), 0) if alike else 0

    @property
    def layout(self) -> tuple[int, int, int]:
        """What a kernel is compiled for: padded size, one bit per code that occurs, 1 if all rows start on 16 bytes."""
        kinds = sum(1 << code for code in set(self.codes))
        aligned = all(value % 16 == 0 for value in (*self.addresses, *self.byte_strides))
        return self.few, kinds, int(aligned)

    @property
    def listed_layout(self) -> tuple[int, int, int]:
        """The layout of a kernel that takes several rows of the table at once: 2 if all start on 16 bytes."""
        _, kinds, aligned = self.layout
        return 0, kinds, 2 * aligned

    @property
    def slots(self) -> int:
        """Length of a kernel's vector with one element per source."""
        return self.few or launch.power_of_two(self.count)

    def argument(self) -> "tuple[int, ...] | Tensor":
        """The kernel argument: addresses, stride and codes as a tuple, or the table in device memory."""
        return self.inline() if self.few else self.table()

    def inline(self) -> tuple[int, ...]:
        """Addresses, the common stride in elements, and all codes in one number (above 32 bits, as the addresses)."""
        packed = sum(code << (CODE_BITS * index) for index, code in enumerate(self.codes)) + (1 << 50)
        padding = self.addresses[-1:] * (self.few - self.count)
        return (*self.addresses, *padding, *_odd((self.strides[0], packed)))

    def table(self) -> Tensor:
        """Addresses, strides in bytes and codes as int64 ``[3, count]`` in device memory."""
        table = torch.empty(3, self.count, dtype=torch.int64, device=self.some.device)
        padding = -self.count % WRITER_CHUNK
        columns = [values + values[-1:] * padding for values in (self.addresses, self.byte_strides, self.codes)]
        with launch.on(self.some):
            for start in range(0, self.count, WRITER_CHUNK):
                chunk = (_odd(values[start : start + WRITER_CHUNK]) for values in columns)
                _write_table[(1,)](table, *chunk, start, self.count, CHUNK=WRITER_CHUNK, num_warps=1)
        return table


def rows_of(tensors: Sequence[Tensor | None]) -> Rows:
    """The rows of equally shaped tensors; one whose rows have no common stride is copied."""
    laid = [None if tensor is None else _with_row_stride(tensor) for tensor in tensors]
    shape = next(tensor.shape for tensor in tensors if tensor is not None)
    known = next(pair[1] for pair in laid if pair is not None)
    strides = tuple(known if pair is None else pair[1] for pair in laid)
    return Rows(tuple(None if pair is None else pair[0] for pair in laid), strides, prod(shape[:-1]), shape[-1])


def _with_row_stride(tensor: Tensor) -> tuple[Tensor, int]:
    stride = row_stride(tensor)
    return (tensor.contiguous(), tensor.shape[-1]) if stride is None else (tensor, stride)


def row_stride(tensor: Tensor) -> int | None:
    """Elements from one row to the next if the batch dimensions collapse to one stride, else None."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return None
    found, expected = tensor.shape[-1], None
    for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if expected is None:
            found = stride
        elif stride != expected:
            return None
        expected = stride * size
    return found


def _odd(values: Sequence[int]) -> tuple[int, ...]:
    """The numbers as odd ones above 1: Triton compiles anew for a 1 and for multiples of 16, and never for these."""
    return tuple(2 * value + 3 for value in values)


@triton.jit
def plain(value):
    """The number that `_odd` hid."""
    return (value.to(tl.int64) - 3) >> 1


@triton.jit(do_not_specialize=["start", "count"])
def _write_table(table, addresses, strides, codes, start, count, CHUNK: tl.constexpr):
    for index in tl.static_range(CHUNK):
        if start + index < count:
            tl.store(table + start + index, plain(addresses[index]))
            tl.store(table + count + start + index, plain(strides[index]))
            tl.store(table + 2 * count + start + index, plain(codes[index]))


@triton.jit
def element_bytes(code):
    """Size of an element by its dtype's code."""
    return tl.where((code == 1) | (code == 2), 2, tl.where(code == 3, 8, 4))


@triton.jit
def locate_row(table, index, token, count, LAYOUT: tl.constexpr):
    """Where row ``token`` of source ``index`` starts, in bytes and 64 bits, and the code of its dtype."""
    SIZE: tl.constexpr = LAYOUT[0]
    if SIZE > 0:
        address = table[0].to(tl.int64)
        for other in tl.static_range(1, SIZE):
            address = tl.where(index == other, table[other].to(tl.int64), address)
        code = (plain(table[SIZE + 1]) >> (3 * index)) & 7
        address += token * plain(table[SIZE]) * element_bytes(code)
    else:
        address = tl.load(table + index) + token * tl.load(table + count + index)
        code = tl.load(table + 2 * count + index)
    return address, code


@triton.jit
def typed_pointer(address, CODE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address, or a column of addresses (``ALIGNED`` 2), as pointers to the dtype that the code names."""
    if CODE == 0:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif CODE == 1:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif CODE == 2:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float64))
    if ALIGNED == 1:
        pointer = tl.multiple_of(pointer, 16)
    elif ALIGNED == 2:
        pointer = tl.multiple_of(pointer, [16, 16])
    return pointer


@triton.jit
def load_row(table, index, token, count, columns, mask, LAYOUT: tl.constexpr, WORK: tl.constexpr, EVICT: tl.constexpr):
    """One row of one source in the working dtype."""
    address, code = locate_row(table, index, token, count, LAYOUT)
    return load_coded(address, code, columns, mask, LAYOUT, WORK, EVICT)


@triton.jit
def load_coded(address, code, columns, mask, LAYOUT: tl.constexpr, WORK: tl.constexpr, EVICT: tl.constexpr):
    """Elements from an address: one plain load if the layout has a single dtype, else a masked load for each."""
    KINDS: tl.constexpr = LAYOUT[1]
    value = tl.zeros(mask.shape, WORK)
    for kind in tl.static_range(4):
        if (KINDS >> kind) & 1:
            pointer = typed_pointer(address, kind, LAYOUT[2])
            if 1 << kind == KINDS:
                value = tl.load(pointer + columns, mask=mask, other=0.0, eviction_policy=EVICT).to(WORK)
            else:
                mine = mask & (code == kind)
                found = tl.load(pointer + columns, mask=mine, other=0.0, eviction_policy=EVICT)
                value = tl.where(mine, found.to(WORK), value)
    return value


@triton.jit
def store_row(table, index, token, count, columns, mask, value, LAYOUT: tl.constexpr):
    """One row of one result, rounded once to its dtype; nothing where the result is absent."""
    address, code = locate_row(table, index, token, count, LAYOUT)
    store_coded(address, code, columns, mask, value, LAYOUT)


@triton.jit
def store_coded(address, code, columns, mask, value, LAYOUT: tl.constexpr):
    """Elements to an address, in the dtype that the code names."""
    KINDS: tl.constexpr = LAYOUT[1]
    for kind in tl.static_range(4):
        if (KINDS >> kind) & 1:
            pointer = typed_pointer(address, kind, LAYOUT[2])
            rounded = value.to(pointer.dtype.element_ty)
            if 1 << kind == KINDS:
                tl.store(pointer + columns, rounded, mask=mask, eviction_policy="evict_first")
            else:
                tl.store(pointer + columns, rounded, mask=mask & (code == kind), eviction_policy="evict_first")


@triton.jit
def plain_row(tensor, token, columns, mask, WIDTH: tl.constexpr, WORK: tl.constexpr):
    """One row of a single contiguous tensor in the working dtype; zeros if there is none."""
    if tensor is None:
        row = tl.zeros(mask.shape, WORK)
    else:
        row = tl.load(tensor + token * WIDTH + columns, mask=mask, other=0.0).to(WORK)
    return row
