"""What a model's norms are, asked of the modules themselves."""

from typing import Any

import torch
from torch import nn

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_plain: dict[type, bool] = {}


def norm_eps(norm: nn.Module, *, default: float) -> float:
    """The eps of a norm, whatever its class calls it."""
    found = [getattr(norm, name) for name in EPS_NAMES if isinstance(getattr(norm, name, None), float)]
    return found[0] if found else default


def note_norm(norm: nn.Module | None) -> None:
    """Find out, once per class, whether its norms are plain, so that `is_plain` can tell."""
    if norm is not None and type(norm) not in _plain:
        _plain[type(norm)] = _computes_rms_norm(type(norm))


def is_plain(norm: Any) -> bool:
    """Whether a norm is ``weight * rms_norm(x)`` and nothing else: of a class that is, without hooks or a new forward.

    Then a read can do the norm's work, which has the same value to rounding.
    """
    return (
        _plain.get(type(norm), False)
        and norm._parameters["weight"].dtype != torch.float64  # which these norms compute in float32
        and not norm._forward_hooks
        and not norm._forward_pre_hooks
        and "forward" not in norm.__dict__
    )


def _computes_rms_norm(cls: type[nn.Module]) -> bool:
    """Try a small norm of a class against the definition; the two roundings of half precision included."""
    eps, width = 0.25, 16
    random = torch.Generator("cpu").manual_seed(0)
    weight, value = (torch.randn(count, width, generator=random, device="cpu") for count in (1, 3))
    try:
        with torch.device("cpu"), torch.no_grad():
            norm: Any = cls(width, eps=eps)
            if not isinstance(getattr(norm, "variance_epsilon", None), float) or list(norm.state_dict()) != ["weight"]:
                return False
            norm.weight.copy_(weight[0])
            for dtype in (torch.float32, torch.bfloat16):
                given = value.to(dtype)
                wide = given.float()
                normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
                if not torch.equal(norm.to(dtype)(given), norm.weight * normed.to(dtype)):
                    return False
    except (TypeError, ValueError, RuntimeError):
        return False
    return True
