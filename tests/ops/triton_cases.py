"""Cases of the Triton kernels in the interpreter; `test_triton.py` runs them in a process of its own."""

import os

import pytest
import torch

from attnres.ops.triton import launch, reduction
from attnres.ops.triton.inter_block import inter_block
from attnres.ops.triton.inter_block_backward import inter_block_backward
from attnres.ops.triton.intra_block import intra_block
from attnres.ops.triton.intra_block_backward import intra_block_backward
from attnres.ops.triton.read import depth_attention
from attnres.ops.triton.read_backward import depth_attention_backward
from attnres.ops.triton.rows import row_stride, rows_of
from attnres.ops.triton.support import implement
from attnres.testing.interpreter import repair
from ops.triton_interpreter import nan_filled
from ops.triton_reference import gradients, leaf, norm, phase_one, phase_two, read

EPS, SCALE, NORM_EPS = 1e-3, 1.75, 1e-2
SINGLE, HALF, BRAIN, DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64
ROUNDING = {SINGLE: 3e-6, HALF: 2.0**-11, BRAIN: 2.0**-8, DOUBLE: 1e-12}
KINDS = {
    "float32": (SINGLE,),
    "bfloat16": (BRAIN,),
    "float16": (HALF,),
    "float64": (DOUBLE,),
    "mixed": (SINGLE, BRAIN, HALF),
    "mixed64": (BRAIN, DOUBLE),
}
# sources, width, batch, dtypes, norm
SHAPES = [
    (1, 1, (4,), "float32", False),
    (1, 40, (2, 3), "bfloat16", True),
    (2, 3, (17,), "float16", False),
    (2, 1000, (1,), "bfloat16", True),
    (5, 40, (4,), "mixed", True),
    (4, 129, (), "float32", False),
    (5, 3, (0,), "float32", True),
    (9, 129, (2, 2), "bfloat16", False),
    (16, 1, (2,), "mixed64", True),
    (20, 129, (1,), "mixed", False),
    (57, 40, (1,), "float64", True),
]
names = [f"n{n}-d{d}-{'x'.join(map(str, b)) or 'scalar'}-{k}-{'norm' if s else 'plain'}" for n, d, b, k, s in SHAPES]
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, for the lanes that a mask hides
]


@pytest.fixture(autouse=True, scope="session")
def repaired():
    repair()


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch):
    monkeypatch.setattr(launch, "empty", nan_filled)


@pytest.fixture(params=["registers", "tiles"])
def path(request, monkeypatch):
    """Both levels of every operator: rows in registers, and the width in tiles (here for every width)."""
    if request.param == "tiles":
        monkeypatch.setattr(launch, "MAX_WIDTH", 0)
    return request.param


def rows(count, width, batch, kind="float32"):
    return [torch.randn(*batch, width).to(KINDS[kind][index % len(KINDS[kind])]) for index in range(count)]


def vectors(width, with_norm=True, reads=None):
    shape = (width,) if reads is None else (reads, width)
    return torch.randn(shape) / width**0.5, 1 + torch.randn(shape) / 2, torch.randn(width) if with_norm else None


def work_of(sources):
    return DOUBLE if any(source.dtype == DOUBLE for source in sources) else SINGLE


def close(found, expected, dtype, loose=1.0):
    """Dtype, shape and every element, relative to the largest: one rounding, plus that of the working dtype."""
    assert found.dtype == dtype
    assert found.shape == expected.shape
    if expected.numel():
        assert torch.isfinite(found).all()
        largest = expected.abs().max().item() + 1e-6
        assert (found.double() - expected).abs().max().item() <= loose * ROUNDING[dtype] * largest


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def flat(outputs):
    return [t for item in outputs for t in (item if isinstance(item, (list, tuple)) else [item])]


# --- one read -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "width", "batch", "kind", "with_norm"), SHAPES, ids=names)
def test_read_and_gradients_are_those_of_the_reference(path, count, width, batch, kind, with_norm):
    sources, (query, key, weight) = rows(count, width, batch, kind), vectors(width, with_norm)
    work = work_of(sources)
    out_dtype = KINDS[kind][0]
    settings = (EPS, SCALE, NORM_EPS)
    found = depth_attention(sources, query, key, weight, *settings, out_dtype)
    inputs = [leaf(source) for source in sources]
    exact = [leaf(query), leaf(key), leaf(weight)]
    expected = read(inputs, *exact, *settings)
    for value, reference, dtype in zip(found, expected, (out_dtype, work, work), strict=True):
        close(value, reference.detach(), dtype, loose=3)
    upstream = [torch.randn(*batch, width).to(out_dtype), torch.randn(*batch, count), torch.randn(batch)]
    upstream[1:] = [grad.to(work) for grad in upstream[1:]]
    grads, *rest = depth_attention_backward(*upstream, sources, query, key, weight, *settings, [True] * count)
    wanted = gradients(expected, upstream, [*inputs, *exact])
    for value, reference, source in zip(grads, wanted, sources, strict=False):
        close(value, reference, source.dtype, loose=3)
    for value, reference in zip(rest, wanted[count:], strict=True):
        if reference is None:
            assert value.numel() == 0
        else:
            close(value, reference, SINGLE, loose=10)


@pytest.mark.parametrize(
    ("given", "with_key"),
    [((1, 0, 0), False), ((0, 1, 0), True), ((0, 0, 1), False), ((0, 1, 1), True), ((0, 0, 0), True)],
)
def test_read_gradients_that_are_absent_count_as_zeros(path, given, with_key):
    sources, (query, key, weight) = rows(3, 40, (2,)), vectors(40)
    key = key if with_key else None
    upstream = [torch.randn(2, 40), torch.randn(2, 3), torch.randn(2)]
    upstream = [grad if there else None for grad, there in zip(upstream, given, strict=True)]
    settings = (EPS, SCALE, NORM_EPS)
    grads, *rest = depth_attention_backward(*upstream, sources, query, key, weight, *settings, [True] * 3)
    inputs = [leaf(tensor) for tensor in (*sources, query, key, weight)]
    wanted = gradients(read(inputs[:3], *inputs[3:], *settings), upstream, inputs)
    for value, reference in zip([*grads, *rest], wanted, strict=True):
        if reference is None:
            assert value.numel() == 0
        else:
            close(value, reference, SINGLE, loose=10)


@pytest.mark.parametrize(("count", "needs"), [(3, "some"), (3, "none"), (17, "some")])
def test_read_gradients_nobody_needs_are_not_made_and_change_no_other(path, count, needs):
    sources, (query, key, weight) = rows(count, 24, (1,), "mixed"), vectors(24)
    mask = [needs == "some" and index % 3 == 1 for index in range(count)]
    upstream = (torch.randn(1, 24), None, None)
    whole = depth_attention_backward(*upstream, sources, query, key, weight, EPS, SCALE, NORM_EPS, [True] * count)
    part = depth_attention_backward(*upstream, sources, query, key, weight, EPS, SCALE, NORM_EPS, mask)
    for needed, mine, other in zip(mask, part[0], whole[0], strict=True):
        assert same_bits(mine, other) if needed else mine.numel() == 0
    assert all(same_bits(mine, other) for mine, other in zip(part[1:], whole[1:], strict=True))


def test_a_single_source_is_returned_bit_for_bit_whatever_its_score(path):
    source = torch.tensor([[-0.0, 1e30, -3e30], [0.0, -0.0, 1e-40]])
    query = torch.full((3,), 1e20)
    mixed, weights, _ = depth_attention([source], query, None, None, EPS, 1.0, NORM_EPS, SINGLE)
    assert same_bits(mixed, source)
    assert torch.equal(weights, torch.ones(2, 1))
    upstream = torch.randn(2, 3)
    grads, grad_query, _, _ = depth_attention_backward(
        upstream, torch.randn(2, 1), None, [source], query, None, None, EPS, 1.0, NORM_EPS, [True]
    )
    assert torch.equal(grads[0], upstream)
    assert torch.equal(grad_query, torch.zeros(3))


@pytest.mark.parametrize("size", [1e4, 1e-4, 0.0])
def test_loud_quiet_and_zero_rows(path, size):
    sources, (query, key, _) = [x * size for x in rows(3, 129, (3,))], vectors(129)
    settings = (1e-6, 1.0, 1e-6)
    mixed, weights, lse = depth_attention(sources, query, key, None, *settings, SINGLE)
    inputs = [leaf(tensor) for tensor in (*sources, query, key)]
    expected = read(inputs[:3], *inputs[3:], None, *settings)
    for value, reference in zip((mixed, weights, lse), expected, strict=True):
        assert (value.double() - reference).abs().max() <= 2e-5 * (reference.abs().max() + 1e-30)
    upstream = torch.randn(3, 129)
    grads, *rest = depth_attention_backward(upstream, None, None, sources, query, key, None, *settings, [True] * 3)
    wanted = gradients(expected, [upstream, None, None], inputs)
    for value, reference in zip([*grads, *rest[:2]], wanted, strict=True):
        close(value, reference, SINGLE, loose=30)


@pytest.mark.parametrize(("poison", "count"), [(float("nan"), 3), (float("inf"), 3), (float("nan"), 17)])
def test_a_bad_token_stays_alone(path, poison, count):
    sources, (query, key, weight) = rows(count, 24, (2,)), vectors(24)
    bad = [source.clone() for source in sources]
    bad[count - 2][1, 5] = poison
    others = [0]
    clean = flat(depth_attention(sources, query, key, weight, EPS, SCALE, NORM_EPS, SINGLE))
    found = flat(depth_attention(bad, query, key, weight, EPS, SCALE, NORM_EPS, SINGLE))
    upstream = (torch.randn(2, 24), None, None)
    arguments = (query, key, weight, EPS, SCALE, NORM_EPS, [True] * count)
    clean += depth_attention_backward(*upstream, sources, *arguments)[0]
    found += depth_attention_backward(*upstream, bad, *arguments)[0]
    assert all(same_bits(mine[others], other[others]) for mine, other in zip(found, clean, strict=True))
    assert not torch.isfinite(found[0][1]).all()


def test_a_score_of_minus_infinity_takes_no_weight(path):
    sources, query = [torch.full((2, 4), 1e18), torch.zeros(2, 4)], torch.full((4,), -1e38)
    for given, others in ((sources, [0.0, 1.0]), (sources[::-1], [1.0, 0.0])):
        mixed, weights, lse = depth_attention(given, query, None, None, EPS, 1.0, NORM_EPS, SINGLE)
        assert weights.tolist() == [others] * 2
        assert torch.equal(mixed, torch.zeros(2, 4))
        assert torch.equal(lse, torch.zeros(2))


def test_the_same_call_twice_gives_the_same_bits(path):
    sources, (query, key, weight) = rows(5, 40, (4,), "mixed"), vectors(40)
    upstream = (torch.randn(4, 40), torch.randn(4, 5), torch.randn(4))
    arguments = (sources, query, key, weight, EPS, SCALE, NORM_EPS)
    once = flat(depth_attention_backward(*upstream, *arguments, [True] * 5))
    again = flat(depth_attention_backward(*upstream, *arguments, [True] * 5))
    assert all(same_bits(mine, other) for mine, other in zip(once, again, strict=True))


def test_a_chunk_of_tokens_gives_the_bits_of_the_whole(path):
    sources, (query, key, weight) = rows(3, 40, (7,)), vectors(40)
    whole = depth_attention(sources, query, key, weight, EPS, SCALE, NORM_EPS, SINGLE)
    part = depth_attention([s[5:6] for s in sources], query, key, weight, EPS, SCALE, NORM_EPS, SINGLE)
    assert all(same_bits(mine, other[5:6]) for mine, other in zip(part, whole, strict=True))


@pytest.mark.parametrize("programs", [0, 1, 33, 70])
def test_partial_sums_of_any_number_of_programs_are_added(programs):
    partials, query, key = torch.randn(programs, 2, 50), torch.randn(2, 50), torch.randn(2, 50)
    expected = partials.double().sum(dim=0)
    close(reduction.total(partials, query), expected, SINGLE)
    grad_query, grad_key = reduction.unfolded(partials, query.half(), key)
    close(grad_query, expected * key, HALF)
    close(grad_key, expected * query.half().double(), SINGLE)


# --- how sources lie in memory ---------------------------------------------------------------------------------------


def layouts(width):
    base = torch.randn(6, 4, width)
    return {
        "every second row": [base[::2, 0], base[1::2, 0]],
        "expanded": [base[:1, 0].expand(3, width), base[:3, 1]],
        "one column in": [torch.randn(3, width + 1)[:, 1:], torch.randn(3, width + 3)[:, 2:-1]],
        "transposed batch": [base.transpose(0, 1)[:2, :3], base[:2, :3]],
        "transposed width": [torch.randn(width, 3).t(), torch.randn(3, width)],
        "the same tensor": [base[0], base[0], base[1]],
        "many, strided": [base[::3, index % 4] for index in range(18)],
        "odd strides and dtypes": [torch.randn(3, width + 5)[:, 3:-2].bfloat16()[:, :], base[:3, 0].double()],
    }


@pytest.mark.parametrize(
    ("name", "width"),
    [*((name, 24) for name in layouts(1)), ("expanded", 1), ("one column in", 1), ("one column in", 40)],
)
def test_a_source_is_read_where_it_lies(path, name, width):
    sources, (query, key, _) = layouts(width)[name], vectors(width)
    batch, count = sources[0].shape[:-1], len(sources)
    copies = [source.clone(memory_format=torch.contiguous_format) for source in sources]
    upstream = (torch.randn(*batch, width), None, None)
    results = [
        flat(depth_attention(given, query, key, None, EPS, SCALE, NORM_EPS, SINGLE))
        + flat(depth_attention_backward(*upstream, given, query, key, None, EPS, SCALE, NORM_EPS, [True] * count))
        + flat(inter_block(given, query[None], key[None], EPS))
        for given in (sources, copies)
    ]
    assert all(same_bits(mine, other) for mine, other in zip(*results, strict=True))
    assert all(torch.isfinite(value).all() for value in results[0])


def test_rows_are_addressed_and_not_copied_where_they_have_one_stride():
    base = torch.randn(6, 4, 8)
    assert row_stride(base) == 8
    assert row_stride(base[:, 1]) == 32
    assert row_stride(base[:, ::2]) == 16
    assert row_stride(base.transpose(0, 1)) is None
    assert row_stride(base[..., ::2]) is None
    assert row_stride(base[:1, 1].expand(5, 8)) == 0
    assert rows_of([base[:, 1]]).tensors[0].data_ptr() == base[:, 1].data_ptr()


def test_few_sources_go_without_a_table_and_many_or_odd_ones_through_it():
    few, odd = rows(16, 8, (3,)), [torch.randn(3, 9)[:, 1:]]
    assert rows_of(few).few == 16
    assert rows_of(few[:5]).few == 8
    assert rows_of([*few, few[0]]).few == 0
    assert rows_of(odd).few == 0
    table = rows_of([*few, few[0]]).table()
    assert table[0].tolist() == [source.data_ptr() for source in (*few, few[0])]
    assert table[1].tolist() == [32] * 17
    assert rows_of([torch.randn(2, 8, dtype=BRAIN), None]).table()[2].tolist() == [1, 4]
    assert rows_of(few * 9).table()[0].tolist() == [source.data_ptr() for source in few * 9]


# --- phase 1 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reads", "count", "width", "batch", "kind"),
    [
        (3, 1, 3, (3,), "float32"),
        (2, 2, 129, (2, 2), "bfloat16"),
        (5, 5, 40, (2,), "mixed"),
        (1, 9, 1000, (1,), "float32"),
        (5, 20, 24, (1,), "mixed64"),
        (1, 17, 40, (2,), "bfloat16"),
        (2, 3, 8, (0,), "float32"),
    ],
)
def test_phase_one_and_gradients_are_those_of_the_reference(path, reads, count, width, batch, kind):
    sources, (queries, keys, _) = rows(count, width, batch, kind), vectors(width, reads=reads)
    work = work_of(sources)
    found = inter_block(sources, queries, keys, EPS)
    inputs = [leaf(tensor) for tensor in (*sources, queries, keys)]
    expected = phase_one(inputs[:count], *inputs[count:], EPS)
    for value, reference in zip(found, expected, strict=True):
        close(value, reference.detach(), work, loose=3)
    mixed = [torch.randn(*batch, width).to((SINGLE, BRAIN)[index % 2]) for index in range(reads)]
    lse = [torch.randn(batch, dtype=work) for _ in range(reads)]
    carried = [torch.randn(*batch, width, dtype=work) if index % 2 else None for index in range(count)]
    grads, *rest = inter_block_backward(mixed, lse, sources, queries, keys, EPS, carried)
    wanted = gradients(expected, [torch.stack([m.double() for m in mixed]), torch.stack(lse)], inputs)
    for value, reference, more in zip(grads, wanted, carried, strict=False):
        close(value, reference if more is None else reference + more, work, loose=5)
    for value, reference in zip(rest, wanted[count:], strict=True):
        close(value, reference, SINGLE, loose=10)


@pytest.mark.parametrize("given", ["some", "none", "strided"])
def test_phase_one_gradients_that_are_absent_count_as_zeros(given):
    count, width, reads = 3, 24, 4
    sources, (queries, _, _) = rows(count, width, (2,)), vectors(width, reads=reads)
    mixed = {
        "some": [None, torch.randn(2, width), None, torch.randn(2, width)],
        "none": [None] * reads,
        "strided": [torch.randn(width, 2).t(), torch.randn(2, 1).expand(2, width), torch.randn(4, width)[::2], None],
    }[given]
    lse = [torch.randn(2) if given == "some" and index > 1 else None for index in range(reads)]
    grads, grad_queries, grad_keys = inter_block_backward(mixed, lse, sources, queries, None, EPS, [None] * count)
    inputs = [leaf(tensor) for tensor in (*sources, queries)]
    upstream = [
        torch.stack([torch.zeros(2, width) if one is None else one for one in mixed]),
        torch.stack([torch.zeros(2) if one is None else one for one in lse]),
    ]
    wanted = gradients(phase_one(inputs[:count], inputs[count], None, EPS), upstream, inputs)
    assert grad_keys.numel() == 0
    for value, reference in zip([*grads, grad_queries], wanted, strict=True):
        close(value, reference, SINGLE, loose=10)


def test_phase_one_twice_gives_the_same_bits_and_a_bad_token_stays_alone(path):
    sources, (queries, keys, _) = rows(3, 24, (4,)), vectors(24, reads=3)
    bad = [source.clone() for source in sources]
    bad[1][2] = float("nan")
    others, mixed = [0, 1, 3], [torch.randn(4, 24) for _ in range(3)]

    def run(given):
        backward = inter_block_backward(mixed, [None] * 3, given, queries, keys, EPS, [None] * 3)
        return [*inter_block(given, queries, keys, EPS), *flat(backward)]

    once, again, spoilt = run(sources), run(sources), run(bad)
    assert all(same_bits(mine, other) for mine, other in zip(once, again, strict=True))
    assert all(same_bits(mine[:, others], other[:, others]) for mine, other in zip(spoilt[:2], once[:2], strict=True))
    assert all(same_bits(mine[others], other[others]) for mine, other in zip(spoilt[2:5], once[2:5], strict=True))


# --- phase 2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_update", [False, True])
@pytest.mark.parametrize(
    ("count", "width", "batch", "kind", "mixed_dtype", "with_norm"),
    [
        (0, 24, (3,), "float32", SINGLE, True),
        (1, 1, (4,), "float32", SINGLE, False),
        (1, 129, (2, 2), "bfloat16", SINGLE, True),
        (2, 40, (4,), "mixed", BRAIN, True),
        (3, 1000, (1,), "bfloat16", SINGLE, False),
        (18, 24, (1,), "float64", DOUBLE, True),
        (1, 24, (0,), "float32", SINGLE, True),
    ],
)
def test_phase_two_and_gradients_are_those_of_the_reference(
    path, with_update, count, width, batch, kind, mixed_dtype, with_norm
):
    if with_update and count == 0:
        pytest.skip("an update needs a partial sum")
    near, (query, key, weight) = rows(count, width, batch, kind), vectors(width, with_norm)
    work = DOUBLE if mixed_dtype == DOUBLE else SINGLE
    mixed, lse = torch.randn(*batch, width).to(mixed_dtype), torch.randn(batch, dtype=work)
    update = torch.randn(*batch, width).to(BRAIN) if with_update else None
    out_dtype = KINDS[kind][0]
    arguments = (mixed, lse, near, update, query, key, weight, EPS, SCALE, NORM_EPS, out_dtype)
    out, weights, partial = intra_block(*arguments)
    if update is None:
        assert partial.numel() == 0
    else:
        rounded = (near[-1].to(work) + update.to(work)).to(near[-1].dtype)
        assert same_bits(partial, rounded)
        near = [*near[:-1], rounded]
    inputs = [leaf(tensor) for tensor in (mixed, lse, *near, query, key)]
    expected = phase_two(inputs[0], inputs[1], inputs[2:-2], *inputs[-2:], EPS, SCALE)
    close(out, norm(expected[0], None if weight is None else weight.double(), NORM_EPS).detach(), out_dtype, loose=3)
    close(weights, expected[1].detach(), work, loose=3)
    upstream, plain = torch.randn(*batch, width, dtype=work), expected[0].detach().to(work)
    found = intra_block_backward(upstream, plain, near, weights, query, key, EPS, SCALE, mixed_dtype)
    found = [found[0], found[1], *found[2], *found[3:]]
    wanted = gradients(expected, [upstream, None], inputs)
    dtypes = [mixed_dtype, work, *(source.dtype for source in near), SINGLE, SINGLE]
    for value, reference, dtype in zip(found, wanted, dtypes, strict=True):
        close(value, reference, dtype, loose=10)


def test_phase_two_reads_the_rounded_partial_sum_and_a_bad_token_stays_alone(path):
    near, (query, key, weight) = rows(2, 24, (4,), "bfloat16"), vectors(24)
    mixed, lse, update = torch.randn(4, 24), torch.randn(4), torch.randn(4, 24)
    settings = (query, key, weight, EPS, SCALE, NORM_EPS, SINGLE)
    out, weights, partial = intra_block(mixed, lse, near, update, *settings)
    again, same_weights, _ = intra_block(mixed, lse, [near[0], partial], None, *settings)
    assert same_bits(out, again)
    assert same_bits(weights, same_weights)
    bad = update.clone()
    bad[1] = float("nan")
    others = [0, 2, 3]
    spoilt = intra_block(mixed, lse, near, bad, *settings)
    assert all(
        same_bits(mine[others], other[others]) for mine, other in zip(spoilt, (out, weights, partial), strict=True)
    )


def test_phase_two_gradients_twice_give_the_same_bits(path):
    near, (query, key, _) = rows(2, 24, (4,), "bfloat16"), vectors(24)
    arguments = (torch.randn(4, 24), torch.randn(4, 24), near, torch.rand(4, 2) / 2, query, key, EPS, SCALE, SINGLE)
    once, again = flat(intra_block_backward(*arguments)), flat(intra_block_backward(*arguments))
    assert all(same_bits(mine, other) for mine, other in zip(once, again, strict=True))


# --- as PyTorch operators --------------------------------------------------------------------------------------------


def test_registered_operators_differentiate_and_agree_with_their_fakes():
    library = implement("CPU")
    try:
        sources = [torch.randn(2, 2, 24, requires_grad=True) for _ in range(3)]
        query, key = (tensor.requires_grad_() for tensor in vectors(24)[:2])
        arguments = (sources, query, key, None, EPS, SCALE, NORM_EPS, SINGLE)
        mixed, weights, lse = torch.ops.attnres.depth_attention(*arguments)
        upstream = [torch.randn_like(mixed), torch.randn_like(weights), torch.randn_like(lse)]
        inputs = [*sources, query, key]
        found = torch.autograd.grad([mixed, weights, lse], inputs, upstream)
        exact = [leaf(tensor) for tensor in inputs]
        wanted = gradients(read(exact[:3], exact[3], exact[4], None, EPS, SCALE, NORM_EPS), upstream, exact)
        for value, reference in zip(found, wanted, strict=True):
            close(value, reference, SINGLE, loose=10)
        tests = ("test_schema", "test_faketensor")
        queries, plain = torch.stack([query.detach()] * 2), [source.detach() for source in sources]
        part, part_lse = torch.ops.attnres.inter_block(plain, queries, None, EPS)
        torch.library.opcheck(torch.ops.attnres.depth_attention, arguments, test_utils=tests)
        torch.library.opcheck(torch.ops.attnres.inter_block, (plain, queries, None, EPS), test_utils=tests)
        near = (part[0], part_lse[0], plain[:1], plain[1], query.detach(), None, None, EPS, SCALE, NORM_EPS, BRAIN)
        torch.library.opcheck(torch.ops.attnres.intra_block, near, test_utils=tests)
    finally:
        library._destroy()


@pytest.mark.parametrize("dtype", [None, BRAIN])
@pytest.mark.parametrize("with_norm", [False, True])
def test_registered_reads_for_inference_are_the_same_reads(with_norm, dtype):
    library = implement("CPU")
    try:
        sources, update = [torch.randn(2, 5, 24) for _ in range(3)], torch.randn(2, 5, 24)
        query, key, norm_weight = vectors(24)
        settings = (query, key, norm_weight if with_norm else None, EPS, SCALE, NORM_EPS)
        expected = torch.ops.attnres.depth_attention(sources, *settings, dtype or SINGLE)[0]
        assert torch.equal(torch.ops.attnres.read(sources, *settings, dtype), expected)
        total = sources[-1] + update
        mixed, updated = torch.ops.attnres.read_updated(sources, update, *settings, dtype)
        assert torch.equal(updated, total)
        assert torch.equal(mixed, torch.ops.attnres.read([*sources[:-1], total], *settings, dtype))
    finally:
        library._destroy()
