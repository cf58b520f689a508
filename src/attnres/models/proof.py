"""The proof of an adapter: an original layer and its decomposition must agree on the same input.

A family's description consists of names, and Transformers changes under us. So conversion does not trust it: every kind
of layer in the model at hand is run both ways, before anything is replaced.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UnsupportedModelError
from attnres.models.families import FAMILIES, Family
from attnres.models.install import install, take_out
from attnres.models.layer import ResidualDecoderLayer
from attnres.models.modes import evaluating, training
from attnres.models.trial import first_tensor, one_of_each_kind, try_out
from attnres.residual import PreNorm, Residual


def prove(base: Any, family: Family) -> float:
    """Check the decomposition of each kind of decoder layer, and return the largest relative difference seen.

    The model runs once, without gradients, on a random embedding of a few tokens. A model on the meta device has no
    values to compare; there the check passes by without a verdict.

    Raises:
        UnsupportedModelError: A layer and its decomposition differ by more than rounding, or a layer cannot be run.
    """
    if any(parameter.is_meta for parameter in base.parameters()):
        return 0.0
    worst = 0.0
    for index, (layer, (args, keywords), expected) in _layer_calls(base, family).items():
        hidden, *positional = args
        residual = Residual(PreNorm(), family.sublayers(layer), hidden.shape[-1])
        split = ResidualDecoderLayer(layer, family, residual, 0)
        with torch.no_grad(), evaluating(base):
            try:
                actual = split(hidden, *positional, **keywords).hidden
            except (TypeError, AttributeError, RuntimeError) as error:
                raise UnsupportedModelError(
                    f"{family.name} layer {index} ({type(layer).__name__}) cannot be run as two sublayers: {error}"
                ) from error
        what = f"{family.name} layer {index} ({type(layer).__name__}) differs from its two sublayers"
        worst = max(worst, _check(what, actual, expected, family))
        _prove_in_training(index, layer, split, (args, keywords), family)
    return worst


def prove_whole(base: Any, family: Family) -> float:
    """Check a whole decoder against itself with the plain residual sum put in, and return the relative difference.

    For a family that was found by looking: what lies between the layers has then not been read by anyone. The decoder
    is as it was afterwards.

    Raises:
        UnsupportedModelError: The two differ by more than rounding, or the second cannot be run.
    """
    if any(parameter.is_meta for parameter in base.parameters()):
        return 0.0
    expected = _run(base, family)
    install(base, family, PreNorm())
    try:
        actual = _run(base, family)
    finally:
        take_out(base)
    return _check(f"{type(base).__name__} differs from its sublayers", actual, expected, family)


def _prove_in_training(index: int, layer: nn.Module, split: nn.Module, call: Any, family: Family) -> None:
    """Check that a layer and its decomposition drop the same values in training, where they drop any.

    Raises:
        UnsupportedModelError: They do not, as where a layer calls dropout as a function.
    """
    args, keywords = call
    outputs = []
    for each in (layer, split):
        with torch.no_grad(), training(layer), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            each.training = True
            output = each.forward(*args, **keywords)
            outputs.append(output[0] if isinstance(output, tuple) else getattr(output, "hidden", output))
    if not torch.allclose(*outputs, rtol=1e-2, atol=1e-2):
        raise UnsupportedModelError(
            f"{family.name} layer {index} ({type(layer).__name__}) differs from its two sublayers in training mode; "
            "allowed are layers whose dropout is a module"
        )


def _check(what: str, actual: Tensor, expected: Tensor, family: Family) -> float:
    if not bool(expected.isfinite().all()):
        raise UnsupportedModelError(f"{family.name} gives values that are not finite; allowed are weights that are")
    difference = _relative_difference(actual, expected)
    allowed = 16 * torch.finfo(expected.dtype).eps
    if not difference <= allowed:  # also refuses NaN
        reason = (
            "This version of Transformers is not supported"
            if family.layer_class in FAMILIES
            else "It is not the plain sum of an attention and an MLP; a residual that is scaled, for one, is refused"
        )
        raise UnsupportedModelError(f"{what} by {difference:.3g} relative; allowed is {allowed:.3g}. {reason}")
    return difference


def _run(base: Any, family: Family) -> Tensor:
    try:
        return try_out(base)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise UnsupportedModelError(_cannot_run(family, base, error)) from error


def _layer_calls(base: Any, family: Family) -> dict[int, tuple[nn.Module, Any, Tensor]]:
    """Run the model and keep, for the first layer of each kind, the arguments it got and what it returned."""
    calls: dict[int, tuple[nn.Module, Any, Tensor]] = {}
    handles = []
    for index, layer in one_of_each_kind(getattr(base, family.layers)):

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any, index: int = index) -> None:
            kwargs = dict(kwargs)
            args = args or (kwargs.pop("hidden_states"),)
            calls[index] = (module, (args, kwargs), first_tensor(output))

        handles.append(layer.register_forward_hook(keep, with_kwargs=True))
    try:
        _run(base, family)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _cannot_run(family: Family, base: Any, error: Exception) -> str:
    device = next(base.parameters()).device.type
    return f"this {family.name} model cannot be run on {device}: {error}{kernel_hint(error)}"


def kernel_hint(error: Exception) -> str:
    """What to do about an error of kernels that need a GPU; nothing for other errors."""
    if "active driver" not in str(error):  # Triton's words for no GPU
        return ""
    return (
        "; its layers call the Triton kernels of a package such as fla-core, which Transformers takes wherever it is "
        "installed, so allowed is a GPU, or an environment without that package"
    )


def _relative_difference(actual: Tensor, expected: Tensor) -> float:
    scale = expected.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return ((actual.double() - expected.double()).abs().max() / scale).item()
