"""Depth attention under torch.compile: no graph breaks, one compile per number of sources, the bits of eager.

The CPU kernel runs where there is one, as for everyone who compiles a model; without it the reference is compiled.
"""

import re

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from attnres.ops import backends, cpu, depth_attention, inter_block, intra_block

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
COUNTS = [1, 2, 5, 9, 20, 57]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def kernel():
    if reason := cpu.problem():
        pytest.skip(reason)


def read(sources, query, key):
    return depth_attention(sources, query, key, eps=1e-5, out_scale=1.5)


def inputs(count, tokens=6, dtype=torch.float32, width=40):
    sources = [torch.randn(tokens, width).to(dtype).requires_grad_() for _ in range(count)]
    return sources, torch.randn(width).requires_grad_(), torch.randn(width).requires_grad_()


def both_ways(function, sources, query, key):
    """Value and all gradients."""
    mixed = function(sources, query, key)
    upstream = torch.linspace(-1, 1, mixed.numel()).reshape(mixed.shape).to(mixed.dtype)
    return [mixed.detach(), *torch.autograd.grad(mixed, [*sources, query, key], upstream)]


def same_bits(left, right):
    return all(mine.dtype == other.dtype and torch.equal(mine, other) for mine, other in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_graphs_with_the_bits_of_eager_and_one_compile_per_number_of_sources(kernel, dtype):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(read, backend=counter, fullgraph=True)
    for compiles, count in enumerate(COUNTS, start=1):
        given = inputs(count, dtype=dtype)
        assert same_bits(both_ways(compiled, *given), both_ways(read, *given))
        assert counter.frame_count == compiles
    assert not torch._dynamo.utils.counters["graph_break"]
    for count in COUNTS:
        both_ways(compiled, *inputs(count, dtype=dtype))
    assert counter.frame_count == len(COUNTS)


def test_token_counts_may_change_without_a_storm_of_compiles(kernel):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(read, backend=counter, fullgraph=True)
    for tokens in (6, 8, 31, 2, 100, 7, 64):
        given = inputs(5, tokens)
        assert same_bits(both_ways(compiled, *given), both_ways(read, *given))
    assert counter.frame_count <= 2
    marked = torch.compile(read, backend=(counter := CompileCounter()), fullgraph=True, dynamic=True)
    for tokens in (6, 8, 31, 2):
        marked(*inputs(5, tokens))
    assert counter.frame_count == 1


def test_inference_and_training_each_compile_once(kernel):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(read, backend=counter, fullgraph=True)
    given = inputs(4)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(compiled(*given), read(*given))
        assert torch.equal(compiled(*given), read(*given))
    assert counter.frame_count == 2


def test_the_kernel_is_one_operator_in_the_graph(kernel):
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph

    torch.compile(read, backend=keep, fullgraph=True)(*inputs(9))
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    ours = [target for target in called if "attnres" in str(target)]
    assert ours == [torch.ops.attnres.depth_attention.default]
    assert not [target for target in called if "aten" in str(target)]


@pytest.mark.parametrize(
    "options", [{"return_weights": True}, {"return_lse": True}, {"out_norm_weight": torch.ones(40)}]
)
def test_everything_that_can_be_asked_for_compiles_whole(kernel, options):
    def ask(sources, query, key):
        result = depth_attention(sources, query, key, **options)
        return result if isinstance(result, torch.Tensor) else torch.cat([t.flatten() for t in result if t is not None])

    given = inputs(3)
    assert same_bits(both_ways(torch.compile(ask, backend="aot_eager", fullgraph=True), *given), both_ways(ask, *given))


def test_both_phases_compile_whole_with_the_bits_of_eager(kernel):
    def two_phases(sources, query, key):
        *far, partial, update = sources
        finished = inter_block(far, torch.stack([query, 2 * query]), torch.stack([key, key]))
        first = type(finished)(finished.mixed[0], finished.lse[0])
        second = type(finished)(finished.mixed[1], finished.lse[1])
        out, total = intra_block(first, partial, query, key, update=update)
        return out + intra_block(second, total, query, key, out_norm_weight=key)

    given = inputs(6)
    compiled = torch.compile(two_phases, backend="aot_eager", fullgraph=True)
    assert same_bits(both_ways(compiled, *given), both_ways(two_phases, *given))
    with torch.no_grad():
        assert torch.equal(compiled(*given), two_phases(*given))


def add_read_and_norm(sources, query, key):
    """Two results in one tensor, so that `both_ways` takes it."""
    *sources, update = sources
    options = {"out_scale": 1.5, "out_norm_weight": key, "out_norm_eps": 1e-3, "update": update}
    return torch.cat(depth_attention(sources, query, key, eps=1e-5, **options))


def test_add_read_and_norm_compile_whole_with_the_bits_of_eager(kernel):
    compiled = torch.compile(add_read_and_norm, backend="aot_eager", fullgraph=True)
    given = inputs(6)
    assert same_bits(both_ways(compiled, *given), both_ways(add_read_and_norm, *given))
    with torch.no_grad():
        assert torch.equal(compiled(*given), add_read_and_norm(*given))


@pytest.mark.parametrize(("function", "name"), [(read, "read"), (add_read_and_norm, "read_updated")])
def test_inference_is_one_operator_in_the_graph_before_and_after_an_eager_read(kernel, monkeypatch, function, name):
    for said in (set(), {"cpu"}):
        monkeypatch.setattr(backends, "_said", said)
        graphs = []

        def keep(graph, example, graphs=graphs):
            graphs.append(graph)
            return graph

        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(function, backend=keep, fullgraph=True)(*inputs(6))
        targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
        assert [target for target in targets if "attnres" in str(target)] == [getattr(torch.ops.attnres, name).default]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_backend_asked_for_and_float64_compile_whole(backend):
    def ask(sources, query, key):
        return depth_attention(sources, query, key, backend=backend)

    sources, query, key = inputs(3, dtype=torch.float64)
    given = sources, query.detach().double().requires_grad_(), key.detach().double().requires_grad_()
    compiled = both_ways(torch.compile(ask, backend="aot_eager", fullgraph=True), *given)
    for mine, other in zip(compiled, both_ways(ask, *given), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_generated_code_has_the_bits_of_eager_and_no_float64(kernel, count):
    given = inputs(count)
    results, code = run_and_get_code(both_ways, torch.compile(read, fullgraph=True), *given)
    assert same_bits(results, both_ways(read, *given))
    assert not re.search(r"\bdouble\b|float64", "".join(code))
    if count > 1:
        assert any("attnres.depth_attention_backward" in text for text in code)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 9])
def test_generated_code_of_the_reference_is_right_and_has_no_float64(monkeypatch, count):
    monkeypatch.setattr(backends, "_default", "reference")
    given = inputs(count)
    results, code = run_and_get_code(both_ways, torch.compile(read, fullgraph=True), *given)
    for mine, other in zip(results, both_ways(read, *given), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert not re.search(r"\bdouble\b|float64", "".join(code))
