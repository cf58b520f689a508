"""A model's weights as named tensors, tied ones once, and their strict loading.

Nothing is loaded in part: either every name and shape agrees and all is copied, or the error lists what does not.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from attnres.errors import CheckpointError
from attnres.optim import is_depth_parameter
from attnres.train.checkpoint import find_checkpoint, read_model


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied weight appears once, under the first of its names.

    The values share memory with the model.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def load_model_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    source: Path,
    may_lack: Callable[[str], bool] = lambda name: False,
) -> None:
    """Copy tensors made by `model_tensors` into a model; ties of the model stay.

    Args:
        model: Where to.
        tensors: What, by name.
        source: Where they come from, for messages.
        may_lack: Names that may be absent; what the model has there stays.

    Raises:
        CheckpointError: A tensor is missing, unknown or of another shape. The model is unchanged then.
    """
    targets = model_tensors(model)
    check_fits(
        {name: tensor.shape for name, tensor in tensors.items()},
        {name: target.shape for name, target in targets.items()},
        source=source,
        model=type(model).__name__,
        may_lack=may_lack,
    )
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)


def check_fits(
    stored: Mapping[str, Sequence[int]],
    wanted: Mapping[str, Sequence[int]],
    *,
    source: Path,
    model: str,
    may_lack: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raise unless every name and shape agrees.

    Args:
        stored: Shapes of what is there.
        wanted: Shapes of what the model has.
        source: Where it is, for messages.
        model: What the model is, for messages.
        may_lack: Names that may be absent.

    Raises:
        CheckpointError: A tensor is missing, unknown or of another shape; all are listed.
    """
    problems = {
        "missing": [name for name in wanted if name not in stored and not may_lack(name)],
        "not in this model": [name for name in stored if name not in wanted],
        "of another shape": [
            f"{name} {list(stored[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in stored and tuple(stored[name]) != tuple(shape)
        ],
    }
    found = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items() if names)
    if found:
        raise CheckpointError(f"{source} does not fit this {model}: {found}")


def load_weights(model: nn.Module, source: Path | str, *, may_lack_depth: bool = False) -> Path:
    """Load the weights of a run into a model that is already built.

    Args:
        model: Where to.
        source: A checkpoint folder, or a run folder, whose newest checkpoint is taken.
        may_lack_depth: Whether pseudo-queries and key weights may be absent in the source, as when a PreNorm run is
            continued with AttnRes. They keep the values the model has.

    Returns:
        The checkpoint that was read.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it does not fit the model.
    """
    path = find_checkpoint(Path(source))
    may_lack = is_depth_parameter if may_lack_depth else lambda name: False
    load_model_tensors(model, read_model(path), source=path, may_lack=may_lack)
    return path
