import pytest
import torch

from strategies.cases import case_id, cases
from strategies.toy import DIM, SUBLAYERS, mixing_of, toy


@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_the_mixing_matrix_reconstructs_every_read(strategy):
    model = toy(strategy)
    embedding = torch.randn(2, 3, DIM, dtype=torch.float64)
    for view in range(max(model.residual.site(index).views for index in range(SUBLAYERS))):
        matrix, reads, outputs = mixing_of(model, embedding, view)
        channels = matrix.shape[-1]
        values = torch.stack([embedding, *outputs], dim=-2).unflatten(-1, (channels, -1))
        rebuilt = torch.einsum("...lsc,...scd->...lcd", matrix.double(), values).flatten(-2)
        for index, read in enumerate(reads):
            several = model.residual.site(index if index < SUBLAYERS else -1).views > 1
            seen = read[..., view, :] if several else read
            torch.testing.assert_close(rebuilt[..., index, :], seen, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_nothing_is_read_before_it_is_written(strategy):
    matrix, _, _ = mixing_of(toy(strategy), torch.randn(2, 3, DIM, dtype=torch.float64))
    later = torch.ones(SUBLAYERS + 1, SUBLAYERS + 1).triu(1).bool()
    assert (matrix[..., later, :] == 0).all()
