"""The residual path of a checkpoint folder of ours, without the rest of the model."""

from pathlib import Path

import torch
from safetensors import safe_open

from attnres.errors import CheckpointError, ConfigError
from attnres.interop.folder import open_folder, raise_problems
from attnres.interop.inkling2 import READ_EPS
from attnres.interop.names import SITES
from attnres.interop.own import base_config, read_own, whole_number
from attnres.residual import Residual
from attnres.residual.variants.inkling2 import Inkling2


def load_residual(folder: Path | str) -> Residual:
    """Strategy, pseudo-queries and key weights of a model: all that its reads need, and little of its memory.

    Args:
        folder: Folder of ours with a base of two sublayers per layer.

    Raises:
        CheckpointError: The folder is damaged, not one of ours, or its residual parameters do not fit its strategy.
    """
    own = read_own(open_folder(Path(folder)))
    layers, dim = (whole_number(own.fields, name, own.folder) for name in ("num_hidden_layers", "hidden_size"))
    eps = READ_EPS if isinstance(own.strategy, Inkling2) else getattr(base_config(own), "rms_norm_eps", None)
    if eps is None:
        raise CheckpointError(f"{own.folder.path}: a {own.base_model_type} has no rms_norm_eps, which the reads need")
    stored = {
        name.removeprefix("model.residual."): t for name, t in own.folder.tensors.items() if name.startswith(SITES)
    }
    try:
        residual = Residual(own.strategy, 2 * layers, dim, eps=eps)
    except ConfigError as error:
        raise CheckpointError(f"{own.folder.path}: {error}") from error
    targets = residual.state_dict()
    problems = {
        "missing": sorted(targets.keys() - stored.keys()),
        "not in the model": sorted(stored.keys() - targets.keys()),
        "of another shape": [
            f"{name} {list(tensor.shape)} instead of {list(targets[name].shape)}"
            for name, tensor in stored.items()
            if name in targets and tuple(targets[name].shape) != tensor.shape
        ],
    }
    raise_problems(f"{own.folder.path} does not fit {own.strategy.label}", problems)
    values: dict[str, torch.Tensor] = {}
    for file in {tensor.file for tensor in stored.values()}:
        with safe_open(file, framework="pt") as opened:
            values |= {name: opened.get_tensor(t.name) for name, t in stored.items() if t.file == file}
    residual.load_state_dict(values, assign=True)
    return residual
