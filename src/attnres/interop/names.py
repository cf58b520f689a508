"""Tables of names: a tensor's name and shape in somebody else's checkpoint, and in ours.

A format is such a table, made from its config. It is read in both directions by the same two functions, so what an
import takes is what an export gives. Both are strict.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from attnres.interop.stored import Shape, StoredTensor, same_bytes

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that residual parameters may have; a quantised pseudo-query would shift every read."""
SITES = "model.residual.sites."
"""How our names of residual parameters begin."""


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor under both names."""

    theirs: str
    """Its name in the other format."""
    ours: str
    """Its name in ours."""
    their_shapes: tuple[Shape, ...]
    """Shapes that are taken; the first is the one that is given."""
    our_shape: Shape
    """Shape in ours, without the copies."""
    copies: int | None = None
    """Where several of our reads share one of theirs: how many rows ours has, all equal."""
    depth: bool = False
    """Whether it is a parameter of the residual path, and so has to be floating point."""
    optional: bool = False
    """Whether it may be absent."""


def depth_entries(stems: Sequence[str], dim: int) -> list[Entry]:
    """Pseudo-query and key weight of each site, stored as a linear layer to one number and a norm.

    Args:
        stems: For each site, the names before ``_proj.weight`` and ``_norm.weight``; the output read comes last.
        dim: Width of the model.
    """
    entries = []
    for index, stem in enumerate(stems):
        shapes = ((1, dim), (dim,), (dim, 1))
        entries.append(_depth_entry(f"{stem}_proj.weight", f"{SITES}{index}.pseudo_query", shapes))
        entries.append(_depth_entry(f"{stem}_norm.weight", f"{SITES}{index}.key_weight", ((dim,),)))
    return entries


def _depth_entry(theirs: str, ours: str, shapes: tuple[Shape, ...]) -> Entry:
    return Entry(theirs=theirs, ours=ours, their_shapes=shapes, our_shape=(max(shapes[0]),), depth=True)


Problems = dict[str, list[str]]


def to_ours(tensors: Mapping[str, StoredTensor], entries: Iterable[Entry]) -> tuple[list[StoredTensor], Problems]:
    """The tensors of a table under our names, and what is wrong with them."""
    taken: list[StoredTensor] = []
    problems: Problems = {}
    for entry in entries:
        tensor = _find(tensors, entry.theirs, entry, entry.their_shapes, problems)
        if tensor is not None:
            renamed = tensor.renamed(entry.ours, entry.our_shape)
            taken.append(renamed if entry.copies is None else renamed.repeated(entry.copies))
    return taken, problems


def to_theirs(tensors: Mapping[str, StoredTensor], entries: Iterable[Entry]) -> tuple[list[StoredTensor], Problems]:
    """The inverse of `to_ours`."""
    taken: list[StoredTensor] = []
    problems: Problems = {}
    for entry in entries:
        shape = entry.our_shape if entry.copies is None else (entry.copies, *entry.our_shape)
        tensor = _find(tensors, entry.ours, entry, (shape,), problems)
        if tensor is None:
            continue
        if entry.copies is not None:
            rows = [tensor.row(index) for index in range(entry.copies)]
            if not all(same_bytes(rows[0], row) for row in rows[1:]):
                reason = f"{entry.ours} (its {entry.copies} reads are one in {entry.theirs})"
                problems.setdefault("rows that differ", []).append(reason)
            tensor = rows[0]
        taken.append(tensor.renamed(entry.theirs, entry.their_shapes[0]))
    return taken, problems


def unknown(tensors: Mapping[str, StoredTensor], known: Iterable[str]) -> list[str]:
    """Names that are in no table."""
    return sorted(tensors.keys() - set(known))


def _find(
    tensors: Mapping[str, StoredTensor], name: str, entry: Entry, shapes: Sequence[Shape], problems: Problems
) -> StoredTensor | None:
    tensor = tensors.get(name)
    if tensor is None:
        if not entry.optional:
            problems.setdefault("missing", []).append(name)
        return None
    if tensor.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        problems.setdefault("of another shape", []).append(f"{name} {list(tensor.shape)} instead of {allowed}")
        return None
    if entry.depth and tensor.dtype not in FLOATS:
        problems.setdefault(f"not of {', '.join(FLOATS)}", []).append(f"{name} {tensor.dtype}")
        return None
    return tensor
