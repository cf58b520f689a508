"""What the tests of reads divided by columns run on the ranks."""

import torch
import torch.distributed as dist

from attnres.errors import ShapeError
from attnres.ops import depth_attention
from attnres.parallel.hidden import depth_attention_by_columns, own_columns


def draw(count, dim, dtype):
    torch.manual_seed(5)
    sources = [torch.randn(2, 3, dim, dtype=dtype) * (1 + index) for index in range(count)]
    query, weight = torch.randn(dim, dtype=dtype), torch.randn(dim, dtype=dtype)
    return sources, query, weight, torch.randn(2, 3, dim, dtype=dtype)


def read_against_operator(count, dim, dtype, with_key_weight=True, out_scale=1.0):
    """Largest error of the own columns, relative to the largest number: the result's, then each gradient's."""
    sources, query, weight, upstream = draw(count, dim, dtype)
    whole = [*sources, query, *([weight] if with_key_weight else [])]
    group = dist.group.WORLD
    own = [own_columns(tensor, group).clone().requires_grad_() for tensor in whole]
    exact = [tensor.double().requires_grad_() for tensor in whole]
    options = {"eps": 1e-3, "out_scale": out_scale}
    expected = depth_attention(exact[:count], *exact[count:], backend="reference", **options)
    found = depth_attention_by_columns(own[:count], *own[count:], dim=dim, group=group, **options)
    assert found.dtype == dtype
    expected.backward(upstream.double())
    found.backward(own_columns(upstream, group))
    pairs = [(found, expected), *((mine.grad, its.grad) for mine, its in zip(own, exact, strict=True))]
    return [worst(mine, own_columns(its, group), its) for mine, its in pairs]


def worst(found, expected, whole):
    if not found.numel():
        return 0.0
    return ((found.double() - expected).abs().max() / whole.abs().max()).item()


def read_single():
    """Whether a lone source comes out bit for bit, its gradient goes through, and the vectors get exact zeros."""
    (source,), query, weight, upstream = draw(1, 6, torch.bfloat16)
    group = dist.group.WORLD
    own = [own_columns(tensor, group).clone().requires_grad_() for tensor in (source * 1e30, query, weight)]
    found = depth_attention_by_columns(own[:1], *own[1:], dim=6, group=group)
    found.backward(own_columns(upstream, group))
    same = torch.equal(found, own[0]) and torch.equal(own[0].grad, own_columns(upstream, group))
    return same, [tensor.grad.abs().max().item() for tensor in own[1:]]


def read_and_count(count, dim):
    """Numbers in each exchange of one read, forward and backward, and sizes of what is kept for backward."""
    sources, query, weight, upstream = draw(count, dim, torch.float32)
    group = dist.group.WORLD
    own = [own_columns(tensor, group).clone().requires_grad_() for tensor in (*sources, query, weight)]
    places = {tensor.data_ptr() for tensor in own}
    sent, kept, real = [], [], dist.all_reduce
    dist.all_reduce = lambda tensor, **options: sent.append(tensor.numel()) or real(tensor, **options)
    try:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(0 if tensor.data_ptr() in places else tensor.numel()) or tensor,
            lambda tensor: tensor,
        ):
            found = depth_attention_by_columns(own[:count], *own[count:], dim=dim, group=group)
        found.backward(own_columns(upstream, group))
    finally:
        dist.all_reduce = real
    return sent, sum(kept)


def read_with_wrong_width():
    sources, query, _, _ = draw(2, 6, torch.float32)
    try:
        depth_attention_by_columns(sources, query, dim=5, group=dist.group.WORLD)
    except ShapeError as error:
        return str(error)
    return None
