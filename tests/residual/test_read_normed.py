"""A read with the norm that follows it: the same as the two in turn, for every strategy, and never stale."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres.ops import backends, cpu, depth_attention
from attnres.residual import OUTPUT, BlockAttnRes, FullAttnRes, Residual, Strategy
from strategies.cases import case_id, cases

DIM, DEPTH, NORM_EPS = 32, 12, 1e-3
FUSED = [BlockAttnRes(sublayers_per_block=4), BlockAttnRes(sublayers_per_block=1), FullAttnRes()]


@pytest.fixture
def kernel():
    if reason := cpu.problem():
        pytest.skip(reason)


def setting(strategy: Strategy, dtype=torch.float32, depth=DEPTH, phases=None):
    """A residual path with random parameters, and the norms of its sites."""
    if phases is not None:
        strategy = replace(strategy, phases=phases)
    norms = [LlamaRMSNorm(DIM, NORM_EPS) for _ in range(depth + 1)]
    residual = Residual(strategy, depth, DIM, eps=1e-5, norms=norms[:-1]).eval()
    for module in (residual, *norms):
        for parameter in module.parameters():
            nn.init.normal_(parameter, mean=float(parameter.detach().mean().round()), std=0.3)
        module.to(dtype)
    return residual, norms


def outputs(tokens, dtype=torch.float32, depth=DEPTH):
    """The embedding and the output of each sublayer, of growing size."""
    return [(torch.randn(1, tokens, DIM) * (1 + at / 4)).to(dtype) for at in range(depth + 1)]


def in_turn(residual, norms, given):
    state, values = residual.start(given[0]), []
    for at, norm in enumerate(norms):
        site = at if at < residual.num_sublayers else OUTPUT
        values.append(norm(residual.read(state, site)))
        if site != OUTPUT:
            state = residual.write(state, site, given[at + 1])
    return values


def together(residual, norms, given):
    state, values = residual.start(given[0]), []
    for at, norm in enumerate(norms):
        site = at if at < residual.num_sublayers else OUTPUT
        value, state = residual.read_normed(state, site, norm.weight, norm.variance_epsilon)
        values.append(value)
        if site != OUTPUT:
            state = residual.write(state, site, given[at + 1])
    return values


def assert_same(found, expected):
    """Within an ulp of bfloat16, where a sum in another order may turn a rounding over; in float32 to rounding."""
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        if mine.dtype == torch.bfloat16:
            off = (mine.view(torch.int16).int() - other.view(torch.int16).int()).abs()
            assert off.max() <= 1
            assert (off > 0).float().mean() < 0.02
        else:
            torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_every_strategy_reads_and_norms_as_in_turn(strategy, grad_mode):
    residual, norms = setting(strategy)
    given = outputs(3)
    with torch.set_grad_enabled(grad_mode):
        assert_same(together(residual, norms, given), in_turn(residual, norms, given))


@torch.no_grad()
@pytest.mark.parametrize("read_scale", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("phases", ["one", "two", "auto"])
@pytest.mark.parametrize("strategy", FUSED, ids=str)
def test_fused_reads_are_those_in_turn(strategy, phases, dtype, tokens, read_scale):
    residual, norms = setting(replace(strategy, read_scale=read_scale), dtype, phases=phases)
    given = outputs(tokens, dtype)
    assert_same(together(residual, norms, given), in_turn(residual, norms, given))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("phases", ["one", "two", "auto"])
@pytest.mark.parametrize("strategy", FUSED, ids=str)
def test_gradients_are_those_of_read_and_norm(strategy, phases, training):
    residual, norms = setting(strategy, torch.float64, phases=phases)
    residual.train(training)
    given = [tensor.requires_grad_() for tensor in outputs(4, torch.float64)]
    leaves = [*given[:-1], *residual.parameters(), *(norm.weight for norm in norms)]
    upstream = torch.randn(len(norms), 4, DIM, dtype=torch.float64)
    grads = [
        torch.autograd.grad(
            sum((v * u).sum() for v, u in zip(run(residual, norms, given), upstream, strict=True)), leaves
        )
        for run in (together, in_turn)
    ]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)  # Llama's norm is float32 within


class Calls(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize(("phases", "name"), [("one", "read"), ("two", "intra_block")])
def test_without_gradients_a_read_and_its_norm_are_one_operator(kernel, phases, name):
    residual, norms = setting(BlockAttnRes(sublayers_per_block=4), phases=phases)
    given = outputs(3)
    state = residual.start(given[0])
    for site in range(6):
        state = residual.write(state, site, given[site + 1])
    depth_attention(given[:2], torch.ones(DIM))
    with Calls() as calls:
        residual.read_normed(state, 6, norms[6].weight, NORM_EPS)
    assert calls.names == [f"attnres.{name}.default"]


@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_listener_gets_the_read_before_its_norm(grad_mode):
    residual, norms = setting(BlockAttnRes(sublayers_per_block=4))
    given, heard = outputs(3), []

    class Ear:
        def on_read(self, site, state, value):
            heard.append((site, value))

        def on_write(self, site, state, output):
            pass

    with torch.set_grad_enabled(grad_mode):
        with residual.listen(Ear()):
            found = together(residual, norms, given)
        assert_same(found, together(residual, norms, given))
    assert [site for site, _ in heard] == list(range(DEPTH + 1))
    assert_same([norm(value) for norm, (_, value) in zip(norms, heard, strict=True)], found)


def edit_in_place(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 2)


def swap_data(module):
    for parameter in module.parameters():
        parameter.data = parameter.data + torch.randn_like(parameter) / 2


def load(module):
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()})


def assign(module):
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()}, assign=True)


def step(module):
    with torch.enable_grad():
        sum(parameter.square().sum() for parameter in module.parameters()).backward()
    torch.optim.AdamW(module.parameters(), lr=0.5).step()


def replace_parameters(module):
    for owner in module.modules():
        for name, value in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(torch.randn_like(value)))


def parametrize(module):
    class Shift(nn.Module):
        def forward(self, value):
            return value + 1.5

    for owner in list(module.modules()):
        for name in [name for name, _ in owner.named_parameters(recurse=False)]:
            nn.utils.parametrize.register_parametrization(owner, name, Shift())


CHANGES = {
    "in place": edit_in_place,
    "data": swap_data,
    "load_state_dict": load,
    "load_state_dict by assignment": assign,
    "optimizer step": step,
    "new parameters": replace_parameters,
    "parametrization": parametrize,
}


@torch.no_grad()
@pytest.mark.parametrize("phases", ["one", "two"])
@pytest.mark.parametrize("what", ["sites", "norms"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_fused_result_follows_a_change_of_the_parameters(change, what, phases):
    residual, norms = setting(BlockAttnRes(sublayers_per_block=4), phases=phases)
    given = outputs(3)
    before = together(residual, norms, given)
    for module in [residual] if what == "sites" else norms:
        CHANGES[change](module)
    found = together(residual, norms, given)
    assert_same(found, in_turn(residual, norms, given))
    assert not torch.allclose(found[5], before[5], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("phases", ["one", "two"])
def test_the_fused_result_follows_a_change_of_dtype(phases):
    residual, norms = setting(BlockAttnRes(sublayers_per_block=4), phases=phases)
    given = outputs(3)
    together(residual, norms, given)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        for module in (residual, *norms):
            module.to(dtype)
        values = [tensor.to(dtype) for tensor in given]
        found = together(residual, norms, values)
        assert {value.dtype for value in found} == {dtype}
        assert_same(found, in_turn(residual, norms, values))


@torch.no_grad()
@pytest.mark.parametrize("phases", ["one", "two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_of_nans_touches_no_other(dtype, phases):
    residual, norms = setting(BlockAttnRes(sublayers_per_block=4), dtype, phases=phases)
    given = outputs(70, dtype)
    clean = together(residual, norms, given)
    for place in (0, 5):
        spoiled = [tensor.clone() for tensor in given]
        spoiled[place][:, 13] = float("nan")
        found = together(residual, norms, spoiled)
        others = torch.arange(70) != 13
        for mine, other in zip(found, clean, strict=True):
            assert torch.equal(mine[:, others], other[:, others])
        assert found[-1][:, 13].isnan().all()


@torch.no_grad()
def test_under_autocast_a_float32_norm_gives_float32_as_in_turn():
    residual, norms = setting(BlockAttnRes(sublayers_per_block=4))
    given = [tensor if at == 0 else tensor.bfloat16() for at, tensor in enumerate(outputs(3))]
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = together(residual, norms, given), in_turn(residual, norms, given)
        for norm in norms:
            norm.to(torch.bfloat16)
        half, turned = together(residual, norms, given), in_turn(residual, norms, given)
    assert {value.dtype for value in found} == {torch.float32}
    assert all(map(torch.equal, found, expected))
    assert {value.dtype for value in half} == {torch.bfloat16}
    assert_same(half, turned)


@torch.no_grad()
def test_a_state_can_be_read_again_and_copies_read_alike(kernel):
    residual, norms = setting(BlockAttnRes(sublayers_per_block=4))
    given = outputs(3)
    expected, again = together(residual, norms, given), together(copy.deepcopy(residual), norms, given)
    assert all(map(torch.equal, expected, again))
    state = residual.start(given[0])
    first, same = residual.read_normed(state, 0, norms[0].weight, NORM_EPS)
    second, _ = residual.read_normed(same, 0, norms[0].weight, NORM_EPS)
    assert torch.equal(first, second)
    assert torch.equal(first, expected[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
@pytest.mark.parametrize("phases", ["one", "two"])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_whole_chain_compiles_in_one_graph_with_the_values_of_eager(kernel, monkeypatch, phases, grad_mode):
    residual, norms = setting(BlockAttnRes(sublayers_per_block=3), depth=6, phases=phases)
    given = outputs(3, depth=6)
    monkeypatch.setattr(backends, "_said", {"cpu"})
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: together(residual, norms, given), backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(grad_mode):
        assert_same(compiled(*given), in_turn(residual, norms, given))
    torch._dynamo.reset()
