"""A description of a decoder that is not in the table, found by watching it run.

One layer of each kind is run with hooks on its children. Which child is a norm, which the attention and which the MLP,
and what each is applied to, then follows from the tensors that pass between them. What is found is a guess until the
proof has compared it with the layer itself (see `attnres.models.proof`): scaled residuals, for one, look like plain
ones here and are refused there.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from attnres.errors import UnsupportedModelError
from attnres.models.families import Family, SublayerParts
from attnres.models.trial import first_tensor, one_of_each_kind, try_out

_ATTENTION_WORDS = ("attn", "attention", "mixer")


@dataclass
class _Call:
    """One call of a child of a layer."""

    name: str
    module: nn.Module
    given: Any
    returned: Any
    arguments: dict[str, Any]


@dataclass
class _Trace:
    """What one layer was given and returned, and the calls of its children, in order."""

    layer: nn.Module
    given: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    returned: Any = None


def discover(base: Any) -> Family:
    """Describe a decoder's layers by running it once, without gradients, on a random embedding of a few tokens.

    Args:
        base: A model without head.

    Raises:
        UnsupportedModelError: It has no list of layers, or these do not look like an attention and an MLP sublayer.
    """
    layers = _find_layers(base)
    traces, norm = _watch(base, layers)
    families = [_describe(base, trace, layers, norm) for trace in traces]
    first = families[0]
    shapes = {(family.attention, family.mlp, family.parallel) for family in families}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"the layers of {type(base).__name__} are built in {len(shapes)} ways; allowed is one"
        )
    drops = {name: dropped for family in families for name, dropped in family.drops.items()}
    return Family(
        name=type(base).__name__,
        layer_class=first.layer_class,
        attention=first.attention,
        mlp=first.mlp,
        parallel=first.parallel,
        drops=drops,
        layers=layers,
        norm=norm,
    )


def _find_layers(base: Any) -> str:
    lists = {name: child for name, child in base.named_children() if isinstance(child, nn.ModuleList) and len(child)}
    wanted = getattr(base.config, "num_hidden_layers", None)
    found = [name for name, child in lists.items() if wanted in (None, len(child))]
    if len(found) != 1:
        seen = ", ".join(f"{name} ({len(child)})" for name, child in lists.items()) or "none"
        raise UnsupportedModelError(
            f"{type(base).__name__} is no known family and has no single list of its {wanted} decoder layers "
            f"(lists: {seen})"
        )
    return found[0]


def _watch(base: Any, layers: str) -> tuple[list[_Trace], str]:
    """Run the model; what its layers did, one of each kind, and the name of the norm after them."""
    traces: list[_Trace] = []
    handles, norms = [], []
    for _, layer in one_of_each_kind(getattr(base, layers)):
        handles += _hook(layer, traces)
    last = getattr(base, layers)[-1]
    ends: list[Any] = []
    handles.append(last.register_forward_hook(lambda module, given, returned: ends.append(first_tensor(returned))))
    for name, child in base.named_children():
        handles.append(child.register_forward_pre_hook(lambda module, given, name=name: norms.append((name, given))))
    try:
        try_out(base)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{type(base).__name__} is no known family and cannot be tried on a random embedding: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    after = [name for name, given in norms if ends and given and given[0] is ends[-1]]
    if len(after) != 1:
        raise UnsupportedModelError(f"{type(base).__name__} has no norm that is applied to what its layers return")
    return traces, after[0]


def _hook(layer: nn.Module, traces: list[_Trace]) -> list[Any]:
    trace = _Trace(layer, None)
    traces.append(trace)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.given = args[0] if args else kwargs.get("hidden_states")
        trace.arguments = dict(kwargs)

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        trace.returned = output

    handles = [
        layer.register_forward_pre_hook(begin, with_kwargs=True),
        layer.register_forward_hook(end, with_kwargs=True),
    ]
    for name, child in layer.named_children():

        def note(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, name: str = name
        ) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            trace.calls.append(_Call(name, module, given, first_tensor(output), kwargs))

        handles.append(child.register_forward_hook(note, with_kwargs=True))
    return handles


def _describe(base: Any, trace: _Trace, layers: str, norm: str) -> Family:
    if not isinstance(trace.returned, Tensor):
        raise UnsupportedModelError(
            f"{type(base).__name__} is no known family, and its layers ({type(trace.layer).__name__}) return a "
            f"{type(trace.returned).__name__}; allowed are layers that return a tensor, so that hidden states and "
            "attentions are recorded by Transformers and not collected by the model"
        )
    attention, mlp = _main_calls(base, trace)
    parts = [_parts(call, trace) for call in (attention, mlp)]
    inputs = [_source(call, part, trace) for call, part in zip((attention, mlp), parts, strict=True)]
    lost = [name for name in trace.arguments if name not in attention.arguments and name != "hidden_states"]
    return Family(
        name=type(base).__name__,
        layer_class=type(trace.layer).__name__,
        attention=parts[0],
        mlp=parts[1],
        parallel=inputs[1] is trace.given,
        drops={type(attention.module).__name__: tuple(lost)} if lost else {},
        layers=layers,
        norm=norm,
    )


def _main_calls(base: Any, trace: _Trace) -> tuple[_Call, _Call]:
    """The calls of attention and MLP."""
    work = [call for call in trace.calls if not (_is_norm(call) or isinstance(call.module, nn.Dropout))]
    attention = [call for call in work if any(word in f"{call.name} {type(call.module).__name__}".lower()
                                              for word in _ATTENTION_WORDS)]  # fmt: skip
    others = [call for call in work if call not in attention]
    if len(attention) != 1 or len(others) != 1:
        raise UnsupportedModelError(
            f"{type(base).__name__} is no known family, and its layers ({type(trace.layer).__name__}) do not look like "
            f"one attention and one MLP: they call {', '.join(call.name for call in trace.calls) or 'nothing'}"
        )
    return attention[0], others[0]


def _parts(call: _Call, trace: _Trace) -> SublayerParts:
    before = [c.name for c in trace.calls if _is_norm(c) and c.returned is call.given]
    output, names = call.returned, {}
    for after in trace.calls:
        if after is not call and after.given is output and (_is_norm(after) or isinstance(after.module, nn.Dropout)):
            names["output_norm" if _is_norm(after) else "dropout"] = after.name
            output = after.returned
    return SublayerParts(module=call.name, norm=before[0] if before else None, **names)


def _source(call: _Call, parts: SublayerParts, trace: _Trace) -> Any:
    """What a sublayer is applied to, before its norm."""
    return next((c.given for c in trace.calls if c.name == parts.norm and c.returned is call.given), call.given)


def _is_norm(call: _Call) -> bool:
    return "norm" in type(call.module).__name__.lower()
