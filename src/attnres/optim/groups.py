"""Sorting a model's parameters into groups, by what they are.

Which optimizer a parameter gets is a property of its role, not of its shape: a pseudo-query stored as ``[1, D]`` is
two-dimensional, yet orthogonalising it would throw its length away, and weight decay would pull every read back to
the plain mean. So the role is settled here, once, for every optimizer.
"""

from typing import TypedDict

from torch import nn

from attnres.errors import ConfigError

DEPTH_PARAMETERS = frozenset({"pseudo_query", "key_weight"})
"""Last name component of the parameters of depth attention."""
RESIDUAL_PATH = "residual.sites."
"""Part of the name of every parameter that a residual strategy has in a model."""

ROLES = ("matrix", "expert", "embedding", "head", "vector", "depth")
"""Group names. Only ``"matrix"`` may go to Muon."""


class ParamGroup(TypedDict):
    """Parameters of one role, in the form that `torch.optim` takes."""

    name: str
    params: list[tuple[str, nn.Parameter]]
    lr: float
    weight_decay: float


def is_depth_parameter(name: str) -> bool:
    """Whether a parameter name is that of a pseudo-query, a key weight, or anything else of a residual strategy."""
    return name.rpartition(".")[2] in DEPTH_PARAMETERS or RESIDUAL_PATH in f"{name}."


def freeze_base(model: nn.Module) -> None:
    """Let gradients reach only what a residual strategy learns.

    Raises:
        ConfigError: The model has no such parameter, as with PreNorm; nothing has been changed then.
    """
    if not any(is_depth_parameter(name) for name, _ in model.named_parameters()):
        raise ConfigError(
            "optim.train_only is 'depth', but this residual strategy has no parameters of its own; allowed: 'all', or "
            "a strategy that learns something"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_depth_parameter(name))


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    embedding_lr_scale: float = 1.0,
    head_lr_scale: float = 1.0,
    vector_lr_scale: float = 1.0,
    depth_lr_scale: float = 1.0,
) -> list[ParamGroup]:
    """Sort the trainable parameters of a model into groups by role; each is in exactly one.

    - ``matrix``: two-dimensional weights, such as those of linear layers and routers.
    - ``expert``: stacked matrices of three or more dimensions, which Muon does not take.
    - ``embedding`` and ``head``: a tied pair counts once, as embedding.
    - ``vector``: norms, biases, convolution filters, and anything with at most one dimension longer than 1.
    - ``depth``: pseudo-queries and key weights, whatever their shape, and all else that a residual strategy learns.

    Weight decay is given to ``matrix`` and ``expert`` only.

    Args:
        model: Any module; the head is recognised by ``get_output_embeddings()``, which Hugging Face models have.
        lr: Learning rate of matrices.
        weight_decay: Of matrices.
        embedding_lr_scale: Multiplier of ``lr`` for embeddings.
        head_lr_scale: Multiplier of ``lr`` for an untied head.
        vector_lr_scale: Multiplier of ``lr`` for vectors.
        depth_lr_scale: Multiplier of ``lr`` for pseudo-queries and key weights.

    Returns:
        The groups that are not empty, in the order of `ROLES`; names and order inside as in ``named_parameters()``.

    Raises:
        ConfigError: The model has no trainable parameter.
    """
    scales = {
        "embedding": embedding_lr_scale,
        "head": head_lr_scale,
        "vector": vector_lr_scale,
        "depth": depth_lr_scale,
    }
    members: dict[str, list[tuple[str, nn.Parameter]]] = {role: [] for role in ROLES}
    roles_by_owner = _roles_by_owner(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[_role(name, parameter, roles_by_owner)].append((name, parameter))
    if not any(members.values()):
        raise ConfigError(f"{type(model).__name__} has no trainable parameter")
    return [
        ParamGroup(
            name=role,
            params=params,
            lr=lr * scales.get(role, 1.0),
            weight_decay=weight_decay if role in ("matrix", "expert") else 0.0,
        )
        for role, params in members.items()
        if params
    ]


def _role(name: str, parameter: nn.Parameter, roles_by_owner: dict[nn.Parameter, str]) -> str:
    if is_depth_parameter(name):
        return "depth"
    if parameter in roles_by_owner:
        return roles_by_owner[parameter]
    if sum(length > 1 for length in parameter.shape) < 2:
        return "vector"
    return "matrix" if parameter.ndim == 2 else "expert"


def _roles_by_owner(model: nn.Module) -> dict[nn.Parameter, str]:
    """Roles that the owning module decides: head, then convolution, then embedding, the last one winning."""
    roles: dict[nn.Parameter, str] = {}
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    if isinstance(head, nn.Module):
        roles.update(dict.fromkeys(head.parameters(), "head"))
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            roles.update(dict.fromkeys(module.parameters(recurse=False), "vector"))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            roles.update(dict.fromkeys(module.parameters(recurse=False), "embedding"))
    return roles
