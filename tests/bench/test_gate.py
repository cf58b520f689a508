"""The gate lets right forms through and names what is wrong with others."""

import pytest
import torch

from attnres.bench.forms import Form, ours, stacked
from attnres.bench.gate import exact, judge
from attnres.bench.inputs import Inputs, Shape
from attnres.bench.op import OpBench, measure
from attnres.bench.peers import eager_peers
from attnres.errors import ConfigError

CPU = torch.device("cpu")
SHAPE = Shape(sources=4, tokens=12, dim=32)
RIGHT = stacked().read
REFERENCE = ours(CPU, torch.float32)[-1]
FORMS = [*ours(CPU, torch.float32), stacked(), *eager_peers()]


def verdict(form, dtype=torch.float32):
    inputs = Inputs(SHAPE, dtype, CPU)
    return judge(form.problem(inputs), inputs, exact(inputs))


def form(read, **settings):
    return Form(name="tested", read=read, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("candidate", FORMS, ids=lambda form: form.name)
def test_right_forms_pass(candidate, dtype):
    found = verdict(candidate, dtype)
    if candidate.name == "attn-res" and dtype == torch.bfloat16:  # rounds its keys: right or not depends on the numbers
        assert found.error < 0.05
    else:
        assert found.is_right, found


def test_a_packed_and_a_folded_form_pass():
    assert verdict(form(lambda packed, query, weight: RIGHT(packed.unbind(), query, weight), packed=True)).is_right
    ones = torch.ones(SHAPE.dim)
    assert verdict(form(lambda sources, query: RIGHT(sources, query, ones), folded=True)).is_right
    mixed = form(lambda packed, query: RIGHT(packed.unbind(), query, ones), folded=True, packed=True)
    assert verdict(mixed).is_right


WRONG_VALUES = {
    "no key norm": lambda sources, query, weight: _mix(
        sources, [(source * query * weight).sum(-1) for source in sources]
    ),
    "no key weight": lambda sources, query, weight: RIGHT(sources, query, 1 + 0 * weight),
    "mean": lambda sources, query, weight: sum(sources) / len(sources) + 0 * (query * weight).sum(),
    "last source left out": lambda sources, query, weight: RIGHT(sources[:-1], query, weight) + 0 * sources[-1],
    "normed values": lambda sources, query, weight: RIGHT(
        [torch.nn.functional.rms_norm(source, source.shape[-1:]) for source in sources], query, weight
    ),
    "one token not written": lambda sources, query, weight: torch.cat(
        [RIGHT(sources, query, weight)[:-1], torch.full((1, SHAPE.dim), float("nan"))]
    ),
    "another shape": lambda sources, query, weight: RIGHT(sources, query, weight)[:1],
}


def _mix(sources, scores):
    weights = torch.stack(scores).softmax(0)
    return torch.einsum("st,std->td", weights, torch.stack(sources))


@pytest.mark.parametrize("name", WRONG_VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_wrong_value_is_refused(name, dtype):
    def read(sources, query, weight):
        return WRONG_VALUES[name]([source.float() for source in sources], query, weight).to(dtype)

    found = verdict(form(read), dtype)
    assert not found.is_right
    assert str(found).startswith("wrong by")


class WrongGradient(torch.autograd.Function):
    """The right value, and gradients with one of them spoiled."""

    @staticmethod
    def forward(ctx, spoil, query, weight, *sources):
        ctx.spoil = spoil
        ctx.save_for_backward(query, weight, *sources)
        return RIGHT(sources, query, weight)

    @staticmethod
    def backward(ctx, grad):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            grads = list(torch.autograd.grad(RIGHT(inputs[2:], *inputs[:2]), inputs, grad))
        index, change = ctx.spoil
        grads[index] = change(grads[index])
        return None, *grads


SPOILED = {
    "query": (0, lambda grad: grad * 1.05),
    "key weight": (1, torch.zeros_like),
    "source 0": (2, lambda grad: grad.roll(1, 0)),
    "source 3": (5, lambda grad: grad.index_fill(0, torch.tensor([7]), float("nan"))),
    "source 2": (4, lambda grad: None),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_wrong_gradient_alone_is_refused_by_name(name):
    def read(sources, query, weight):
        return WrongGradient.apply(SPOILED[name], query, weight, *sources)

    found = verdict(form(read))
    assert not found.is_right
    assert found.where == f"gradient of {name}"


def test_wrong_and_failing_forms_are_reported_and_not_timed(monkeypatch):
    def fails(sources, query, weight):
        raise NotImplementedError("only on\nother machines")

    candidates = [
        REFERENCE,
        Form(name="wrong", read=WRONG_VALUES["mean"]),
        Form(name="failing", read=fails),
    ]
    monkeypatch.setattr("attnres.bench.op.forms", lambda device, dtype, compiled: candidates)
    bench = OpBench(shapes=(SHAPE,), dtypes=(torch.float32,), device=CPU, rounds=2, token_reads=3)
    rows = list(measure(bench))
    assert [(row.form, row.direction) for row in rows] == [
        ("wrong", "gate"), ("failing", "gate"),
        ("attnres (reference)", "forward"), ("attnres (reference)", "forward+backward"),
        ("wrong", "gate"), ("failing", "gate"), ("attnres (reference)", "one token"),
    ]  # fmt: skip
    assert rows[0].note.startswith("wrong by")
    assert rows[0].median_ms is None
    assert rows[1].note == "fails: NotImplementedError: only on other machines"


def test_our_own_failure_is_not_passed_over(monkeypatch):
    def fails(sources, query, weight):
        raise RuntimeError("a defect")

    broken = Form(name="attnres (cpu)", read=fails, is_ours=True)
    monkeypatch.setattr("attnres.bench.op.forms", lambda device, dtype, compiled: [broken])
    bench = OpBench(shapes=(SHAPE,), dtypes=(torch.float32,), device=CPU, rounds=1, token_reads=0)
    with pytest.raises(RuntimeError, match="a defect"):
        list(measure(bench))


@pytest.mark.parametrize("text", ["9x4096", "9x4096x-1", "axbxc", "", "9x4096x1024x2", "9x²x4"])
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="allowed: SOURCESxTOKENSxDIM"):
        Shape.parse(text)


def test_inputs_are_the_same_every_time_and_exact_in_their_dtype():
    first, second = (Inputs(SHAPE, torch.bfloat16, CPU) for _ in range(2))
    assert all(map(torch.equal, first.sources, second.sources))
    assert torch.equal(first.query, first.query.bfloat16().float())
    assert torch.equal(first.packed, torch.stack(first.sources))
