"""One read with what stands around it: the pending add of an output before, and the sublayer's norm after.

Fused or not, the result is that of three steps: add, read, and the RMSNorm of Transformers' Llama.
"""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres.errors import ConfigError, ShapeError
from attnres.ops import PartialSoftmax, cpu, depth_attention, inter_block, intra_block
from attnres.ops.reference import rms_norm

WIDTH, EPS, NORM_EPS = 72, 1e-5, 1e-3
BACKENDS = ["reference", "cpu", "auto"]
NOT_IN_KERNEL = ("cpu", torch.float16)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def kernel():
    if reason := cpu.problem():
        pytest.skip(reason)


def inputs(count=4, dtype=torch.float32, batch=(2, 5)):
    """Sources, an update, and query, key weight and norm weight."""
    *sources, update = (torch.randn(*batch, WIDTH).to(dtype) for _ in range(count + 1))
    query, key, norm = torch.randn(WIDTH) / 8, 1 + torch.randn(WIDTH) / 4, 1 + torch.randn(WIDTH) / 4
    return sources, update, [vector.to(dtype) for vector in (query, key, norm)]


def llama(weight, dtype):
    norm = LlamaRMSNorm(WIDTH, NORM_EPS).to(dtype)
    norm.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
    return norm


def in_steps(sources, update, vectors, backend):
    """The add, the read, and the norm, each in an operator of its own."""
    query, key, norm = vectors
    total = sources[-1] + update
    read = depth_attention([*sources[:-1], total], query, key, eps=EPS, backend=backend)
    return llama(norm, read.dtype)(read), total


def fused(sources, update, vectors, backend):
    query, key, norm = vectors
    options = {"eps": EPS, "out_norm_weight": norm, "out_norm_eps": NORM_EPS, "backend": backend}
    return depth_attention(sources, query, key, update=update, **options)


def assert_within_an_ulp(found, expected):
    """Of the output's dtype; in float32 and float64 the norm itself is in float32 and may differ in several."""
    assert found.dtype == expected.dtype
    if found.dtype in (torch.bfloat16, torch.float16):
        off = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
        assert off.max() <= 1
        assert (off > 0).float().mean() < 0.02
    else:
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_has_the_bits_of_llama(dtype):
    read, weight = torch.randn(50, WIDTH).to(dtype), torch.randn(WIDTH).to(dtype)
    assert torch.equal(rms_norm(read, weight, NORM_EPS), llama(weight, dtype)(read))


def test_a_float32_norm_of_a_bfloat16_read_gives_float32_as_in_llama():
    read, weight = torch.randn(50, WIDTH).bfloat16(), torch.randn(WIDTH)
    found = rms_norm(read, weight, NORM_EPS)
    assert found.dtype == torch.float32
    assert torch.equal(found, llama(weight, torch.float32)(read))


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize(("backend", "dtype"), [pair for pair in product(BACKENDS, DTYPES) if pair != NOT_IN_KERNEL])
def test_add_read_and_norm_are_those_in_steps(kernel, backend, dtype, count, grad_mode):
    given = inputs(count, dtype)
    with torch.set_grad_enabled(grad_mode):
        for _ in range(2):  # the second call in inference takes the short path
            found, total = fused(*given, backend)
            expected, added = in_steps(*given, backend)
            assert torch.equal(total, added)
            assert_within_an_ulp(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_alone_has_the_bits_of_add_and_read(backend, kernel):
    sources, update, (query, key, _) = inputs()
    with torch.no_grad():
        found, total = depth_attention(sources, query, key, update=update, backend=backend)
        assert torch.equal(total, sources[-1] + update)
        assert torch.equal(found, depth_attention([*sources[:-1], total], query, key, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_updated_source_keeps_its_dtype_and_is_read_as_rounded(backend, kernel):
    sources, update, (query, key, _) = inputs()
    for last, added in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        mixed = [*sources[:-1], sources[-1].to(last)]
        with torch.no_grad():
            found, total = depth_attention(
                mixed, query, key, update=update.to(added), dtype=torch.float32, backend=backend
            )
        assert total.dtype == last
        assert torch.equal(total, (mixed[-1].float() + update.to(added).float()).to(last))
        expected = depth_attention([*mixed[:-1], total], query, key, dtype=torch.float32, backend="reference")
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_gradient_of_add_read_and_norm_by_finite_differences(backend, kernel):
    sources, update, vectors = inputs(3, torch.float64, batch=(2,))
    leaves = [tensor[..., :5].clone().requires_grad_() for tensor in (*sources, update, *vectors)]

    def run(*leaves):
        *sources, update, query, key, norm = leaves
        options = {"eps": EPS, "out_norm_weight": norm, "out_norm_eps": NORM_EPS, "backend": backend}
        return depth_attention(sources, query, key, update=update, **options)

    assert torch.autograd.gradcheck(run, leaves)


def test_one_source_is_normed_where_it_is_and_without_a_norm_not_copied(kernel):
    (source,), update, (query, key, norm) = inputs(1)
    with torch.no_grad():
        depth_attention([source, source], query, key)
        found = depth_attention([source], query, key, out_norm_weight=norm, out_norm_eps=NORM_EPS)
        assert_within_an_ulp(found, llama(norm, torch.float32)(source))
        assert depth_attention([source], query, key).data_ptr() == source.data_ptr()
        read, total = depth_attention([source], query, key, update=update)
    assert read.data_ptr() == total.data_ptr()
    assert torch.equal(total, source + update)


class Calls(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


@torch.no_grad()
def test_inference_is_one_operator_whatever_is_fused(kernel):
    sources, update, (query, key, norm) = inputs()
    depth_attention(sources, query, key)
    for backend in ("auto", "cpu"):
        for options, name in (
            ({}, "read"),
            ({"out_norm_weight": norm}, "read"),
            ({"update": update}, "read_updated"),
            ({"update": update, "out_norm_weight": norm}, "read_updated"),
        ):
            with Calls() as calls:
                depth_attention(sources, query, key, backend=backend, **options)
            assert calls.names == [f"attnres.{name}.default"]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_phase_2_with_update_and_norm_is_that_in_steps(dtype, kernel):
    sources, update, vectors = inputs(5, dtype)
    query, key, norm = vectors
    *far, partial = sources
    part = PartialSoftmax(*(each[0] for each in inter_block(far, query[None], key[None], eps=EPS)))
    options = {"eps": EPS, "out_norm_weight": norm, "out_norm_eps": NORM_EPS}
    found, total = intra_block(part, partial, query, key, update=update, **options)
    expected, added = fused(sources, update, vectors, "cpu")
    assert torch.equal(total, added)
    torch.testing.assert_close(found, expected, rtol=2e-6 if dtype == torch.float32 else 2**-6, atol=1e-5)


@pytest.mark.parametrize("grad_mode", [True, False])
def test_an_update_that_does_not_fit_is_named(kernel, grad_mode):
    sources, update, (query, key, _) = inputs()
    with torch.set_grad_enabled(grad_mode):
        depth_attention(sources, query, key)
        for bad in (update[:1], update[..., :-1], update[0]):
            with pytest.raises(ShapeError, match=r"update has shape .* allowed: \(2, 5, 72\)"):
                depth_attention(sources, query, key, update=bad)
        for option in ("return_weights", "return_lse"):
            with pytest.raises(ConfigError, match="update is given together with return_weights or return_lse"):
                depth_attention(sources, query, key, update=update, **{option: True})
