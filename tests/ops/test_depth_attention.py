import pytest
import torch

from attnres.errors import ShapeError
from attnres.ops import depth_attention
from peers import direct_read, fla_naive

EPS = 1e-6


def random_read(sources, *batch, dim=24, dtype=torch.float64, scale=2.0):
    values = [(torch.randn(*batch, dim) * scale**i).to(dtype).requires_grad_() for i in range(sources)]
    query = torch.randn(dim, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (1 + 0.3 * torch.randn(dim, dtype=torch.float64)).to(dtype).requires_grad_()
    return values, query, weight


@pytest.mark.parametrize("sources", [2, 3, 9, 57])
@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)], ids=str)
def test_equals_the_direct_softmax_in_float64(sources, batch):
    values, query, weight = random_read(sources, *batch, scale=1.1)
    mixed = depth_attention(values, query, weight, eps=EPS)
    torch.testing.assert_close(mixed, direct_read(values, query, weight, EPS), rtol=1e-12, atol=1e-12)


def test_every_gradient_is_right_by_finite_differences():
    values, query, weight = random_read(4, 3, dim=6)

    def read(query, weight, *values):
        result = depth_attention(values, query, weight, eps=1e-3, out_scale=1.7, return_weights=True, return_lse=True)
        return tuple(result)

    assert torch.autograd.gradcheck(read, (query, weight, *values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sources", [2, 9])
def test_agrees_with_fla_in_value_weights_and_all_gradients(sources, dtype):
    values, query, weight = random_read(sources, 4, 7, dim=32, dtype=dtype, scale=1.3)
    grad = torch.randn(4, 7, 32).to(dtype)
    ours, our_weights, _ = depth_attention(values, query, weight, eps=EPS, return_weights=True)
    our_grads = torch.autograd.grad(ours, [*values, query, weight], grad)
    theirs, their_weights = fla_naive().naive_attnres(query, values, weight, rms_eps=EPS, return_weights=True)
    their_grads = torch.autograd.grad(theirs, [*values, query, weight], grad)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(ours, theirs, **tolerance)
    torch.testing.assert_close(our_weights, their_weights.movedim(0, -1), rtol=1e-5, atol=1e-5)
    for mine, other in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_source_comes_back_bit_for_bit_with_zero_gradients_for_query_and_weight(dtype):
    values, query, weight = random_read(1, 5, dtype=dtype)
    with torch.no_grad():
        values[0][0, :4] = torch.tensor([0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny])
    mixed = depth_attention(values, query, weight, eps=EPS)
    assert mixed.dtype == dtype
    assert torch.equal(mixed, values[0])
    assert torch.equal(torch.signbit(mixed), torch.signbit(values[0]))
    grad = torch.randn(5, 24).to(dtype)
    d_value, d_query, d_weight = torch.autograd.grad(mixed, [values[0], query, weight], grad)
    assert torch.equal(d_value, grad)
    assert torch.equal(d_query, torch.zeros_like(query))
    assert torch.equal(d_weight, torch.zeros_like(weight))


def test_one_source_has_weight_one_and_its_score_as_lse():
    values, query, weight = random_read(1, 5)
    result = depth_attention(values, query, weight, eps=EPS, return_weights=True, return_lse=True)
    normed = values[0] / torch.sqrt(values[0].pow(2).mean(-1, keepdim=True) + EPS)
    assert torch.equal(result.depth_weights, torch.ones(5, 1, dtype=torch.float64))
    torch.testing.assert_close(result.lse, (normed * weight) @ query, rtol=1e-12, atol=1e-12)


def test_a_zero_query_gives_the_mean_and_with_out_scale_the_sum():
    values, _, weight = random_read(5, 3)
    zero = torch.zeros(24, dtype=torch.float64)
    mean = depth_attention(values, zero, weight, eps=EPS)
    total = depth_attention(values, zero, weight, eps=EPS, out_scale=5.0)
    torch.testing.assert_close(mean, sum(values) / 5, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(total, sum(values), rtol=1e-14, atol=1e-14)


def test_weights_sum_to_one_are_uniform_at_zero_and_ordered_like_the_sources():
    values, query, weight = random_read(6, 4)
    result = depth_attention(values, query, weight, eps=EPS, return_weights=True)
    assert result.lse is None
    torch.testing.assert_close(result.depth_weights.sum(-1), torch.ones(4, dtype=torch.float64))
    mixed = sum(result.depth_weights[..., i, None] * value for i, value in enumerate(values))
    torch.testing.assert_close(mixed, result.mixed)
    uniform = depth_attention(values, torch.zeros_like(query), weight, eps=EPS, return_weights=True).depth_weights
    torch.testing.assert_close(uniform, torch.full((4, 6), 1 / 6, dtype=torch.float64))


def test_rescaling_one_source_keeps_the_weights_and_changes_the_mix():
    values, query, weight = random_read(4, 3)
    louder = [value * 100 if i == 2 else value for i, value in enumerate(values)]
    before = depth_attention(values, query, weight, eps=0.0, return_weights=True)
    after = depth_attention(louder, query, weight, eps=0.0, return_weights=True)
    torch.testing.assert_close(before.depth_weights, after.depth_weights, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before.mixed, after.mixed)


def test_missing_key_weight_means_ones():
    values, query, _ = random_read(3, 4)
    ones = torch.ones(24, dtype=torch.float64)
    assert torch.equal(depth_attention(values, query), depth_attention(values, query, ones))


def test_bfloat16_is_float32_math_rounded_once():
    values, query, weight = random_read(7, 50, dtype=torch.bfloat16, scale=1.3)
    mixed = depth_attention(values, query, weight, eps=EPS)
    exact = depth_attention([v.float() for v in values], query.float(), weight.float(), eps=EPS)
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, exact.bfloat16())


def test_sources_of_different_dtype_need_a_declared_dtype():
    embedding = torch.randn(3, 8, requires_grad=True)
    block = torch.randn(3, 8).bfloat16().requires_grad_()
    query, weight = torch.randn(8), torch.ones(8)
    with pytest.raises(ShapeError, match=r"different dtypes \(torch.float32, torch.bfloat16\)"):
        depth_attention([embedding, block], query, weight)
    mixed = depth_attention([embedding, block], query, weight, dtype=torch.bfloat16)
    exact = depth_attention([embedding, block.float()], query, weight)
    assert torch.equal(mixed, exact.bfloat16())
    d_embedding, d_block = torch.autograd.grad(mixed.float().sum(), [embedding, block])
    assert (d_embedding.dtype, d_block.dtype) == (torch.float32, torch.bfloat16)


def test_autocast_does_not_reach_into_the_read():
    values, query, weight = random_read(5, 6, dtype=torch.float32)
    plain = depth_attention(values, query, weight, eps=EPS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(depth_attention(values, query, weight, eps=EPS), plain)


def test_a_row_does_not_depend_on_the_other_rows():
    values, query, weight = random_read(6, 64, dtype=torch.float32)
    whole = depth_attention(values, query, weight, eps=EPS)
    for size in (1, 7, 16):
        chunks = [
            depth_attention([v[at : at + size] for v in values], query, weight, eps=EPS) for at in range(0, 64, size)
        ]
        assert torch.equal(torch.cat(chunks), whole)
    poisoned = [value.detach().clone() for value in values]
    poisoned[3][11] = float("nan")
    other = torch.arange(64) != 11
    mixed = depth_attention(poisoned, query, weight, eps=EPS)
    assert torch.equal(mixed[other], whole[other])
    assert mixed[11].isnan().all()


def test_strided_sliced_and_expanded_sources_are_like_contiguous_ones():
    base = torch.randn(4, 6, 48, requires_grad=True)
    row = torch.randn(24, requires_grad=True)
    query, weight = torch.randn(24), torch.ones(24)
    views = [base[..., ::2], base.transpose(0, 1).transpose(0, 1)[..., 24:], row.expand(4, 6, 24)]
    copies = [view.contiguous() for view in views]
    grad = torch.randn(4, 6, 24)
    for mine, other in zip(
        torch.autograd.grad(depth_attention(views, query, weight), [base, row], grad),
        torch.autograd.grad(depth_attention(copies, query, weight), [base, row], grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_no_tokens_give_no_tokens():
    values, query, weight = random_read(3, 0)
    assert depth_attention(values, query, weight).shape == (0, 24)


def test_the_same_backward_twice_is_bitwise_equal():
    values, query, weight = random_read(5, 300, dtype=torch.float32)
    grad = torch.randn(300, 24)
    first, second = (
        torch.autograd.grad(depth_attention(values, query, weight), [*values, query, weight], grad) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("sources", "query", "weight", "message"),
    [
        ([], torch.zeros(4), None, "got 0 sources"),
        ([torch.zeros(2, 4), torch.zeros(3, 4)], torch.zeros(4), None, r"source 1 has shape \(3, 4\)"),
        ([torch.zeros(2, 4)], torch.zeros(5), None, r"pseudo_query has shape \(5,\).*width 4"),
        ([torch.zeros(2, 4)], torch.zeros(1, 4), None, r"pseudo_query has shape \(1, 4\)"),
        ([torch.zeros(2, 4)], torch.zeros(4), torch.ones(3), r"key_weight has shape \(3,\)"),
        ([torch.zeros(2, 4, dtype=torch.int64)], torch.zeros(4), None, "dtype torch.int64"),
        ([torch.tensor(1.0)], torch.zeros(1), None, "scalars"),
    ],
    ids=["none", "shapes", "query-width", "query-rank", "weight-width", "integer", "scalar"],
)
def test_bad_input_gets_one_clear_line(sources, query, weight, message):
    with pytest.raises(ShapeError, match=message):
        depth_attention(sources, query, weight)
