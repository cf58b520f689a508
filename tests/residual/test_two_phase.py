"""Two phases are a way to compute, not another function: values and every gradient are those of one read at a time."""

import copy
import io
import pickle
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attnres.errors import ConfigError
from attnres.models import build, convert
from attnres.models.convert import describe_strategy
from attnres.models.layer import checkpoint_state
from attnres.ops import use_backend
from attnres.residual import OUTPUT, BlockAttnRes, FullAttnRes, History, Residual
from attnres.residual import two_phase as policy
from attnres.residual.full import READS_PER_PHASE
from models.small import CONFIGS, llama, make

DIM, EPS = 8, 1e-5
EXACT = 1e-12
FLOAT64_BACKENDS = ["cpu", "reference"]
STRATEGIES = [
    *(BlockAttnRes(sublayers_per_block=size) for size in (1, 2, 3, 5, 50)),
    BlockAttnRes(num_blocks=4),
    BlockAttnRes(num_blocks=4, remainder="balanced"),
    FullAttnRes(),
]
DEPTH = 12
KERNEL = pytest.mark.skipif(policy.resolve("auto", [torch.ones(2, 2)]) == "reference", reason="needs the CPU kernel")


class Twice(nn.Module):
    """Reads its input in two places."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, hidden):
        return torch.tanh(self.first(hidden)) * torch.sigmoid(self.second(hidden)) + 0.1 * hidden.flip(0)


class Drop(nn.Module):
    """Leaves every other token without an output."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, hidden):
        keep = torch.arange(hidden.shape[0]).remainder(2)[:, None]
        return self.inner(hidden).relu() * keep


class Silent(nn.Module):
    """Its output has no gradient."""

    def forward(self, hidden):
        return hidden.detach().sin()


def sublayer(index):
    return (nn.Linear(DIM, DIM), Twice(), nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()), Drop(), Silent())[index % 5]


def setting(strategy, depth=DEPTH, *, dtype=torch.float64, training=True, tokens=5):
    """The same random model and input for every way of computing, and in every dtype."""
    torch.manual_seed(7)
    residual = Residual(strategy, depth, DIM, eps=EPS)
    for site in residual.sites:
        nn.init.normal_(site.pseudo_query)
        nn.init.normal_(site.key_weight, mean=1.0, std=0.3)
    sublayers = nn.ModuleList(sublayer(index) for index in range(depth))
    embedding = torch.randn(tokens, DIM).bfloat16().to(dtype).requires_grad_()
    for module in (residual, sublayers):
        module.bfloat16().to(dtype).train(training)
    return residual, sublayers, embedding


def run(residual, sublayers, embedding):
    state, values = residual.start(embedding), []
    for site, layer in enumerate(sublayers):
        values.append(residual.read(state, site))
        state = residual.write(state, site, layer(values[-1]))
    return [*values, residual.read(state, OUTPUT)]


def outcome(strategy, depth=DEPTH, **options):
    """Every read, and the gradient of everything there is for a loss over all of them."""
    residual, sublayers, embedding = setting(strategy, depth, **options)
    values = run(residual, sublayers, embedding)
    names = {"embedding": embedding, **dict(residual.named_parameters()), **dict(sublayers.named_parameters())}
    directions = torch.randn(len(values), DIM, dtype=torch.float64)
    loss = sum((value.double() * direction).sum() for value, direction in zip(values, directions, strict=True))
    grads = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    assert all(grad is not None for name, grad in zip(names, grads, strict=True)), "a parameter is not used"
    return {f"read {site}": value.detach() for site, value in enumerate(values)} | dict(zip(names, grads, strict=True))


def error_of(value, expected):
    """Relative to the tensor's size; single entries may cancel."""
    value, expected = value.detach().double(), expected.detach().double()
    return float((value - expected).norm() / (expected.norm() + 1e-3))


def errors_of(found, expected):
    """By name; what is found at the sites relative to the largest of its kind.

    Where a softmax is nearly all on one source, the gradient of its query is a small difference of large terms. Two
    phases take one of these terms from the rounded output of the read, as flash attention does.
    """
    errors = {}
    for name, value in expected.items():
        kind = name.rpartition(".")[2] if "sites." in name else None
        size = max(other.norm() for key, other in expected.items() if key == name or (kind and key.endswith(kind)))
        errors[name] = error_of(found[name], value) * float((value.norm() + 1e-3) / (size + 1e-3))
    return errors


def assert_same(found, expected, tolerance=EXACT):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert error_of(found[name], value) <= tolerance, name


def with_phases(strategy, phases):
    return replace(strategy, phases=phases)


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("read_scale", ["mean", "sum"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_all_phases_have_the_same_reads_and_gradients(strategy, read_scale, training, backend):
    strategy = replace(strategy, read_scale=read_scale)
    with use_backend("reference"):
        expected = outcome(with_phases(strategy, "one"), training=training)
    for phases in ("one", "two", "auto"):
        with use_backend(backend):
            assert_same(outcome(with_phases(strategy, phases), training=training), expected)


@pytest.mark.parametrize("depth", [1, 2, READS_PER_PHASE - 1, READS_PER_PHASE, READS_PER_PHASE + 1,
                                   2 * READS_PER_PHASE + 3])  # fmt: skip
@pytest.mark.parametrize("strategy", [FullAttnRes(), BlockAttnRes(sublayers_per_block=3)], ids=str)
def test_any_depth(strategy, depth):
    with use_backend("reference"):
        expected = outcome(with_phases(strategy, "one"), depth)
    for phases in ("two", "auto"):
        with use_backend("cpu"):
            assert_same(outcome(with_phases(strategy, phases), depth), expected)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-6), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("strategy", [FullAttnRes(), BlockAttnRes(sublayers_per_block=5)], ids=str)
def test_float32_and_bfloat16_agree_to_rounding(strategy, tokens, dtype, rounding):
    """Each way is as near to the truth as rounded values allow; every gradient has its parameter's dtype."""
    expected = outcome(with_phases(strategy, "one"), tokens=tokens)
    for training in (True, False):
        errors = {}
        for phases in ("one", "two", "auto"):
            found = outcome(with_phases(strategy, phases), dtype=dtype, training=training, tokens=tokens)
            assert {value.dtype for value in found.values()} == {dtype}
            errors[phases] = errors_of(found, expected)
        for phases in ("two", "auto"):
            for name, error in errors[phases].items():
                assert error <= 3 * errors["one"][name] + rounding, (phases, name)


def test_no_gradient_wanted_gives_the_same_reads():
    for strategy in STRATEGIES:
        for training in (True, False):
            for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, 1e-5)):
                results = []
                for phases in ("one", "two", "auto"):
                    residual, sublayers, embedding = setting(
                        replace(strategy, phases=phases, read_scale="sum"), dtype=dtype, training=training, tokens=70
                    )
                    with torch.no_grad():
                        results.append(run(residual, sublayers, embedding))
                for other in results[1:]:
                    assert all(error_of(a, b) <= tolerance for a, b in zip(other, results[0], strict=True))


class Count(TorchDispatchMode):
    """Counts calls of this project's operators."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "attnres":
            self.calls[func._schema.name.removeprefix("attnres::")] += 1
        return func(*args, **(kwargs or {}))


def counted(strategy, depth, **options):
    """Operators called forward, and backward."""
    residual, sublayers, embedding = setting(strategy, depth, dtype=torch.float32, **options)
    with Count() as forward:
        values = run(residual, sublayers, embedding)
    with Count() as backward:
        sum(value.sum() for value in values).backward()
    return forward.calls, backward.calls


@KERNEL
def test_phase_1_runs_once_per_block_and_so_does_its_backward():
    forward, backward = counted(BlockAttnRes(sublayers_per_block=4, phases="two"), 14)  # ends at 4, 8, 12, 14
    # the first block has the embedding only, and the output read after the last block is a single read
    assert forward == {"inter_block": 3, "intra_block": 10, "depth_attention": 4}
    assert backward == {"inter_block_backward": 3, "intra_block_backward": 7, "depth_attention_backward": 4}


@KERNEL
def test_auto_goes_forward_read_by_read_and_backward_block_by_block():
    forward, backward = counted(BlockAttnRes(sublayers_per_block=4), 14)
    assert forward == {"depth_attention": 14}  # all but the first read, which has one source
    assert backward == {"inter_block_backward": 3, "intra_block_backward": 7, "depth_attention_backward": 4}


@KERNEL
def test_one_phase_never_looks_ahead():
    for strategy in (BlockAttnRes(sublayers_per_block=4, phases="one"), FullAttnRes(phases="one")):
        forward, backward = counted(strategy, 14)
        assert forward == {"depth_attention": 14}
        assert backward == {"depth_attention_backward": 14}


@KERNEL
def test_full_looks_ahead_every_few_reads():
    depth = 2 * READS_PER_PHASE + 3
    forward, backward = counted(FullAttnRes(phases="two"), depth)
    assert forward["inter_block"] == backward["inter_block_backward"] == 2
    assert forward["intra_block"] == READS_PER_PHASE + 4  # the output read is one of the phase
    forward, backward = counted(FullAttnRes(), depth)
    assert forward["inter_block"] == 0
    assert backward["inter_block_backward"] == 2


@KERNEL
def test_auto_in_evaluation_computes_phase_1_ahead_from_the_measured_break_even(monkeypatch):
    size = policy.MIN_READS_IN_EVALUATION
    depth = size * (policy.MIN_FAR_IN_EVALUATION + 1)
    monkeypatch.setattr(policy, "MIN_BYTES_IN_EVALUATION", 64 * DIM * 4)
    for tokens, ahead in ((64, 2), (63, 0)):
        for grad in (True, False):
            residual, sublayers, embedding = setting(
                BlockAttnRes(sublayers_per_block=size), depth, dtype=torch.float32, training=False, tokens=tokens
            )
            with Count() as forward, torch.set_grad_enabled(grad):
                run(residual, sublayers, embedding)
            assert forward.calls["inter_block"] == ahead
    forward, _ = counted(BlockAttnRes(sublayers_per_block=size - 1), depth, training=False, tokens=100)
    assert forward["inter_block"] == 0


@KERNEL
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
@pytest.mark.parametrize(("tokens", "dynamic", "ahead"), [(64, False, True), (63, False, False), (64, True, False)])
def test_auto_in_a_graph_looks_ahead_where_the_graph_is_for_enough_tokens_alone(monkeypatch, tokens, dynamic, ahead):
    size = policy.MIN_READS_IN_EVALUATION
    depth = size * (policy.MIN_FAR_IN_EVALUATION + 1)
    monkeypatch.setattr(policy, "MIN_BYTES_IN_EVALUATION", 64 * DIM * 4)
    strategy = BlockAttnRes(sublayers_per_block=size)
    residual, _, embedding = setting(strategy, depth, dtype=torch.float32, training=False, tokens=tokens)
    names = []

    def keep(graph, example):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda embedding: run(residual, [torch.tanh] * depth, embedding), backend=keep, fullgraph=True, dynamic=dynamic
    )
    for mine, other in zip(compiled(embedding), run(residual, [torch.tanh] * depth, embedding), strict=True):
        assert error_of(mine, other) <= 2e-6
    assert ("attnres.inter_block.default" in names) == ahead
    torch._dynamo.reset()


@pytest.mark.parametrize("phases", ["two", "auto"])
@pytest.mark.parametrize("strategy", [BlockAttnRes(sublayers_per_block=3), FullAttnRes()], ids=str)
@pytest.mark.parametrize("mode", ["train", "eval", "no grad"])
def test_an_old_state_can_be_read_and_written_again(strategy, phases, mode):
    residual, sublayers, embedding = setting(with_phases(strategy, phases), training=mode == "train")
    with use_backend("cpu"), torch.set_grad_enabled(mode != "no grad"):
        states, values = [residual.start(embedding)], []
        for site, layer in enumerate(sublayers):
            values.append(residual.read(states[-1], site))
            states.append(residual.write(states[-1], site, layer(values[-1])))
        values.append(residual.read(states[-1], OUTPUT))
        snapshot = [[leaf.clone() for leaf in pytree.tree_leaves(state)] for state in states]
        for site in (7, 3, 11, 0, 4, 5, 3):
            assert torch.equal(residual.read(states[site], site), values[site])
            branch = residual.write(states[site], site, torch.ones_like(embedding))
            if site + 1 < len(sublayers):
                assert not torch.equal(residual.read(branch, site + 1), values[site + 1])
        for state, leaves in zip(states, snapshot, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(state), leaves, strict=True))


def test_two_branches_from_one_state_add_their_gradients():
    """Speculation, or an early exit: the block goes on twice from the same phase 1."""
    results = []
    for phases in ("one", "two", "auto"):
        residual, sublayers, embedding = setting(BlockAttnRes(sublayers_per_block=4, phases=phases))
        with use_backend("cpu"):
            state = residual.start(embedding)
            for site in range(6):
                state = residual.write(state, site, sublayers[site](residual.read(state, site)))
            ends = []
            for factor in (1.0, -2.0):
                branch = state
                for site in range(6, DEPTH):
                    branch = residual.write(branch, site, factor * sublayers[site](residual.read(branch, site)))
                ends.append(residual.read(branch, OUTPUT))
            leaves = [embedding, *residual.parameters()]
            results.append(torch.autograd.grad((ends[0] * ends[1]).sum(), leaves, materialize_grads=True))
    for other in results[1:]:
        assert all(error_of(a, b) <= EXACT for a, b in zip(other, results[0], strict=True))


# Gradients of finished sources: in float32 until they are complete.


def source_gradient(phases, dtype, blocks, size, *, training=True):
    """Gradient of the embedding when each later block adds little to what the last one gave."""
    torch.manual_seed(3)
    residual = Residual(BlockAttnRes(sublayers_per_block=size, phases=phases), blocks * size, DIM, dtype=dtype)
    residual.train(training)
    embedding = torch.randn(4, DIM).to(torch.bfloat16).to(dtype).requires_grad_()
    outputs = [torch.randn(4, DIM).to(torch.bfloat16).to(dtype) for _ in range(blocks * size)]
    state, loss = residual.start(embedding), 0.0
    for site, output in enumerate(outputs):
        hidden = residual.read(state, site)
        # the first gradients to arrive are those of the last reads
        loss = loss + hidden.double().sum() * (1.0 if site == len(outputs) - 1 else 2.0**-10 * (site // size + 1))
        state = residual.write(state, site, output)
    return torch.autograd.grad(loss, embedding)[0].double()


@KERNEL
@pytest.mark.parametrize(("phases", "training"), [("two", True), ("two", False), ("auto", True)])
def test_many_small_contributions_to_a_bfloat16_source_are_not_lost(phases, training):
    blocks, size = 40, 3
    exact = source_gradient("one", torch.float64, blocks, size)
    errors = {
        name: float(
            ((source_gradient(name, torch.bfloat16, blocks, size, training=training) - exact) / exact).abs().max()
        )
        for name in ("one", phases)
    }
    # one rounding, and those of the few reads of the first block, which autograd adds in bfloat16
    assert errors[phases] <= 2**-8
    assert errors["one"] > 8 * errors[phases]


@KERNEL
def test_a_gradient_that_is_carried_along_is_rounded_once():
    """Exactly: what arrives by later phase 1s is summed in float32 and rounded when it is complete."""
    residual, sublayers, embedding = setting(BlockAttnRes(sublayers_per_block=2, phases="two"), 8, dtype=torch.bfloat16)
    with torch.no_grad():
        state = residual.start(embedding)
        for site, layer in enumerate(sublayers):
            state = residual.write(state, site, layer(residual.read(state, site)))
    sources = [source.detach().float().requires_grad_() for source in state.finished]
    rounded = [source.detach().bfloat16().requires_grad_() for source in sources]
    grads = torch.randn(2, 5, DIM).bfloat16()
    results = []
    for given, dtype in ((sources, torch.float32), (rounded, torch.bfloat16)):
        state = History(tuple(given[:3]))
        vectors = [[(s.pseudo_query, s.key_weight) for s in residual.sites[a : a + 1]] for a in (4, 6)]
        reads = []
        for part in vectors:
            keywords = {"phases": "two", "eps": EPS, "dtype": torch.bfloat16, "training": True}
            state = policy.look_ahead(state, part, first=0, **keywords)
            ahead = state.ahead.of(0)
            reads.append(policy.read_ahead(state, ahead, *part[0], eps=EPS, out_scale=1.0, dtype=torch.bfloat16))
        results.append(torch.autograd.grad(reads, given[:3], list(grads)))
        assert {grad.dtype for grad in results[-1]} == {dtype}
    for exact, once in zip(*results, strict=True):
        assert torch.equal(once, exact.bfloat16())


# What a training script may do with a graph.


@pytest.mark.parametrize("phases", ["two", "auto"])
@pytest.mark.parametrize("used", [(0,), (5,), (6, 7), (4, 10), (12,)], ids=str)
def test_a_loss_over_some_of_the_reads(phases, used):
    results = []
    for name in ("one", phases):
        residual, sublayers, embedding = setting(BlockAttnRes(sublayers_per_block=4, phases=name))
        with use_backend("cpu"):
            values = run(residual, sublayers, embedding)
            leaves = [embedding, *residual.parameters(), *sublayers.parameters()]
            loss = sum(values[site].sin().sum() for site in used)
            results.append(torch.autograd.grad(loss, leaves, materialize_grads=True))
    assert all(error_of(a, b) <= EXACT for a, b in zip(*reversed(results), strict=True))


@pytest.mark.parametrize("phases", ["two", "auto"])
def test_one_read_alone_has_no_gradient_from_its_neighbours(phases):
    """The reads of a block share phase 1; those that no loss uses are absent in its backward, not zero or stale."""
    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "attnres" and "inter_block_backward" in func.name():
                seen.append([grad is not None for grad in args[0]])
            return func(*args, **(kwargs or {}))

    strategy = BlockAttnRes(sublayers_per_block=4, phases=phases)
    residual, _, embedding = setting(strategy, 8, dtype=torch.float64)
    with use_backend("cpu"), Look():
        state, values = residual.start(embedding), []
        for site in range(8):
            values.append(residual.read(state, site))
            state = residual.write(state, site, embedding.detach() * (site + 1))
        values[6].sum().backward()
    assert seen == [[False, False, True, False]]


@pytest.mark.parametrize("phases", ["two", "auto"])
def test_gradients_pass_by_a_block_whose_reads_are_not_used(phases):
    results = []
    for name in ("one", phases):
        residual, _, embedding = setting(BlockAttnRes(sublayers_per_block=3, phases=name))
        outputs = [torch.randn_like(embedding).requires_grad_() for _ in range(DEPTH)]
        with use_backend("cpu"):
            state, values = residual.start(embedding), []
            for site, output in enumerate(outputs):
                values.append(residual.read(state, site))
                state = residual.write(state, site, output)
            loss = values[4].sum() + values[10].square().sum()  # nothing of the block in between
            results.append(torch.autograd.grad(loss, [embedding, *outputs[:9]]))
    assert all(error_of(a, b) <= EXACT for a, b in zip(*reversed(results), strict=True))


@pytest.mark.parametrize("phases", ["two", "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_backward_twice_over_a_kept_graph_gives_the_same_twice(phases, dtype):
    residual, sublayers, embedding = setting(BlockAttnRes(sublayers_per_block=4, phases=phases), dtype=dtype)
    with use_backend("cpu"):
        loss = run(residual, sublayers, embedding)[-1].sum()
    leaves = [embedding, *residual.parameters(), *sublayers.parameters()]
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("phases", ["two", "auto"])
@pytest.mark.parametrize("wanted", ["queries", "key weights", "one query", "embedding", "sublayers", "nothing"])
@pytest.mark.parametrize("strategy", [BlockAttnRes(sublayers_per_block=4), FullAttnRes()], ids=str)
def test_gradients_of_some_leaves_only(strategy, wanted, phases):
    results = []
    for name in ("one", phases):
        residual, sublayers, embedding = setting(with_phases(strategy, name))
        named = dict(residual.named_parameters())
        leaves = {
            "queries": [value for key, value in named.items() if key.endswith("pseudo_query")],
            "key weights": [value for key, value in named.items() if key.endswith("key_weight")],
            "one query": [named["sites.10.pseudo_query"]],
            "embedding": [embedding],
            "sublayers": list(sublayers.parameters()),
            "nothing": [],
        }[wanted]
        for leaf in (embedding, *residual.parameters(), *sublayers.parameters()):
            leaf.requires_grad_(any(leaf is other for other in leaves))
        with use_backend("cpu"):
            values = run(residual, sublayers, embedding)
            assert values[-1].requires_grad == bool(leaves)
            if leaves:
                results.append(torch.autograd.grad(sum(v.sin().sum() for v in values if v.requires_grad), leaves))
    if results:
        assert all(error_of(a, b) <= EXACT for a, b in zip(*reversed(results), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("phases", ["two", "auto"])
@pytest.mark.parametrize("strategy", [BlockAttnRes(sublayers_per_block=4), FullAttnRes()], ids=str)
def test_listeners_and_depth_weights(strategy, phases, dtype):
    seen = {}
    for name in ("one", phases):
        residual, sublayers, embedding = setting(replace(strategy, phases=name, read_scale="sum"), dtype=dtype)
        records = []

        class Record:
            def on_read(self, site, state, value, residual=residual, records=records):
                records.append((site, state.sources, value, residual.depth_weights(state, site)))

            def on_write(self, site, state, output): ...

        with use_backend("cpu"), residual.listen(Record()):
            values = run(residual, sublayers, embedding)
        assert [site for site, *_ in records] == list(range(DEPTH + 1))
        assert all(value is expected for (_, _, value, _), expected in zip(records, values, strict=True))
        seen[name] = records
    tolerance = EXACT if dtype == torch.float64 else 1e-5
    for (_, sources, value, weights), (_, _, _, expected) in zip(seen[phases], seen["one"], strict=True):
        assert weights.shape == (5, len(sources))
        assert error_of(weights, expected) <= tolerance
        assert error_of(sum(weights[:, i, None] * v for i, v in enumerate(sources)), value) <= tolerance


# The state.


@pytest.mark.parametrize("phases", ["two", "auto"])
def test_a_state_with_phase_1_is_a_pytree(phases):
    residual, sublayers, embedding = setting(BlockAttnRes(sublayers_per_block=4, phases=phases))
    with use_backend("cpu"):
        state = residual.start(embedding)
        for site in range(6):
            state = residual.write(state, site, sublayers[site](residual.read(state, site)))
        leaves, spec = pytree.tree_flatten(state)
        again = pytree.tree_unflatten(leaves, spec)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        assert (again.ahead.far, again.ahead.deferred) == (2, phases == "auto")
        assert len(again.ahead.reads) == 2
        assert len(again.ahead.carriers) == 2
        assert torch.equal(residual.read(again, 6), residual.read(state, 6))
        assert spec != pytree.tree_structure(residual.write(state, 6, embedding))
        mapped = pytree.tree_map(lambda leaf: leaf.float(), state)
        assert {leaf.dtype for leaf in pytree.tree_leaves(mapped)} == {torch.float32}


@pytest.mark.parametrize("phases", ["two", "auto"])
@pytest.mark.parametrize("strategy", [BlockAttnRes(sublayers_per_block=3), FullAttnRes()], ids=str)
@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_any_stretch_of_a_hand_driven_loop(strategy, phases, every, reentrant):
    def checkpoint(function, *leaves):
        return torch.utils.checkpoint.checkpoint(function, *leaves, use_reentrant=reentrant)

    results = []
    for name, checkpointed in (("one", False), (phases, True)):
        residual, sublayers, embedding = setting(with_phases(strategy, name))

        def stretch(state, start, residual=residual, sublayers=sublayers):
            for site in range(start, min(start + every, DEPTH)):
                state = residual.write(state, site, sublayers[site](residual.read(state, site)))
            return state

        with use_backend("cpu"):
            state = residual.start(embedding)
            for start in range(0, DEPTH, every):
                part = lambda state, start=start, stretch=stretch: stretch(state, start)  # noqa: E731
                state = checkpoint_state(checkpoint, part, state) if checkpointed else part(state)
            residual.read(state, OUTPUT).sin().sum().backward()
        parameters = {"embedding": embedding, **dict(residual.named_parameters()), **dict(sublayers.named_parameters())}
        results.append({key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in parameters.items()})
    assert_same(results[1], results[0])


# Whole models.


def randomised(model, dtype=torch.float64):
    torch.manual_seed(5)
    for site in model.base_model.residual.sites:
        nn.init.normal_(site.pseudo_query)
        nn.init.normal_(site.key_weight, mean=1.0, std=0.3)
    return model.to(dtype)


def plain_model(family, **changes):
    torch.manual_seed(1)
    return make(family, **changes)


IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(2))


def training_step(model, training=True):
    model.train(training).zero_grad(set_to_none=True)
    output = model(IDS, labels=IDS, use_cache=False)
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), **grads}


def reentrant(model):
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def non_reentrant(model):
    model.activation_checkpointing_enable({"use_reentrant": False})


def every_second_layer(model):
    model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=2)


def plainly(model):
    pass


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("strategy", [BlockAttnRes(sublayers_per_block=3), FullAttnRes()], ids=str)
def test_converted_models_of_every_family_with_and_without_checkpointing(family, strategy):
    # grouped matrix products are not there in float64
    plain = plain_model(family, **({"experts_implementation": "eager"} if family == "kimi_linear" else {"layers": 5}))
    expected = training_step(randomised(convert(copy.deepcopy(plain), with_phases(strategy, "one"))))
    for phases in ("two", "auto"):
        model = randomised(convert(copy.deepcopy(plain), with_phases(strategy, phases)))
        for wrap in (plainly, reentrant, non_reentrant, every_second_layer):
            wrapped = copy.deepcopy(model)
            wrap(wrapped)
            with use_backend("cpu"):
                assert_same(training_step(wrapped), expected, 1e-11)
        with use_backend("cpu"):
            assert_same(training_step(model, training=False), expected, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrap", [plainly, reentrant, non_reentrant])
def test_converted_models_with_the_kernel_in_float32_and_autocast(wrap, dtype):
    results = {}
    for phases in ("one", "two", "auto"):
        model = randomised(convert(plain_model("llama", layers=5), BlockAttnRes(sublayers_per_block=3, phases=phases)),
                           torch.float32)  # fmt: skip
        wrap(model)
        amp = torch.autocast("cpu", dtype=torch.bfloat16) if dtype == torch.bfloat16 else nullcontext()
        with amp:
            results[phases] = training_step(model)
        assert {value.dtype for name, value in results[phases].items() if name != "logits"} == {torch.float32}
    exact = training_step(randomised(convert(plain_model("llama", layers=5), BlockAttnRes(sublayers_per_block=3))))
    for phases in ("two", "auto"):
        one = errors_of(results["one"], exact)
        for name, error in errors_of(results[phases], exact).items():
            assert error <= 3 * one[name] + (1e-5 if dtype == torch.float32 else 0.05), (phases, name)


def test_generation_with_a_cache_does_not_depend_on_phases():
    plain, options = plain_model("llama", layers=5), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = []
    for phases in ("one", "two", "auto"):
        model = randomised(convert(copy.deepcopy(plain), BlockAttnRes(sublayers_per_block=4, phases=phases))).eval()
        found.append(model.generate(IDS, attention_mask=torch.ones_like(IDS), **options))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("phases", ["one", "two", "auto"])
def test_copies_and_pickles_keep_their_phases_and_look_at_their_own_sites(phases):
    strategy = BlockAttnRes(sublayers_per_block=3, phases=phases)
    model = randomised(convert(plain_model("llama"), strategy), torch.float32)
    expected = training_step(model)
    others = [copy.deepcopy(model), pickle.load(io.BytesIO(pickle.dumps(model)))]  # noqa: S301  our own bytes
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    for other in others:
        assert other.model.residual.strategy.phases == phases
        assert_same(training_step(other), expected, 1e-6)
        sites = {id(site) for site in other.model.residual.sites}
        upcoming = [site for owner in other.model.residual.sites for site in owner.upcoming]
        assert bool(upcoming) == (phases != "one")
        assert all(id(site) in sites for site in upcoming)


def test_phases_are_not_part_of_what_a_model_is():
    strategies = [BlockAttnRes(sublayers_per_block=3, phases=phases) for phases in ("one", "two", "auto")]
    assert describe_strategy(strategies[0]) == describe_strategy(strategies[1]) == describe_strategy(strategies[2])
    models = [build(llama(), strategy) for strategy in strategies]
    assert all("phases" not in model.config.attnres for model in models)
    assert "phases" not in models[1].config.to_json_string()
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    again = build(models[0].config, strategies[1])  # a model trained one way is loaded the other way
    again.load_state_dict(models[0].state_dict())
    assert again.model.residual.strategy.phases == "two"


@pytest.mark.parametrize("strategy", [BlockAttnRes, FullAttnRes])
@pytest.mark.parametrize("bad", ["three", "", None, 2, True, "Two"])
def test_bad_phases_get_one_clear_line(strategy, bad):
    size = {"sublayers_per_block": 2} if strategy is BlockAttnRes else {}
    with pytest.raises(ConfigError, match=r'^phases is .*; allowed are "auto", "one" and "two"$'):
        strategy(phases=bad, **size)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("phases", ["one", "two", "auto"])
def test_a_whole_model_compiles_in_one_graph_and_equals_eager(phases, training):
    torch.compiler.reset()
    strategy = BlockAttnRes(sublayers_per_block=2, phases=phases)
    config = llama(layers=3, hidden_size=16, intermediate_size=24)
    torch.manual_seed(1)
    model = randomised(build(config, strategy), torch.float32).train(training)
    expected = training_step(model, training)
    model.zero_grad(set_to_none=True)
    compiled = torch.compile(model, fullgraph=True)
    found = training_step(compiled, training)
    assert_same({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected, 1e-4)


@pytest.mark.parametrize("phases", ["two", "auto"])
def test_distributed_data_parallel_finds_every_parameter_used(phases, tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = randomised(build(llama(layers=5), BlockAttnRes(sublayers_per_block=4, phases=phases)), torch.float32)
        expected = training_step(model)
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):  # the second step is where an unused parameter is an error
            found = training_step(parallel)
        assert found.keys() - {"logits"} == {name for name, _ in parallel.named_parameters()}
        assert_same({name.removeprefix("module."): value for name, value in found.items()}, expected, 1e-5)
    finally:
        torch.distributed.destroy_process_group()
