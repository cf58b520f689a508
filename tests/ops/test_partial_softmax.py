import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.errors import ShapeError
from attnres.ops import PartialSoftmax, depth_attention, inter_block, intra_block, partial_softmax
from peers import direct_read

EPS, DIM = 1e-5, 16
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def random_block(reads, finished, tokens=5):
    sources = [torch.randn(tokens, DIM, dtype=torch.float64) * 3**i for i in range(finished)]
    queries = torch.randn(reads, DIM, dtype=torch.float64)
    weights = 1 + 0.3 * torch.randn(reads, DIM, dtype=torch.float64)
    return sources, queries, weights


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_any_split_merges_to_the_direct_softmax(sizes, seed):
    torch.manual_seed(seed)
    sources, queries, weights = random_block(1, sum(sizes))
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    parts = [partial_softmax(sources[a:b], queries[0], weights[0], eps=EPS) for a, b in itertools.pairwise(bounds)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    read = depth_attention(sources, queries[0], weights[0], eps=EPS, return_lse=True)
    torch.testing.assert_close(merged.mixed, direct_read(sources, queries[0], weights[0], EPS), **EXACT)
    torch.testing.assert_close(merged.lse, read.lse, **EXACT)


def test_merge_does_not_care_about_order():
    sources, queries, _ = random_block(1, 3)
    a, b, c = (partial_softmax([source], queries[0]) for source in sources)
    for left, right in ((a.merge(b), b.merge(a)), (a.merge(b).merge(c), a.merge(b.merge(c)))):
        torch.testing.assert_close(left, right, **EXACT)


@pytest.mark.parametrize("gap", [1e3, 1e30], ids=str)
def test_merge_survives_scores_far_apart(gap):
    one, other = torch.ones(2, DIM), 2 * torch.ones(2, DIM)
    low, high = PartialSoftmax(one, torch.full((2,), -gap)), PartialSoftmax(other, torch.full((2,), gap))
    assert torch.equal(low.merge(high).mixed, other)
    assert torch.equal(high.merge(low).mixed, other)


@pytest.mark.parametrize("reads", [1, 2, 6])
@pytest.mark.parametrize("finished", [1, 2, 8])
def test_two_phases_equal_the_direct_softmax_for_each_reads_own_key_weight(reads, finished):
    sources, queries, weights = random_block(reads, finished)
    partial = torch.randn(5, DIM, dtype=torch.float64)
    phase1 = inter_block(sources, queries, weights, eps=EPS)
    assert phase1.mixed.shape == (reads, 5, DIM)
    assert phase1.lse.shape == (reads, 5)
    for i in range(reads):
        part = PartialSoftmax(phase1.mixed[i], phase1.lse[i])
        first = intra_block(part, None, queries[i], weights[i], eps=EPS, dtype=torch.float64)
        later = intra_block(part, partial, queries[i], weights[i], eps=EPS)
        torch.testing.assert_close(first, direct_read(sources, queries[i], weights[i], EPS), **EXACT)
        torch.testing.assert_close(later, direct_read([*sources, partial], queries[i], weights[i], EPS), **EXACT)


def test_two_phases_have_the_gradients_of_the_direct_read():
    sources, queries, weights = random_block(3, 4)
    leaves = [t.requires_grad_() for t in (*sources, torch.randn(5, DIM, dtype=torch.float64), queries, weights)]
    *sources, partial, queries, weights = leaves
    grads = torch.randn(3, 5, DIM, dtype=torch.float64)
    phase1 = inter_block(sources, queries, weights, eps=EPS)
    two = [
        intra_block(PartialSoftmax(phase1.mixed[i], phase1.lse[i]), partial, queries[i], weights[i], eps=EPS)
        for i in range(3)
    ]
    one = [depth_attention([*sources, partial], queries[i], weights[i], eps=EPS) for i in range(3)]
    for mine, other in zip(
        torch.autograd.grad(two, leaves, list(grads)), torch.autograd.grad(one, leaves, list(grads)), strict=True
    ):
        torch.testing.assert_close(mine, other, **EXACT)


def test_phase_one_keeps_float32_for_bfloat16_sources_and_phase_two_rounds_once():
    sources = [torch.randn(40, DIM).bfloat16() for _ in range(4)]
    query, weight = torch.randn(DIM).bfloat16(), torch.ones(DIM).bfloat16()
    part = partial_softmax(sources[:3], query, weight, eps=EPS)
    assert part.mixed.dtype == part.lse.dtype == torch.float32
    read = intra_block(part, sources[3], query, weight, eps=EPS, out_scale=4.0)
    direct = depth_attention(sources, query, weight, eps=EPS, out_scale=4.0)
    assert read.dtype == torch.bfloat16
    torch.testing.assert_close(read, direct, rtol=2**-7, atol=1e-6)


def test_phase_one_rows_are_bitwise_token_local():
    sources = [torch.randn(33, DIM) for _ in range(3)]
    queries = torch.randn(4, DIM)
    whole = inter_block(sources, queries)
    halves = [inter_block([s[a:b] for s in sources], queries) for a, b in ((0, 7), (7, 33))]
    assert torch.equal(torch.cat([half.mixed for half in halves], 1), whole.mixed)
    assert torch.equal(torch.cat([half.lse for half in halves], 1), whole.lse)


def test_bad_input_gets_one_clear_line():
    source, query = torch.zeros(2, DIM), torch.zeros(DIM)
    with pytest.raises(ShapeError, match=r"\(16,\) and None; both are \[reads, dim\]"):
        inter_block([source], query)
    with pytest.raises(ShapeError, match="got 0 sources"):
        inter_block([], query[None])
    with pytest.raises(ShapeError, match="declare the result's"):
        intra_block(partial_softmax([source], query), None, query)
