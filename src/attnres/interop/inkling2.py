"""Transformers' Inkling-2: its block attention residual, one vector per read and no key norm.

Only the residual parameters are translated, to those of the strategy `Inkling2`; every other tensor and field stays as
it is. (Its decoder layers are not ones that attnres can take apart, so such a folder serves reads, not a whole model;
`attnres.interop.load_residual` loads them.) ``n_layers_per_attn_res_block`` counts decoder layers.

A full-attention layer has three reads before its attention and a sliding one has one. Where a model has both kinds,
ours has three everywhere, those of a sliding layer equal.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, final

from attnres.errors import CheckpointError
from attnres.interop.folder import CheckpointFolder, raise_problems
from attnres.interop.formats import Format, Translated
from attnres.interop.names import SITES, Entry, to_ours, to_theirs, unknown
from attnres.interop.own import CODE, Own, own_config, whole_number
from attnres.residual.variants.inkling2 import Inkling2 as Inkling2Strategy

BLOCK_SIZE = "n_layers_per_attn_res_block"
BASE, BASE_CLASS = "inkling2_text", "Inkling2ForCausalLM"
KINDS = {"hybrid": 3, "hybrid_sliding": 1}
"""Reads before the attention of a layer, by its entry in ``layer_types``."""
READ_EPS = 1e-6
"""Eps of its reads, whatever ``rms_norm_eps`` is."""

_DEPTH = re.compile(r"(^|\.)(attn_res\.|(attention_input|mlp_input|final_input)\.query$)")


@final
class Inkling2(Format):
    """Inkling-2's text model, under the names of its release or of its modules."""

    kind: ClassVar[str] = "inkling2"

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        """By the block size, or by the family's name."""
        return BLOCK_SIZE in config or str(config.get("model_type", "")).startswith("inkling2")

    def to_ours(self, folder: CheckpointFolder, *, text_only: bool) -> Translated:
        """Residual parameters of Inkling-2 as ours."""
        del text_only
        config = {name: value for name, value in folder.config.items() if name != CODE}
        if config.get("model_type") != BASE:
            raise CheckpointError(f"{folder.path}: model_type is {config.get('model_type')!r}; allowed is {BASE!r}")
        strategy = Inkling2Strategy(
            sublayers_per_block=2 * whole_number(config, BLOCK_SIZE, folder),
            reads=_reads(_layer_reads(config, folder)),
            read_scale="mean",
        )
        released = any("attn_res." in name for name in folder.tensors)
        entries = _entries(config, folder, released=released)
        depth, problems = to_ours(folder.tensors, entries)
        known = {entry.theirs for entry in entries}
        found = unknown(folder.tensors, known)
        problems["not in the model"] = [name for name in found if _DEPTH.search(name) or name.startswith(SITES)]
        raise_problems(f"{folder.path} does not fit its config", problems)
        base = [tensor for name, tensor in folder.tensors.items() if name not in known]
        origin = {"kind": self.kind, "released": released, "architectures": config.get("architectures")}
        own = own_config(config, base_model_type=BASE, base_class=BASE_CLASS, strategy=strategy, origin=origin)
        return Translated(config=own, tensors=[*base, *depth])

    def from_ours(self, own: Own) -> Translated:
        """The inverse; under the names of the release, unless the others came in."""
        path, tensors = own.folder.path, own.folder.tensors
        strategy = own.strategy
        if own.base_model_type != BASE or not isinstance(strategy, Inkling2Strategy):
            raise CheckpointError(
                f"{path}: the base is {own.base_model_type!r} with {strategy.label}; allowed is {BASE!r} with Inkling-2"
            )
        layers_per_block = whole_number(own.fields, BLOCK_SIZE, own.folder)
        wanted = (2 * layers_per_block, _reads(_layer_reads(own.fields, own.folder)), "mean")
        seen = (strategy.sublayers_per_block, strategy.reads, strategy.read_scale)
        if seen != wanted:
            raise CheckpointError(
                f"{path}: sublayers_per_block, reads and read_scale are {seen}; the base's own fields ask for {wanted}"
            )
        origin = own.origin if own.origin.get("kind") == self.kind else {}
        entries = _entries(own.fields, own.folder, released=origin.get("released", True))
        depth, problems = to_theirs(tensors, entries)
        known = {entry.ours for entry in entries}
        found = unknown(tensors, known)
        problems["not in the model"] = [name for name in found if name.startswith(SITES) or _DEPTH.search(name)]
        raise_problems(f"{path} does not fit its config", problems)
        base = [tensor for name, tensor in tensors.items() if name not in known]
        head = {"architectures": origin.get("architectures") or [BASE_CLASS], "model_type": BASE}
        return Translated(config={**head, **own.fields}, tensors=[*base, *depth])


def _layer_reads(config: Mapping[str, Any], folder: CheckpointFolder) -> list[int]:
    """Reads before the attention of each layer; the first layer has none, which is not seen here."""
    layers, kinds = whole_number(config, "num_hidden_layers", folder), config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= KINDS.keys():
        raise CheckpointError(
            f"{folder.path}: layer_types is {kinds!r}; allowed is a list of {layers} words out of {', '.join(KINDS)}"
        )
    return [KINDS[kind] for kind in kinds]


def _reads(layer_reads: list[int]) -> Any:
    return "qkv" if 3 in layer_reads[1:] else "one"


def _entries(config: Mapping[str, Any], folder: CheckpointFolder, *, released: bool) -> list[Entry]:
    dim, layer_reads = whole_number(config, "hidden_size", folder), _layer_reads(config, folder)
    most = 3 if _reads(layer_reads) == "qkv" else 1
    entries = []
    for layer, reads in enumerate(layer_reads):
        attention = f"attn_res.attn_queries.{layer - 1}" if released else f"layers.{layer}.attention_input.query"
        mlp = f"attn_res.mlp_queries.{layer}" if released else f"layers.{layer}.mlp_input.query"
        if layer > 0:
            entries.append(_entry(attention, 2 * layer, dim, theirs=reads, ours=most, released=released))
        entries.append(_entry(mlp, 2 * layer + 1, dim, theirs=1, ours=1, released=released))
    output = "attn_res.output_query" if released else "final_input.query"
    entries.append(_entry(output, 2 * len(layer_reads), dim, theirs=1, ours=1, released=released))
    return entries


def _entry(name: str, site: int, dim: int, *, theirs: int, ours: int, released: bool) -> Entry:
    """Three reads are a matrix in both; one is a vector in theirs and a row of one, or of three equal ones, in ours."""
    shape = (dim,) if theirs == 1 else (theirs, dim)
    shared = theirs == 1 and ours > 1
    return Entry(
        theirs=("model.llm." if released else "model.") + name,
        ours=f"{SITES}{site}.pseudo_query",
        their_shapes=(shape,),
        our_shape=(dim,) if shared else (ours, dim),
        copies=ours if shared else None,
        depth=True,
    )
