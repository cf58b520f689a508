"""The CPU kernel: every operator and every gradient against the float64 reference, and what it promises beyond that.

Memory that a kernel leaves unwritten is NaN in all of these tests, and `close` lets no NaN pass.
"""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres.ops import PartialSoftmax, cpu, depth_attention, inter_block, intra_block, partial_softmax
from ops.triton_reference import gradients, leaf, norm, phase_one, phase_two, read

OPS = torch.ops.attnres
EPS, SCALE, NORM_EPS = 1e-3, 1.75, 1e-2
SINGLE, BRAIN, DOUBLE = torch.float32, torch.bfloat16, torch.float64
ROUNDING = {SINGLE: 2e-6, BRAIN: 2.0**-8, DOUBLE: 1e-12}
# Dtypes of the sources (the last one from there on) and of the result. "mixed" is autocast: a float32 embedding.
KINDS = {
    "float32": ((SINGLE,), SINGLE),
    "bfloat16": ((BRAIN,), BRAIN),
    "float64": ((DOUBLE,), DOUBLE),
    "mixed": ((SINGLE, BRAIN), BRAIN),
    "widened": ((BRAIN,), SINGLE),
    "narrowed": ((SINGLE,), BRAIN),
}
# sources, width, batch, kind, norm. Widths around one tile (64 floats, 32 doubles), tokens in one and several pieces.
SHAPES = [
    (1, 1, (7,), "float32", False),
    (1, 129, (1,), "bfloat16", False),
    (1, 64, (2, 3), "mixed", True),
    (1, 24, (7,), "float64", True),
    (2, 1, (7,), "bfloat16", True),
    (2, 3, (200,), "float32", False),
    (2, 64, (), "float64", False),
    (2, 128, (3,), "narrowed", False),
    (2, 1000, (7,), "mixed", False),
    (5, 24, (0,), "float32", True),
    (5, 24, (200,), "float64", True),
    (5, 65, (2, 0, 3), "bfloat16", False),
    (5, 129, (2, 100), "mixed", True),
    (9, 1, (1,), "float64", False),
    (9, 64, (200,), "float32", True),
    (9, 1000, (1,), "bfloat16", False),
    (9, 129, (7,), "widened", True),
    (20, 3, (7,), "mixed", False),
    (20, 129, (200,), "float32", False),
    (20, 1000, (7,), "float64", False),
    (57, 24, (7,), "bfloat16", True),
    (57, 64, (1,), "float32", False),
    (57, 129, (7,), "float64", True),
]
names = [f"n{n}-d{d}-{'x'.join(map(str, b)) or 'row'}-{k}-{'norm' if s else 'plain'}" for n, d, b, k, s in SHAPES]


@pytest.fixture(autouse=True, scope="module")
def kernel():
    if reason := cpu.problem():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """What ``at::empty`` returns is filled: with NaN where the dtype has it."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def rows(count, width, batch, kind="float32", spread=1.1):
    dtypes = KINDS[kind][0]
    return [(torch.randn(*batch, width) * spread ** (i % 20)).to(dtypes[min(i, len(dtypes) - 1)]) for i in range(count)]


def vectors(width, reads=None, dtype=SINGLE):
    """A query, a key weight and the weight of the norm that follows."""
    shape = (width,) if reads is None else (reads, width)
    query, key, after = torch.randn(shape) / width**0.5, 1 + 0.3 * torch.randn(shape), 1 + 0.3 * torch.randn(width)
    return query.to(dtype), key.to(dtype), after.to(dtype)


def work_of(kind):
    return DOUBLE if kind == "float64" else SINGLE


def close(found, expected, dtype, loose=1.0):
    """Dtype, shape and every element, relative to the largest one."""
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert found.is_contiguous()
    if expected.numel():
        assert torch.isfinite(found).all()
        error = (found.double() - expected.double()).abs().max().item()
        assert error <= loose * ROUNDING[dtype] * (expected.abs().max().item() + 1e-6)


def flat(outputs):
    return [t for item in outputs for t in (item if isinstance(item, (list, tuple)) else [item]) if t is not None]


def same_bits(left, right):
    left, right = flat(left), flat(right)
    return len(left) == len(right) and all(
        mine.dtype == other.dtype
        and mine.shape == other.shape
        and torch.equal(mine.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for mine, other in zip(left, right, strict=True)
    )


def requires_grad(tensors):
    return [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in tensors]


def split(values):
    """Sources, then whatever came with them."""
    *sources, query, key, after = values
    return sources, query, key, after


# --- one read -------------------------------------------------------------------------------------------------------


def test_unwritten_memory_is_visible_here():
    for dtype in (SINGLE, BRAIN, DOUBLE):
        assert torch.isnan(torch.empty(1000, dtype=dtype)).all()


@pytest.mark.parametrize(("count", "width", "batch", "kind", "with_norm"), SHAPES, ids=names)
def test_read_and_all_its_gradients_are_those_of_the_reference(count, width, batch, kind, with_norm):
    sources, work, out_dtype = rows(count, width, batch, kind), work_of(kind), KINDS[kind][1]
    query, key, after = vectors(width, dtype=work)
    inputs = requires_grad([*sources, query, key, after if with_norm else None])
    exact = [leaf(tensor) for tensor in inputs]
    settings = (EPS, SCALE, NORM_EPS)
    sources, query, key, after = split(inputs)
    found = OPS.depth_attention(sources, query, key, after, *settings, out_dtype)
    exact_sources, *rest = split(exact)
    expected = read(exact_sources, *rest, *settings)
    for value, reference, dtype in zip(found, expected, (out_dtype, work, work), strict=True):
        close(value, reference.detach(), dtype, loose=3)
    upstream = [torch.randn(value.shape).to(value.dtype) for value in found]
    present = [tensor for tensor in inputs if tensor is not None]
    grads = torch.autograd.grad(found, present, upstream)
    wanted = [grad for grad in gradients(expected, upstream, exact) if grad is not None]
    for index, (grad, reference, tensor) in enumerate(zip(grads, wanted, present, strict=True)):
        close(grad, reference, tensor.dtype, loose=3 if index < count else 10)
    with torch.no_grad():
        if work == DOUBLE:
            return
        rest = (query, key, after, *settings, out_dtype)
        assert same_bits([OPS.read(sources, *rest)], found[:1])
        update = torch.randn_like(sources[0])
        total = (sources[-1] + update).to(sources[-1].dtype)
        assert same_bits(
            OPS.read_updated(sources, update, *rest), [OPS.read([*sources[:-1], total], *rest), total.contiguous()]
        )


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "mixed", "float64"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_public_read_with_this_backend_is_that_of_the_reference(count, kind):
    out_dtype = KINDS[kind][1]
    for options in (
        {},
        {"out_scale": 2.5, "return_weights": True},
        {"return_weights": True, "return_lse": True},
        {"out_norm_weight": 1 + 0.1 * torch.randn(65, dtype=work_of(kind)), "out_norm_eps": 0.1},
    ):
        sources = requires_grad(rows(count, 65, (3, 4), kind))
        query, key, _ = requires_grad(vectors(65, dtype=work_of(kind)))
        exact, wide = [leaf(tensor) for tensor in (*sources, query, key)], dict(options)
        if "out_norm_weight" in wide:
            wide["out_norm_weight"] = wide["out_norm_weight"].double()
        found = depth_attention(sources, query, key, eps=EPS, dtype=out_dtype, backend="cpu", **options)
        expected = depth_attention(exact[:count], *exact[count:], eps=EPS, backend="reference", **wide)
        pairs = [(found, expected)] if torch.is_tensor(found) else list(zip(found, expected, strict=True))
        assert [mine is None for mine, _ in pairs] == [other is None for _, other in pairs]
        pairs = [pair for pair in pairs if pair[0] is not None]
        for mine, other in pairs:
            close(mine, other.detach(), mine.dtype, loose=3)
        upstream = [torch.randn(mine.shape).to(mine.dtype) for mine, _ in pairs]
        kept = [i for i, (mine, _) in enumerate(pairs) if mine.requires_grad]
        inputs = [*sources, query, key]
        grads = torch.autograd.grad([pairs[i][0] for i in kept], inputs, [upstream[i] for i in kept])
        live = [i for i in kept if pairs[i][1].requires_grad]
        wanted = gradients([pairs[i][1] for i in live], [upstream[i] for i in live], exact)
        for grad, reference, tensor in zip(grads, wanted, inputs, strict=True):
            # one source alone is left to autograd, which goes back through the roundings around the norm
            rounded = count == 1 and "out_norm_weight" in options
            rounding = ROUNDING[out_dtype if rounded else tensor.dtype]
            close(grad, reference, tensor.dtype, loose=10 * rounding / ROUNDING[tensor.dtype])


@pytest.mark.parametrize("kind", ["float32", "mixed", "float64"])
@pytest.mark.parametrize(
    ("given", "with_key", "with_norm"),
    [
        ((1, 0, 0), False, False),
        ((0, 1, 0), True, False),
        ((0, 0, 1), False, True),
        ((0, 1, 1), True, True),
        ((0, 0, 0), True, True),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_absent_gradients_of_a_read_count_as_zeros(kind, given, with_key, with_norm, count):
    work, out_dtype = work_of(kind), KINDS[kind][1]
    sources, (query, key, after) = rows(count, 40, (9,), kind), vectors(40, dtype=work)
    key, after = key if with_key else None, after if with_norm else None
    upstream = [torch.randn(9, 40).to(out_dtype), torch.randn(9, count).to(work), torch.randn(9).to(work)]
    upstream = [grad if there else None for grad, there in zip(upstream, given, strict=True)]
    settings = (EPS, SCALE, NORM_EPS)
    found = OPS.depth_attention_backward(*upstream, sources, query, key, after, *settings, [True] * count)
    exact = [leaf(tensor) for tensor in (*sources, query, key, after)]
    exact_sources, *rest = split(exact)
    wanted = gradients(read(exact_sources, *rest, *settings), upstream, exact)
    for grad, reference, tensor in zip(flat(found), wanted, [*sources, query, key, after], strict=True):
        if tensor is None:
            assert grad.shape == (0,)
        else:
            close(grad, reference, tensor.dtype, loose=10)


@pytest.mark.parametrize("kind", ["float32", "mixed"])
def test_gradients_nobody_needs_are_not_made_and_change_no_other(kind):
    sources, (query, key, after) = rows(5, 70, (6,), kind), vectors(70)
    upstream = (torch.randn(6, 70), torch.randn(6, 5), torch.randn(6))
    rest = (sources, query, key, after, EPS, SCALE, NORM_EPS)
    whole = OPS.depth_attention_backward(*upstream, *rest, [True] * 5)
    for mask in ([False] * 5, [False, True, False, True, True], [True] + [False] * 4):
        part = OPS.depth_attention_backward(*upstream, *rest, mask)
        for needed, mine, other in zip(mask, part[0], whole[0], strict=True):
            assert same_bits([mine], [other]) if needed else mine.shape == (0,)
        assert same_bits(part[1:], whole[1:])
    sources[2].requires_grad_()
    mixed = depth_attention(sources, query, key, backend="cpu", dtype=SINGLE)
    (grad,) = torch.autograd.grad(mixed, [sources[2]], upstream[0])
    assert grad.dtype == sources[2].dtype


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN, DOUBLE], ids=str)
def test_one_source_comes_back_bit_for_bit_with_zero_gradients_for_query_and_key_weight(dtype):
    big, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    source = torch.randn(5, 70).to(dtype)
    source[1] = big
    source[2, :6] = torch.tensor([0.0, -0.0, big, -big, tiny, -tiny / 2], dtype=dtype)
    work = DOUBLE if dtype == DOUBLE else SINGLE
    query, key, _ = vectors(70, dtype=work)
    arguments = (query * 1e20, key, None, EPS)
    mixed, weights, lse = OPS.depth_attention([source], *arguments, 1.0, NORM_EPS, dtype)
    assert same_bits([mixed], [source])
    assert torch.equal(weights, torch.ones(5, 1, dtype=work))
    assert lse.dtype == work
    for grad_weights in (None, torch.randn(5, 1, dtype=work)):
        upstream = torch.randn(5, 70).to(dtype)
        grads = OPS.depth_attention_backward(upstream, grad_weights, None, [source], *arguments, 1.0, NORM_EPS, [True])
        assert same_bits(grads[0], [upstream])
        assert torch.equal(grads[1], torch.zeros_like(query))
        assert torch.equal(grads[2], torch.zeros_like(key))
    if dtype != DOUBLE:
        assert same_bits([OPS.read([source], query * 1e20, key, None, EPS, 1.0, EPS, None)], [source])


@pytest.mark.parametrize("count", [2, 9])
def test_bfloat16_is_float32_math_rounded_once(count):
    sources, (query, key, after) = rows(count, 200, (50,), "bfloat16"), vectors(200)
    for weight in (None, after):
        settings = (query, key, weight, EPS, SCALE, NORM_EPS)
        half, wide = (OPS.depth_attention(sources, *settings, dtype) for dtype in (BRAIN, SINGLE))
        if weight is None:
            assert same_bits([half[0]], [wide[0].bfloat16()])
        assert same_bits(half[1:], wide[1:])
        exact = read(
            [s.double() for s in sources], *(None if v is None else v.double() for v in settings[:3]), *settings[3:]
        )
        close(wide[0], exact[0], SINGLE)
        upstream = torch.randn(50, 200).bfloat16()
        widened = [source.float() for source in sources]
        halves, singles = (
            OPS.depth_attention_backward(upstream, None, None, given, *settings, [True] * count)
            for given in (sources, widened)
        )
        assert same_bits(halves[0], [grad.bfloat16() for grad in singles[0]])
        assert same_bits(halves[1:], singles[1:])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("count", [1, 9])
def test_the_following_norm_is_that_of_llama_on_the_rounded_read(count, kind):
    """Both operators that have it; equal but for the order of the sum of squares, which may turn a rounding over."""
    dtype = KINDS[kind][1]
    sources, (query, key, after) = rows(count, 1000, (40,), kind), vectors(1000)
    llama = LlamaRMSNorm(1000, NORM_EPS).to(dtype)
    llama.weight.data.copy_(after)
    plain = OPS.read(sources, query, key, None, EPS, SCALE, EPS, dtype)
    expected = llama(plain).detach()
    found = OPS.read(sources, query, key, llama.weight.detach(), EPS, SCALE, NORM_EPS, dtype)
    part = partial_softmax(sources, query, key, eps=EPS, backend="cpu")
    merged = OPS.intra_block(*part, [], None, query, key, llama.weight.detach(), EPS, SCALE, NORM_EPS, dtype)[0]
    for mine in (found, merged):
        assert mine.dtype == expected.dtype == dtype
        if dtype == SINGLE:
            close(mine, expected, dtype)
            continue
        off = (mine.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
        assert off.max() <= 1 + (mine is merged)  # phase 1 may turn the rounding of the read over as well
        assert (off > 0).float().mean() < 0.02


def test_rounding_to_bfloat16_is_that_of_torch():
    """All upper halves with lower halves around the tie, through a single source."""
    lower = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    bits = (torch.arange(1 << 16)[:, None] << 16) | lower
    values = bits.to(torch.int32).view(SINGLE).reshape(-1, 64)
    rounded = OPS.depth_attention([values], torch.zeros(64), None, None, EPS, 1.0, EPS, BRAIN)[0]
    expected = values.bfloat16()
    number = ~expected.isnan()
    assert torch.equal(rounded.isnan(), ~number)
    assert torch.equal(rounded[number].view(torch.int16), expected[number].view(torch.int16))


def test_large_results_written_past_the_cache_are_whole():
    """Above 32 MiB the kernel writes around the cache."""
    for dtype, width in ((SINGLE, 4096), (BRAIN, 8192 + 64), (BRAIN, 8191)):
        base = torch.randn(2, 2100, width).to(dtype)
        sources, (query, key, _) = list(base), vectors(width)
        large = OPS.depth_attention(sources, query, key, None, EPS, 1.0, EPS, dtype)[0]
        parts = [
            OPS.read([s[a : a + 700] for s in sources], query, key, None, EPS, 1.0, EPS, None) for a in (0, 700, 1400)
        ]
        assert same_bits([large], [torch.cat(parts)])


@pytest.mark.parametrize("reach", [1.0, 20.0, 60.0, 200.0])
def test_weights_and_lse_are_accurate_over_wide_ranges_of_scores(reach):
    """One source's lse is its score as the kernel computes it, so what is left is softmax and exponential."""
    sources = [torch.randn(4000, 4) for _ in range(5)]
    query = torch.tensor([reach / 2, 0.0, 0.0, 0.0])
    scores = [OPS.depth_attention([s], query, None, None, 1e-6, 1.0, 1e-6, SINGLE)[2] for s in sources]
    scores = torch.stack(scores, -1).double()
    _, weights, lse = OPS.depth_attention(sources, query, None, None, 1e-6, 1.0, 1e-6, SINGLE)
    # the difference to the largest score is rounded once, as in any float32 softmax
    apart = (scores.float() - scores.float().amax(-1, keepdim=True)).double()
    expected = torch.exp(apart) / torch.exp(apart).sum(-1, keepdim=True)
    seen = apart > -86.9
    error = (weights.double() / expected - 1).abs()[seen].max().item()
    assert error < 5e-7
    assert (weights[~seen] < 1.1e-37).all()
    assert (lse.double() - scores.logsumexp(-1)).abs().max().item() <= 2.0**-23 * max(4.0, reach)


@pytest.mark.parametrize("size", [1e-18, 1e-9, 1e-3, 1e3, 1e9, 1e18])
def test_quiet_and_loud_rows(size):
    sources, (query, key, _) = [s * size for s in rows(4, 70, (6,))], vectors(70)
    settings = (1e-6, 1.0, 1e-6)
    inputs, exact = requires_grad([*sources, query, key]), [leaf(tensor) for tensor in (*sources, query, key)]
    found = OPS.depth_attention(inputs[:4], *inputs[4:], None, *settings, SINGLE)
    expected = read(exact[:4], *exact[4:], None, *settings)
    upstream = torch.randn(6, 70)
    grads = torch.autograd.grad(found[0], inputs, upstream)
    wanted = torch.autograd.grad(expected[0], exact, upstream.double())
    for mine, other in [*zip(found, expected, strict=True), *zip(grads, wanted, strict=True)]:
        assert torch.isfinite(mine).all()
        assert (mine.double() - other).abs().max() <= 1e-5 * other.abs().max()


def test_zero_rows_beside_others_count_as_sources():
    sources, (query, key, _) = rows(4, 70, (6,)), vectors(70)
    sources[1] = torch.zeros(6, 70)
    sources[2][3] = 0
    inputs, exact = requires_grad([*sources, query, key]), [leaf(tensor) for tensor in (*sources, query, key)]
    found = OPS.depth_attention(inputs[:4], *inputs[4:], None, EPS, 1.0, EPS, SINGLE)
    expected = read(exact[:4], *exact[4:], None, EPS, 1.0, EPS)
    for mine, other in zip(found, expected, strict=True):
        close(mine, other.detach(), SINGLE, loose=3)
    upstream = [torch.randn(value.shape) for value in found]
    for grad, other in zip(
        torch.autograd.grad(found, inputs, upstream), gradients(expected, upstream, exact), strict=True
    ):
        close(grad, other, SINGLE, loose=10)


def test_a_score_of_minus_infinity_takes_no_weight():
    sources, query = [torch.full((2, 4), 1e18), torch.zeros(2, 4)], torch.full((4,), -1e38)
    for given, others in ((sources, [0.0, 1.0]), (sources[::-1], [1.0, 0.0])):
        mixed, weights, lse = OPS.depth_attention(given, query, None, None, EPS, 1.0, EPS, SINGLE)
        assert weights.tolist() == [others] * 2
        assert torch.equal(mixed, torch.zeros(2, 4))
        assert torch.equal(lse, torch.zeros(2))


# --- two phases -----------------------------------------------------------------------------------------------------

PHASE_ONE = [
    (1, 1, 24, (7,), "float32"),
    (1, 3, 129, (7,), "bfloat16"),
    (2, 4, 1, (7,), "float64"),
    (2, 7, 64, (2, 3), "mixed"),
    (5, 6, 129, (200,), "float32"),
    (5, 4, 3, (0,), "float32"),
    (9, 5, 1000, (1,), "bfloat16"),
    (9, 8, 65, (70,), "float64"),
    (20, 2, 300, (7,), "mixed"),
    (57, 4, 24, (7,), "float32"),
]


@pytest.mark.parametrize(("count", "reads", "width", "batch", "kind"), PHASE_ONE)
def test_phase_one_and_all_its_gradients_are_those_of_the_reference(count, reads, width, batch, kind):
    work = work_of(kind)
    queries, keys, _ = vectors(width, reads, work)
    inputs = requires_grad([*rows(count, width, batch, kind), queries, keys])
    exact = [leaf(tensor) for tensor in inputs]
    found = OPS.inter_block(inputs[:count], *inputs[count:], EPS)
    expected = phase_one(exact[:count], *exact[count:], EPS)
    for value, reference in zip(found, expected, strict=True):
        close(value, reference.detach(), work, loose=3)
    upstream = [torch.randn(value.shape, dtype=work) for value in found]
    grads = torch.autograd.grad(found, inputs, upstream)
    wanted = gradients(expected, upstream, exact)
    for index, (grad, reference, tensor) in enumerate(zip(grads, wanted, inputs, strict=True)):
        close(grad, reference, tensor.dtype, loose=4 if index < count else 10)


@pytest.mark.parametrize("kind", ["float32", "mixed", "float64"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("with_keys", [True, False])
def test_phase_one_gradients_are_added_to_what_is_carried_and_may_be_absent(kind, count, with_keys):
    work, reads = work_of(kind), 6
    sources, (queries, keys, _) = rows(count, 70, (9,), kind), vectors(70, reads, work)
    keys = keys if with_keys else None
    grad_dtype = DOUBLE if work == DOUBLE else BRAIN
    grad_mixed = [None if r == 2 else torch.randn(9, 70).to(grad_dtype if r % 2 else work) for r in range(reads)]
    grad_lse = [None if r in (1, 2) else torch.randn(9, dtype=work) for r in range(reads)]
    carried = [None if i == 1 else 3 * torch.randn(9, 70, dtype=work) for i in range(count)]
    found = OPS.inter_block_backward(grad_mixed, grad_lse, sources, queries, keys, EPS, carried)
    exact = [leaf(tensor) for tensor in (*sources, queries, keys)]
    mixed, lse = phase_one(exact[:count], *exact[count:], EPS)
    wanted = gradients([*mixed.unbind(), *lse.unbind()], [*grad_mixed, *grad_lse], exact)
    wanted[:count] = [w if c is None else w + c for w, c in zip(wanted, carried, strict=False)]
    for grad, reference in zip(flat(found), wanted, strict=True):
        if reference is None:
            assert grad.shape == (0,)
        else:
            close(grad, reference, work, loose=10)
    nothing = OPS.inter_block_backward([None] * reads, [None] * reads, sources, queries, keys, EPS, carried)
    for grad, before in zip(nothing[0], carried, strict=True):
        assert torch.equal(grad, torch.zeros_like(grad) if before is None else before)
    assert all(not grad.any() for grad in nothing[1:])


# near sources, width, batch, kind, update, dtype of the phase-1 result
PHASE_TWO = [
    (0, 24, (7,), "float32", False),
    (1, 1, (7,), "float32", True),
    (1, 3, (0,), "bfloat16", True),
    (1, 64, (200,), "float32", True),
    (1, 129, (2, 3), "bfloat16", True),
    (1, 1000, (7,), "mixed", False),
    (1, 70, (7,), "float64", True),
    (3, 129, (70,), "float32", False),
    (3, 24, (1,), "float64", False),
    (3, 200, (7,), "bfloat16", True),
    (2, 65, (), "mixed", True),
]


@pytest.mark.parametrize(("count", "width", "batch", "kind", "updated"), PHASE_TWO)
@pytest.mark.parametrize("with_key", [True, False])
def test_phase_two_and_all_its_gradients_are_those_of_the_reference(count, width, batch, kind, updated, with_key):
    work, out_dtype = work_of(kind), KINDS[kind][1]
    query, key, _ = vectors(width, dtype=work)
    near = rows(count, width, batch, kind)
    mixed, lse = torch.randn(*batch, width, dtype=work), torch.randn(batch, dtype=work)
    update = torch.randn(*batch, width).to(near[-1].dtype) if updated else None
    inputs = requires_grad([mixed, lse, *near, update, query, key if with_key else None])
    exact = [leaf(tensor) for tensor in inputs]
    mixed, lse, *near = inputs[: count + 2]
    update, query, key = inputs[count + 2 :]
    found = OPS.intra_block(mixed, lse, near, update, query, key, None, EPS, SCALE, NORM_EPS, out_dtype)
    exact_near = exact[2 : count + 2]
    if updated:
        total = (near[-1] + update).detach()
        assert same_bits([found[2].detach()], [total])
        # rounding passes the gradient on as it is
        exact_total = exact_near[-1] + exact[count + 2]
        exact_near = [*exact_near[:-1], exact_total + (total.double() - exact_total.detach())]
    else:
        assert found[2].shape == (0,)
    expected = phase_two(*exact[:2], exact_near, *exact[-2:], EPS, SCALE)
    close(found[0], expected[0].detach(), out_dtype, loose=3)
    close(found[1], expected[1].detach(), work, loose=3)
    assert not found[1].requires_grad
    outputs, references = [found[0]], [expected[0]]
    if updated:
        outputs, references = [found[0], found[2]], [expected[0], exact_near[-1]]
    upstream = [torch.randn(value.shape).to(value.dtype) for value in outputs]
    present = [(tensor, other) for tensor, other in zip(inputs, exact, strict=True) if tensor is not None]
    grads = torch.autograd.grad(outputs, [tensor for tensor, _ in present], upstream, allow_unused=True)
    wanted = gradients(references, upstream, [other for _, other in present])
    for grad, reference, (tensor, _) in zip(grads, wanted, present, strict=True):
        rounded = tensor.dtype == SINGLE and out_dtype == BRAIN  # the read that the backward pass has is rounded
        close(grad, reference, tensor.dtype, loose=2.0**-7 / ROUNDING[SINGLE] if rounded else 10)


@pytest.mark.parametrize(("kind", "mixed_dtype"), [("float32", SINGLE), ("bfloat16", BRAIN), ("float64", DOUBLE)])
@pytest.mark.parametrize("count", [0, 2])
def test_phase_two_with_the_following_norm_and_a_rounded_phase_one(kind, mixed_dtype, count):
    work, out_dtype = work_of(kind), KINDS[kind][1]
    near, (query, key, after) = rows(count, 70, (9,), kind), vectors(70, dtype=work)
    mixed, lse = torch.randn(9, 70).to(mixed_dtype), torch.randn(9, dtype=work)
    found = OPS.intra_block(mixed, lse, near, None, query, key, after, EPS, SCALE, NORM_EPS, out_dtype)
    plain, _ = phase_two(
        mixed.double(), lse.double(), [s.double() for s in near], query.double(), key.double(), EPS, SCALE
    )
    close(found[0], norm(plain, after.double(), NORM_EPS), out_dtype, loose=3)
    grad = torch.randn(9, 70).to(out_dtype)
    out, weights, _ = OPS.intra_block(mixed, lse, near, None, query, key, None, EPS, SCALE, NORM_EPS, work)
    grads = OPS.intra_block_backward(grad, out, near, weights, query, key, EPS, SCALE, mixed_dtype)
    exact = [leaf(tensor) for tensor in (mixed, lse, *near, query, key)]
    expected, _ = phase_two(*exact[:2], exact[2:-2], *exact[-2:], EPS, SCALE)
    wanted = gradients([expected], [grad], exact)
    for mine, other, like in zip(flat(grads), wanted, (mixed, lse, *near, query, key), strict=True):
        close(mine, other, like.dtype, loose=10)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_public_phases_with_this_backend_are_one_read_of_the_reference(kind, grad_mode):
    work, dtype = work_of(kind), KINDS[kind][1]
    far, (partial, update) = rows(3, 70, (2, 5), kind), rows(2, 70, (2, 5), kind)
    queries, keys, after = vectors(70, 2, work)
    total = partial + update
    exact = [source.double() for source in (*far, total)]
    options = {"eps": EPS, "out_scale": SCALE, "out_norm_weight": after, "out_norm_eps": NORM_EPS}
    with torch.set_grad_enabled(grad_mode):
        queries.requires_grad_(grad_mode)
        finished = inter_block(far, queries, keys, eps=EPS, backend="cpu")
        alone = partial_softmax(far, queries[1], keys[1], eps=EPS, backend="cpu")
        part = PartialSoftmax(finished.mixed[1], finished.lse[1])
        out, summed = intra_block(part, partial, queries[1], keys[1], update=update, backend="cpu", **options)
        first = intra_block(part, None, queries[1], keys[1], dtype=dtype, backend="cpu", **options)
    for mine, other in zip(part, alone, strict=True):
        assert (mine - other).abs().max() <= 4 * ROUNDING[work]
    assert same_bits([summed.detach()], [total])
    options["out_norm_weight"] = after.double()
    wide = (queries[1].detach().double(), keys[1].double())
    close(out.detach(), depth_attention(exact, *wide, backend="reference", **options), dtype, loose=3)
    close(first.detach(), depth_attention(exact[:3], *wide, backend="reference", **options), dtype, loose=3)


# --- how tensors lie in memory --------------------------------------------------------------------------------------


def layouts(width, dtype):
    """Tensors [4, 6, width] that are not contiguous."""
    wide = torch.randn(9, 13, width + 7).to(dtype)
    deep = torch.randn(4, 6, 2 * width).to(dtype)
    return {
        "every second token": wide[:4, ::2, :width][:, :6],
        "columns": wide[2:6, 3:9, 3 : 3 + width],
        "transposed batch": wide[:6, :4, :width].transpose(0, 1),
        "every second column": deep[..., ::2],
        "width first": torch.randn(width, 4, 6).to(dtype).movedim(0, -1),
        "expanded token": torch.randn(4, 1, width).to(dtype).expand(4, 6, width),
        "expanded batch": torch.randn(6, width).to(dtype).expand(4, 6, width),
        "one row": torch.randn(width).to(dtype).expand(4, 6, width),
        "one number": torch.randn(1, 6, 1).to(dtype).expand(4, 6, width),
        "overlapping": torch.randn(61 + width).to(dtype).as_strided((4, 6, width), (5 * 3, 3, 1)),
    }


def everything(tensors, weights_grad, lse_grad, vectors_of_one, vectors_of_block, dtype):
    """Every operator with each of the tensors in each place."""
    (query, key, after), (queries, keys, _) = vectors_of_one, vectors_of_block
    settings, count, work = (EPS, SCALE, NORM_EPS), len(tensors), lse_grad.dtype
    results = [*OPS.depth_attention(tensors, query, key, after, *settings, dtype)]
    results += OPS.inter_block(tensors, queries, keys, EPS)
    carried = [tensor if tensor.dtype == work else tensor.to(work) for tensor in reversed(tensors)]
    grads = [tensors[1], tensors[2]], [lse_grad, lse_grad]
    results += flat(OPS.inter_block_backward(*grads, tensors, queries, keys, EPS, carried))
    for index, grad in enumerate(tensors):
        upstream = (grad, weights_grad, lse_grad)
        back = (tensors, query, key, after, *settings, [True] * count)
        results += flat(OPS.depth_attention_backward(*upstream, *back))
        near, update, out = [tensors[index - 1], tensors[index - 2]], tensors[index - 3], tensors[index - 4]
        results += OPS.intra_block(grad, lse_grad, near, update, query, key, after, *settings, dtype)
        back = (near, weights_grad[..., 4:6], query, key, EPS, SCALE, work)
        results += flat(OPS.intra_block_backward(grad, out, *back))
    return results


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "mixed", "float64"])
@pytest.mark.parametrize("width", [1, 64, 70])
def test_any_layout_gives_the_bits_of_contiguous_copies(kind, width):
    work, dtype = work_of(kind), KINDS[kind][1]
    vectors_of_one, vectors_of_block = vectors(width, dtype=work), vectors(width, 2, work)
    weights_grad, lse_grad = torch.randn(10, 4, 6, dtype=work).movedim(0, -1), torch.randn(6, 4, dtype=work).t()
    for source_dtype in {KINDS[kind][0][0], dtype}:
        given = list(layouts(width, source_dtype).values())
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in given]
        found = everything(given, weights_grad, lse_grad, vectors_of_one, vectors_of_block, dtype)
        wanted = everything(
            copies, weights_grad.contiguous(), lse_grad.contiguous(), vectors_of_one, vectors_of_block, dtype
        )
        assert all(tensor.is_contiguous() for tensor in found)
        assert same_bits(found, wanted)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_gradients_reach_through_views_and_sources_given_twice(kind):
    work = work_of(kind)
    query, key, _ = vectors(70, dtype=work)

    def loss(backend, base, row, query, key):
        sources = [base[:, 0], base[:, 1], base[:, 0], row.expand(5, 70), base[:, 2].flip(0), row.expand(5, 70)]
        mixed, weights, lse = depth_attention(
            sources, query, key, return_weights=True, return_lse=True, backend=backend
        )
        return (mixed * torch.arange(70)).sum() + weights[..., 1].sum() + lse.square().sum()

    inputs = requires_grad([torch.randn(5, 3, 70, dtype=work), torch.randn(70, dtype=work), query, key])
    exact = [leaf(tensor) for tensor in inputs]
    grads = torch.autograd.grad(loss("cpu", *inputs), inputs)
    wanted = torch.autograd.grad(loss("reference", *exact), exact)
    for grad, reference in zip(grads, wanted, strict=True):
        assert grad.dtype == work
        assert (grad - reference).abs().max() <= 10 * ROUNDING[work] * reference.abs().max()


def test_results_are_of_their_own():
    """No result shares memory with an input, or with another result."""
    for count in (1, 3):
        sources, (query, key, after) = rows(count, 64, (5,)), vectors(64)
        queries, keys, _ = vectors(64, 1)
        mixed, lse, update = torch.randn(5, 64), torch.randn(5), torch.randn(5, 64)
        settings = (EPS, 1.0, EPS)
        backward = (EPS, [None] * count)
        inputs = [*sources, query, key, after, queries, keys, mixed, lse, update]
        before = [tensor.clone() for tensor in inputs]
        results = flat(OPS.depth_attention(sources, query, key, None, *settings, SINGLE))
        results += [OPS.read(sources, query, key, after, *settings, None)]
        results += flat(OPS.read_updated(sources, update, query, key, None, *settings, None))
        results += flat(
            OPS.depth_attention_backward(mixed, None, None, sources, query, key, after, *settings, [True] * count)
        )
        results += flat(OPS.inter_block(sources, queries, keys, EPS))
        results += flat(OPS.inter_block_backward([mixed], [None], sources, queries, keys, *backward))
        out, weights, partial = OPS.intra_block(mixed, lse, sources, update, query, None, None, *settings, SINGLE)
        results += [out, weights, partial]
        results += flat(OPS.intra_block(mixed, lse, [], None, query, None, None, *settings, SINGLE))
        results += flat(OPS.intra_block_backward(mixed, out, sources, weights, query, key, EPS, 1.0, SINGLE))
        results = [tensor for tensor in results if tensor.numel()]
        places = {tensor.untyped_storage().data_ptr() for tensor in results}
        assert len(places) == len(results)
        assert places.isdisjoint({tensor.untyped_storage().data_ptr() for tensor in inputs})
        assert same_bits(inputs, before)


# --- rows, threads, repetition --------------------------------------------------------------------------------------


def all_operators(sources, grad, lse, vectors_of_one, vectors_of_block):
    """Per-token results of every operator, tokens along the first dimension, and the sums over tokens."""
    (query, key, after), (queries, keys, _) = vectors_of_one, vectors_of_block
    count, reads, dtype, work = len(sources), len(queries), sources[-1].dtype, lse.dtype
    settings = (EPS, SCALE, NORM_EPS)
    rows, sums = flat(OPS.depth_attention(sources, query, key, after, *settings, dtype)), []
    if work == SINGLE:
        rows.append(OPS.read(sources, query, key, None, *settings, dtype))
        rows += OPS.read_updated(sources, grad, query, key, after, *settings, dtype)
    for weight, grads in ((after, (grad, None, lse)), (None, (grad, None, None)), (after, (None, None, lse))):
        grads, *rest = OPS.depth_attention_backward(*grads, sources, query, key, weight, *settings, [True] * count)
        rows += grads
        sums += rest
    rows += [tensor.movedim(0, 1) for tensor in OPS.inter_block(sources, queries, keys, EPS)]
    carried = [grad.to(work)] * count
    grads, *rest = OPS.inter_block_backward([grad] * reads, [lse] * reads, sources, queries, keys, EPS, carried)
    rows += grads
    sums += rest
    for weight in (after, None):
        out, weights, partial = OPS.intra_block(
            sources[0].to(work), lse, sources[1:], grad.to(dtype), query, key, weight, *settings, dtype
        )
        rows += [out, weights, partial]
    *first, near, d_query, d_key = OPS.intra_block_backward(
        grad, out, sources[1:], weights, query, key, EPS, SCALE, work
    )
    return [*rows, *first, *near], [*sums, d_query, d_key]


def arguments(tokens, kind, count=4, width=70):
    work, dtype = work_of(kind), KINDS[kind][1]
    sources, grad, lse = rows(count, width, (tokens,), kind), torch.randn(tokens, width).to(dtype), torch.randn(tokens)
    return sources, grad, lse.to(work), vectors(width, dtype=work), vectors(width, 5, work)


def cut(given, chosen):
    sources, grad, lse, *rest = given
    return [source[chosen] for source in sources], grad[chosen], lse[chosen], *rest


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "mixed", "float64"])
def test_a_row_has_the_same_bits_in_whatever_chunk_it_is(kind):
    given = arguments(150, kind)
    whole, _ = all_operators(*given)
    for chosen in (slice(0, 1), slice(7, 9), slice(63, 129), slice(149, 150)):
        part, _ = all_operators(*cut(given, chosen))
        assert same_bits(part, [tensor[chosen] for tensor in whole])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["float32", "mixed", "float64"])
@pytest.mark.parametrize("place", ["source", "gradient", "lse"])
def test_a_row_with_a_nan_or_infinity_stays_alone(kind, poison, place):
    given = arguments(9, kind)
    clean, _ = all_operators(*given)
    sources, grad, lse = given[:3]
    {"source": sources[2][4], "gradient": grad[4], "lse": lse[4:5]}[place][0] = poison
    found, _ = all_operators(*given)
    others = torch.arange(9) != 4
    assert same_bits([tensor[others] for tensor in found], [tensor[others] for tensor in clean])
    assert not all(torch.isfinite(tensor[4]).all() for tensor in found)
    assert all(torch.isfinite(tensor[others]).all() for tensor in found)


def test_a_nan_in_a_source_is_seen_in_every_result_of_its_row():
    for bad in (0, 1, 2):
        sources, grad, lse, (query, key, after), _ = arguments(3, "float32", count=3)
        sources[bad][1, 69] = math.nan
        mixed, weights, log = OPS.depth_attention(sources, query, key, after, EPS, SCALE, NORM_EPS, SINGLE)
        out, near, _ = OPS.intra_block(grad, lse, sources, None, query, key, None, EPS, SCALE, NORM_EPS, SINGLE)
        for tensor in (mixed, weights, log, out, near):
            assert tensor[1].isnan().all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
def test_the_same_call_gives_the_same_bits_with_any_number_of_threads(kind):
    given = arguments(500, kind)
    once, again = all_operators(*given), all_operators(*given)
    assert same_bits(flat(once), flat(again))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert same_bits(flat(once), flat(all_operators(*given)))
    finally:
        torch.set_num_threads(threads)


def test_gradients_of_query_and_key_weight_are_summed_accurately_over_many_tokens():
    sources, grad, lse, (query, key, after), _ = arguments(5000, "float32", count=2, width=24)
    exact = [leaf(tensor) for tensor in (*sources, query, key, after)]
    upstream = [grad, None, lse]
    found = OPS.depth_attention_backward(*upstream, sources, query, key, after, EPS, SCALE, NORM_EPS, [False] * 2)
    exact_sources, *rest = split(exact)
    wanted = gradients(read(exact_sources, *rest, EPS, SCALE, NORM_EPS), upstream, exact)
    for mine, other in zip(found[1:], wanted[2:], strict=True):
        close(mine, other, SINGLE, loose=5)


# --- what PyTorch asks of an operator -------------------------------------------------------------------------------


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_of_a_read_by_finite_differences(count, with_norm):
    query, key, after = vectors(5, dtype=DOUBLE)
    inputs = requires_grad([query, key, *rows(count, 5, (3,), "float64"), *([after] if with_norm else [])])

    def run(query, key, *sources):
        *sources, after = sources if with_norm else (*sources, None)
        return OPS.depth_attention(sources, query, key, after, EPS, SCALE, NORM_EPS, DOUBLE)

    assert torch.autograd.gradcheck(run, inputs)


def test_gradients_of_the_phases_by_finite_differences():
    queries, keys, _ = vectors(5, 2, DOUBLE)
    inputs = requires_grad([*rows(3, 5, (2,), "float64"), queries, keys])
    assert torch.autograd.gradcheck(lambda *x: OPS.inter_block(x[:3], *x[3:], EPS), inputs)
    mixed, lse = torch.randn(2, 5, dtype=DOUBLE), torch.randn(2, dtype=DOUBLE)
    inputs = requires_grad([mixed, lse, *rows(3, 5, (2,), "float64"), queries[0], keys[0]])

    def run(mixed, lse, older, partial, update, query, key):
        out, _, total = OPS.intra_block(
            mixed, lse, [older, partial], update, query, key, None, EPS, SCALE, NORM_EPS, DOUBLE
        )
        return out, total

    assert torch.autograd.gradcheck(run, inputs)


def samples():
    """Calls of every operator: name and arguments."""
    settings = (EPS, SCALE, NORM_EPS)
    for kind in ("float32", "mixed", "float64"):
        work, dtype = work_of(kind), KINDS[kind][1]
        for count, batch in ((1, (3,)), (3, (2, 2)), (2, ())):
            given = rows(count, 10, batch, kind)
            sources = requires_grad(given)
            one, block = requires_grad(vectors(10, dtype=work)), requires_grad(vectors(10, 2, work))
            (query, key, after), (queries, keys, _) = one, block
            bare = [tensor.detach() for tensor in (query, key, after, queries, keys)]
            grad, lse = torch.randn(*batch, 10).to(dtype), torch.randn(batch, dtype=work)
            weights_grad = torch.randn(*batch, count, dtype=work)
            needs = [i != 1 for i in range(count)]
            if kind != "float64":
                yield "read", (given, *bare[:2], None, *settings, dtype)
                yield "read", (given, bare[0], None, bare[2], *settings, dtype)
                yield "read_updated", (given, given[-1] + 1, *bare[:3], *settings, dtype)
            yield "depth_attention", (sources, query, key, after, *settings, dtype)
            yield "depth_attention", (sources, query, None, None, *settings, dtype)
            yield "depth_attention", (given, query, key, None, *settings, dtype)
            yield "depth_attention_backward", (grad, weights_grad, lse, given, *bare[:3], *settings, needs)
            yield "depth_attention_backward", (None, None, lse, given, bare[0], None, None, *settings, needs)
            yield "inter_block", (sources, queries, keys, EPS)
            yield "inter_block", (given, queries, None, EPS)
            carried = [None, *[torch.randn(*batch, 10, dtype=work) for _ in range(count - 1)]]
            yield "inter_block_backward", ([grad, None], [None, lse], given, *bare[3:], EPS, carried)
            mixed, far = requires_grad([torch.randn(*batch, 10, dtype=work), lse])
            yield "intra_block", (mixed, far, sources, None, query, key, None, *settings, dtype)
            yield (
                "intra_block",
                (mixed, far, sources, requires_grad([given[-1]])[0], query, None, None, *settings, dtype),
            )
            yield "intra_block", (mixed.detach(), lse, [], None, *bare[:3], *settings, dtype)
            weights = torch.rand(*batch, count, dtype=work) / (count + 1)
            yield "intra_block_backward", (grad, grad, given, weights, *bare[:2], EPS, SCALE, work)


NAMES = (
    "read",
    "read_updated",
    "depth_attention",
    "depth_attention_backward",
    "inter_block",
    "inter_block_backward",
    "intra_block",
    "intra_block_backward",
)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    for _, given in [sample for sample in samples() if sample[0] == name]:
        torch.library.opcheck(getattr(OPS, name).default, given)


@pytest.mark.parametrize("name", NAMES)
def test_fake_results_have_the_shape_dtype_and_strides_of_real_ones(name):
    def mapped(argument, convert):
        if isinstance(argument, (list, tuple)):
            return [mapped(item, convert) for item in argument]
        return convert(argument) if isinstance(argument, torch.Tensor) else argument

    for _, given in [sample for sample in samples() if sample[0] == name]:
        operator = getattr(OPS, name).default
        strided = mapped(given, lambda t: torch.stack([t.detach(), t.detach()], -1)[..., 0])
        real = operator(*strided)
        with FakeTensorMode() as mode:
            fake = operator(*mapped(strided, mode.from_tensor))
        for mine, other in zip(*(flat(r if isinstance(r, tuple) else [r]) for r in (real, fake)), strict=True):
            assert (mine.shape, mine.dtype, mine.stride(), mine.device) == (
                other.shape,
                other.dtype,
                other.stride(),
                other.device,
            )


def test_a_read_keeps_its_sources_and_nothing_of_their_size():
    sources = requires_grad(rows(6, 64, (50,)))
    query, key, after = requires_grad(vectors(64))
    queries, keys, _ = requires_grad(vectors(64, 3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        for weight in (None, after):
            depth_attention(sources, query, key, out_norm_weight=weight, return_lse=True, backend="cpu")
        inter_block(sources, queries, keys, backend="cpu")
    known = {tensor.data_ptr() for tensor in (*sources, query, key, after, queries, keys)}
    assert {tensor.data_ptr() for tensor in kept} <= known


def test_a_scale_of_zero_before_the_norm_has_gradients():
    sources, (query, key, after) = rows(3, 70, (4,)), vectors(70)
    inputs = requires_grad([*sources, query, key, after])
    exact = [leaf(tensor) for tensor in inputs]
    found = OPS.depth_attention(inputs[:3], *inputs[3:], EPS, 0.0, NORM_EPS, SINGLE)[0]
    expected = read(exact[:3], *exact[3:], EPS, 0.0, NORM_EPS)[0]
    upstream = torch.randn(4, 70)
    for grad, other in zip(
        torch.autograd.grad(found, inputs, upstream), gradients([expected], [upstream], exact), strict=True
    ):
        assert torch.equal(grad.double(), other)


def test_an_operator_refuses_dtypes_that_the_kernel_does_not_have():
    """It would write past the end of its results otherwise."""
    single, double, query = [torch.ones(3, 8)] * 2, [torch.ones(3, 8, dtype=DOUBLE)] * 2, torch.ones(8)
    for sources, dtype in ((single, torch.float16), (single, DOUBLE), (double, SINGLE), (double, BRAIN)):
        with pytest.raises(RuntimeError, match="asked for a result of"):
            OPS.depth_attention(sources, query, None, None, EPS, 1.0, EPS, dtype)
        with pytest.raises(RuntimeError, match="asked for a result of"):
            OPS.intra_block(sources[0], sources[0][:, 0], sources, None, query, None, None, EPS, 1.0, EPS, dtype)
    for dtype in (torch.float16, DOUBLE):
        with pytest.raises(RuntimeError, match="asked for a result of"):
            OPS.read(single, query, None, None, EPS, 1.0, EPS, dtype)
    half = [torch.ones(3, 8, dtype=torch.float16)] * 2
    with pytest.raises(RuntimeError, match="got a tensor of"):
        OPS.depth_attention(half, query, None, None, EPS, 1.0, EPS, SINGLE)
