"""The rank statements of the paper's section 6, on mixing matrices of models with random parameters."""

import pytest
import torch

from attnres.analysis import semiseparable_rank
from attnres.errors import ShapeError
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm, Strategy
from attnres.residual.rivals.highway import Highway
from attnres.residual.rivals.laurel import Laurel
from attnres.residual.rivals.mhc import ManifoldHyperConnections
from attnres.residual.rivals.postnorm import PostNorm
from attnres.residual.rivals.rescaled import RescaledResidual
from attnres.residual.rivals.siamese import SiameseNorm
from strategies.toy import DIM, SUBLAYERS, mixing_of, toy

TOKENS = (2, 3)


def matrices(strategy: Strategy, sublayers: int = SUBLAYERS) -> torch.Tensor:
    """One matrix per token, and per channel where weights differ between channels: ``[..., sites, sources]``."""
    matrix, _, _ = mixing_of(toy(strategy, sublayers=sublayers), torch.randn(*TOKENS, DIM, dtype=torch.float64))
    assert matrix.dtype == torch.float64
    return matrix.expand(*TOKENS, -1, -1, -1).movedim(-1, 0)


def rank_of(strategy: Strategy, sublayers: int = SUBLAYERS) -> int:
    """The rank, which is the same for every token and channel."""
    ranks = semiseparable_rank(matrices(strategy, sublayers))
    assert ranks.shape[-2:] == TOKENS
    assert ranks.unique().numel() == 1
    return int(ranks.flatten()[0])


@pytest.mark.parametrize(
    "strategy", [PreNorm(), Highway(), Highway(per_channel=True), RescaledResidual(), Laurel(), PostNorm()], ids=repr
)
def test_one_stream_has_rank_one(strategy):
    assert rank_of(strategy) == 1


@pytest.mark.parametrize("streams", [2, 4])
def test_m_streams_have_rank_m(streams):
    assert rank_of(ManifoldHyperConnections(streams=streams), sublayers=12) == streams


def test_the_two_streams_of_siamese_norm_have_rank_two():
    assert rank_of(SiameseNorm()) == 2


@pytest.mark.parametrize("sublayers", [2, 5, 8, 16])
def test_full_attnres_has_the_largest_rank_there_is(sublayers):
    sites = sublayers + 1
    assert rank_of(FullAttnRes(), sublayers) == (sites + 1) // 2
    matrix = matrices(FullAttnRes(), sublayers)
    for site in range(sites):
        part = matrix[..., site:, : site + 1]
        assert (torch.linalg.matrix_rank(part, rtol=1e-9) == min(part.shape[-2:])).all()


@pytest.mark.parametrize(("blocks", "size"), [(2, 4), (4, 2), (4, 4), (2, 8), (8, 4), (3, 6)])
def test_block_attnres_lies_between_the_blocks_and_the_blocks_plus_their_size(blocks, size):
    rank = rank_of(BlockAttnRes(sublayers_per_block=size), blocks * size)
    assert 2 * size >= blocks  # else the rows run out before the sources do
    assert blocks <= rank <= blocks + size
    assert rank == expected_block_rank(blocks, size)
    assert rank <= blocks + 1  # tensors in the state


def expected_block_rank(blocks: int, size: int) -> int:
    """At site l, the sources there are (embedding, finished blocks, partial sum) or the sites still to come."""
    sublayers = blocks * size
    sources = [1 + site // size + bool(site % size) for site in range(sublayers + 1)]
    return max(min(count, sublayers + 1 - site) for site, count in enumerate(sources))


def test_small_blocks_are_bounded_by_the_sites_still_to_come():
    assert rank_of(BlockAttnRes(sublayers_per_block=2), 16) == expected_block_rank(8, 2) == 6


def test_the_rank_of_a_part_not_of_the_matrix_is_measured():
    ones = torch.ones(6, 6, dtype=torch.float64).tril()
    assert torch.linalg.matrix_rank(ones) == 6
    assert semiseparable_rank(ones) == 1


def test_a_sum_of_r_products_has_rank_r():
    torch.manual_seed(0)
    for rank in range(1, 5):
        matrix = (torch.randn(3, 10, rank) @ torch.randn(3, rank, 10)).double().tril()
        assert semiseparable_rank(matrix, 1e-6).tolist() == [rank] * 3


def test_entries_above_the_diagonal_do_not_count():
    matrix = torch.randn(6, 6, dtype=torch.float64).triu(1) + torch.ones(6, 6, dtype=torch.float64).tril()
    assert semiseparable_rank(matrix) == 1


def test_the_tolerance_is_relative():
    matrix = 1e-12 * (torch.ones(6, 6, dtype=torch.float64) + 1e-4 * torch.eye(6, dtype=torch.float64)).tril()
    assert semiseparable_rank(matrix) == 2
    assert semiseparable_rank(matrix, tol=1e-3) == 1


def test_a_matrix_that_is_not_square_is_refused():
    with pytest.raises(ShapeError, match="3 sites and 4 sources; allowed is a square matrix"):
        semiseparable_rank(torch.ones(3, 4))
