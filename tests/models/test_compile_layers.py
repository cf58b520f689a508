"""`layer.compile`: two graphs for all layers, and the reads stay outside."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from attnres.models import build, convert
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm
from models.small import llama, make

# Dynamo looks at .grad of every tensor it is given, and PyTorch warns of that
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

SIX_BLOCKS = BlockAttnRes(num_blocks=6, remainder="balanced")
STRATEGIES = [SIX_BLOCKS, BlockAttnRes(sublayers_per_block=3, phases="two"), FullAttnRes(phases="one"), PreNorm()]


@pytest.fixture(autouse=True)
def _no_graphs_from_before():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def randomised(model):
    for site in model.base_model.residual.sites:
        for vector in site.parameters():
            nn.init.normal_(vector, mean=1.0, std=0.3)
    return model


def small(layers=3, strategy=SIX_BLOCKS):
    torch.manual_seed(1)
    return randomised(build(llama(layers=layers, hidden_size=16, intermediate_size=24), strategy)).train()


def step(model, ids):
    """Loss and all gradients of one training step."""
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_same(actual, expected):
    """To the rounding of float32, by the size of each tensor: single entries may cancel."""
    for mine, other in zip(actual, expected, strict=True):
        assert (mine - other).norm() <= 2e-4 * other.norm()


def compile_layers(model, backend):
    for layer in model.base_model.layers:
        layer.compile(backend=backend, fullgraph=True)
    return model


def tokens(*shape):
    return torch.randint(3, 96, shape)


def problems():
    return sum(counters["recompile_limit"].values()) + sum(counters["graph_break"].values())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_all_layers_share_two_graphs_and_compute_what_they_did(strategy):
    ids, counter = tokens(2, 6), CompileCounter()
    expected = step(small(6, strategy), ids)
    compiled = compile_layers(small(6, strategy), counter)
    for _ in range(3):
        assert_same(step(compiled, ids), expected)
        assert counter.frame_count == 2
    assert problems() == 0


def test_reads_and_writes_are_not_in_the_graphs():
    names = []

    def note(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    step(compile_layers(small(), note), tokens(1, 5))
    assert names
    assert not [name for name in names if "attnres" in name]


@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_layers_under_activation_checkpointing(reentrant):
    ids, counter = tokens(2, 6), CompileCounter()
    expected = step(small(4), ids)
    model = small(4)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    compile_layers(model, counter)
    assert_same(step(model, ids), expected)
    made = counter.frame_count
    # reentrant checkpointing runs each sublayer without gradients first, and then from leaves
    assert made <= 6 if reentrant else made == 2
    assert_same(step(model, ids), expected)
    assert counter.frame_count == made
    assert problems() == 0


def test_other_kinds_of_layers_compile_too():
    torch.manual_seed(1)
    plain, ids = make("qwen3"), tokens(2, 6)
    expected = plain(ids, use_cache=False).logits
    counter = CompileCounter()
    compiled = compile_layers(convert(plain, FullAttnRes()), counter)
    assert_same([compiled(ids, use_cache=False).logits], [expected])
    assert counter.frame_count == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_copies_and_pickles_are_not_compiled_and_independent(compiled):
    model, ids, counter = small(2, FullAttnRes()), tokens(1, 5), CompileCounter()
    if compiled:
        compile_layers(model, counter)
    expected = step(model, ids)
    made = counter.frame_count
    assert made == (2 if compiled else 0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]  # noqa: S301  our own bytes
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    torch.compiler.reset()  # a copy that is compiled would have to make its graphs again
    for other in copies:
        assert_same(step(other, ids), expected)
        assert counter.frame_count == made
        compile_layers(other, counter)
    assert_same(step(copies[0], ids), expected)
    assert counter.frame_count == made + 2


def test_parameter_names_and_state_dict_do_not_change():
    model = small(2, FullAttnRes())
    before = list(model.state_dict())
    assert list(compile_layers(model, CompileCounter()).state_dict()) == before


def test_the_arguments_are_those_of_torch_compile():
    layer = small(1, FullAttnRes()).model.layers[0]
    with pytest.raises(TypeError, match="full_graph"):
        layer.compile(full_graph=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_24_layers_in_6_blocks_by_inductor(checkpointing):
    ids = tokens(2, 8)
    expected = step(small(24), ids)
    model = small(24)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    assert_same(step(model, ids), expected)
    made = counters["stats"]["unique_graphs"]
    assert 0 < made <= 7
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same(step(model, ids), expected)
    assert counters["stats"]["unique_graphs"] == made
    assert problems() == 0
