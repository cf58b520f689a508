"""How much a mixing matrix carries from one site to the next: its semiseparable rank (paper, section 6)."""

import torch
from torch import Tensor

from attnres.errors import ShapeError


def semiseparable_rank(matrix: Tensor, tol: float | None = None) -> Tensor:
    """The semiseparable rank of a mixing matrix: the largest rank of its parts on and below the diagonal.

    Site l reads columns 0 to l, so all that a read at site l or later has of the sources up to there is in the part
    ``M[l:, :l+1]``. Its rank is the number of vectors that have to be carried across site l, and the largest over all
    l is the semiseparable rank: 1 for a residual with one stream, m for m streams. With n sites it is at most
    ``(n + 1) // 2``. The rank of the matrix itself says nothing: it is full whenever each read sees the newest output.

    Args:
        matrix: ``[*batch, sites, sources]``, square, as `mixing_matrix` gives it.
        tol: Singular values up to this share of a part's largest count as zero; by default 1e-9, and 1e-5 for a
            matrix that is not float64.

    Returns:
        Whole numbers ``[*batch]``; a matrix without batch axes gives a tensor with one number.

    Raises:
        ShapeError: The matrix is not square.

    Examples:
        >>> import torch
        >>> int(semiseparable_rank(torch.ones(5, 5).tril()))
        1
        >>> int(semiseparable_rank(torch.eye(4).cumsum(0) + torch.eye(4)))
        2
    """
    sites, sources = matrix.shape[-2:]
    if sites != sources:
        raise ShapeError(f"matrix has {sites} sites and {sources} sources; allowed is a square matrix")
    if tol is None:
        tol = 1e-9 if matrix.dtype == torch.float64 else 1e-5
    wide = matrix.to(torch.float64)
    parts = [wide[..., site:, : site + 1] for site in range(sites)]
    return torch.stack([torch.linalg.matrix_rank(part, rtol=tol) for part in parts], dim=-1).amax(-1)
