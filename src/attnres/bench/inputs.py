"""One problem for all forms: sources, vectors and the gradient that comes back, drawn so that mistakes show."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnres.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of one read."""

    sources: int
    tokens: int
    dim: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; allowed: 1 or more")

    def __str__(self) -> str:
        return f"{self.sources}x{self.tokens}x{self.dim}"

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read ``SOURCESxTOKENSxDIM``, such as ``9x4096x1024``.

        Raises:
            ConfigError: The text is something else, or a size is below 1.
        """
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
            raise ConfigError(f"shape is {text!r}; allowed: SOURCESxTOKENSxDIM, such as 9x4096x1024")
        sources, tokens, dim = map(int, parts)
        return cls(sources=sources, tokens=tokens, dim=dim)


class Inputs:
    """Random inputs of one read.

    Sources differ in size by up to four, so that a form without key norm is wrong; the key weight is not one; scores
    have a spread of about one, so that no source has all the weight. The vectors are float32, as parameters are, but
    exact in the sources' dtype, so that a form which wants them in that dtype is given the same numbers.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, *, seed: int = 0):
        self.shape, self.dtype, self.device = shape, dtype, device
        random = torch.Generator(device).manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=random, device=device)

        sizes = [0.5 * 4 ** (index / max(shape.sources - 1, 1)) for index in range(shape.sources)]
        self.sources = [(size * draw(shape.tokens, shape.dim)).to(dtype).requires_grad_() for size in sizes]
        self.query = (draw(shape.dim) / shape.dim**0.5).to(dtype).float()
        self.weight = (1 + 0.1 * draw(shape.dim)).to(dtype).float()
        self.grad = draw(shape.tokens, shape.dim).to(dtype)

    @cached_property
    def packed(self) -> Tensor:
        """The sources as one tensor ``[sources, tokens, dim]``, for forms that take them so."""
        return torch.stack([source.detach() for source in self.sources]).requires_grad_()
