"""What does not fit is refused in words, by the Python functions and by the operators beneath them."""

import pytest
import torch

from attnres.errors import ShapeError
from attnres.ops import PartialSoftmax, depth_attention, intra_block
from attnres.ops.cpu import problem

OPS = torch.ops.attnres
READ = (None, None, 1e-6, 1.0, 1e-6, torch.float32)


def sources(count=3, tokens=8, dim=16):
    return [torch.randn(tokens, dim) for _ in range(count)]


def part(tokens=8, dim=16):
    return PartialSoftmax(torch.randn(tokens, dim), torch.randn(tokens))


@pytest.mark.parametrize(
    ("call", "words"),
    {
        "key weight": (lambda: depth_attention(sources(), torch.randn(16), torch.randn(3, 16)), "key_weight has shape"),
        "norm": (lambda: depth_attention(sources(), torch.randn(16), out_norm_weight=torch.ones(3)), "out_norm_weight"),
        "query": (lambda: intra_block(part(), None, torch.randn(4096), dtype=torch.float32), "pseudo_query has shape"),
        "partial": (lambda: intra_block(part(), torch.randn(1, 16), torch.randn(16)), "partial has shape"),
        "lse": (
            lambda: intra_block(
                PartialSoftmax(torch.randn(8, 16), torch.randn(1)), torch.randn(8, 16), torch.randn(16)
            ),
            "lse has shape",
        ),
        "phase 2 norm": (
            lambda: intra_block(part(), torch.randn(8, 16), torch.randn(16), out_norm_weight=torch.ones(3)),
            "out_norm_weight has shape",
        ),
    }.values(),
)
@pytest.mark.parametrize("grad", [True, False])
def test_functions_refuse_shapes_that_do_not_fit(call, words, grad):
    with torch.set_grad_enabled(grad), pytest.raises(ShapeError, match=words):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: OPS.depth_attention([], torch.randn(16), *READ),
        lambda: OPS.depth_attention(sources(), torch.randn(100000), *READ),
        lambda: OPS.depth_attention([*sources(), torch.randn(1, 16)], torch.randn(16), *READ),
        lambda: OPS.depth_attention(sources(), torch.randn(16), torch.randn(4), None, *READ[2:]),
        lambda: OPS.depth_attention(sources(), torch.randn(16), None, torch.randn(4), *READ[2:]),
        lambda: OPS.depth_attention(sources(), torch.randn(16), *READ[:-1], torch.float16),
        lambda: OPS.depth_attention_backward(
            torch.randn(8, 16), torch.randn(1), None, sources(), torch.randn(16), *READ[:-1], [True] * 3
        ),
        lambda: OPS.depth_attention_backward(
            torch.randn(1, 16), None, None, sources(), torch.randn(16), *READ[:-1], [True] * 3
        ),
        lambda: OPS.depth_attention_backward(
            torch.randn(8, 16), None, None, sources(), torch.randn(16), *READ[:-1], [True]
        ),
        lambda: OPS.inter_block(sources(), torch.randn(16), None, 1e-6),
        lambda: OPS.inter_block_backward([None], [None, None], sources(), torch.randn(2, 16), None, 1e-6, [None] * 3),
        lambda: OPS.inter_block_backward([None] * 2, [None] * 2, sources(), torch.randn(2, 16), None, 1e-6, []),
        lambda: OPS.intra_block(
            torch.randn(8, 16), torch.randn(1), sources(1), None, torch.randn(16), None, None, 1e-6, 1.0, 1e-6,
            torch.float32,
        ),
        lambda: OPS.intra_block_backward(
            torch.randn(8, 16), torch.randn(4, 16), sources(1), torch.randn(8, 1), torch.randn(16), None, 1e-6, 1.0,
            torch.float32,
        ),
    ],
)  # fmt: skip
@pytest.mark.skipif(problem() is not None, reason="no C++ compiler")
def test_operators_refuse_what_does_not_fit_instead_of_reading_past_the_end(call):
    with torch.no_grad(), pytest.raises((RuntimeError, IndexError)):
        call()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_result_dtype_that_no_kernel_writes_comes_from_the_reference(dtype):
    values, query = sources(), torch.randn(16) / 4
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            mixed = depth_attention(values, query, dtype=dtype)
        assert mixed.dtype == dtype
        torch.testing.assert_close(mixed.float(), depth_attention(values, query), rtol=2e-3, atol=2e-3)
