"""A zero query is lossless: the converted model is the same function of the base weights as the PreNorm model."""

import copy

import pytest
import torch

from attnres.models import convert
from attnres.residual import BlockAttnRes, FullAttnRes, History
from models.small import CONFIGS, make

FAMILIES = list(CONFIGS)
SIZES = [1, 2, 3, 4, 16]
ROUNDING = {family: 5e-5 if family == "kimi_linear" else 1e-5 for family in FAMILIES}
"""What float32 leaves of a gradient; Kimi Linear's delta rule is the longer computation."""


def strategies(read_scale):
    full = [FullAttnRes(read_scale=read_scale)]
    return full + [BlockAttnRes(sublayers_per_block=size, read_scale=read_scale) for size in SIZES]


def logits_and_gradients(model, ids):
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and ".residual." not in n}
    return outputs.logits.detach(), gradients


def relative(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", strategies("sum"), ids=str)
def test_sum_scale_equals_prenorm_in_logits_and_all_base_gradients(family, strategy):
    plain, ids = make(family), torch.randint(3, 96, (2, 11))
    converted = convert(copy.deepcopy(plain), strategy)
    expected, expected_gradients = logits_and_gradients(plain, ids)
    actual, gradients = logits_and_gradients(converted, ids)
    assert relative(actual, expected) < 1e-5
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert relative(gradient, expected_gradients[name]) < 1e-5, name
    queries = [site.pseudo_query.grad for site in converted.model.residual.sites]
    assert all(bool(query.abs().max() > 0) for query in queries[1:])  # training can start
    weights = [site.key_weight.grad for site in converted.model.residual.sites]
    assert all(bool((weight == 0).all()) for weight in weights)  # the score has the product of the two


class Sums:
    """At each site, the mean square of the residual sum per token, and the number of sources it is divided by."""

    def __init__(self):
        self.sites = []

    def on_read(self, site, state, value):
        sources = state.sources if isinstance(state, History) else (state.hidden,)
        self.sites.append((len(sources), sum(sources).detach().square().mean(-1)))

    def on_write(self, site, state, output): ...


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", strategies("mean"), ids=str)
@pytest.mark.parametrize("eps", [1e-12, 1e-6], ids=str)
def test_mean_scale_equals_prenorm_within_the_bound_of_the_reading_norm(family, strategy, eps):
    """A norm that reads the mean of n sources sees ``eps`` as ``n^2 eps``: relative error ``n^2 eps / (2 ms)`` at most.

    Each site adds its own error, and the sublayers after it pass it on; over the whole model the error of the logits
    stays within a small multiple of the sum over sites, and is rounding when eps is negligible. The derivative of a
    norm has the third power of the factor that the value has once, so its relative error is three times as large.
    """
    plain, ids = make(family, rms_norm_eps=eps), torch.randint(3, 96, (2, 11))
    converted, sums = convert(copy.deepcopy(plain), strategy), Sums()
    expected, expected_gradients = logits_and_gradients(plain, ids)
    with converted.model.residual.listen(sums):
        actual, gradients = logits_and_gradients(converted, ids)
    bound = sum((count**2 * eps / (2 * mean_square.min())).item() for count, mean_square in sums.sites)
    assert relative(actual, expected) < 1e-5 + 4 * bound
    for name, gradient in gradients.items():
        assert relative(gradient, expected_gradients[name]) < ROUNDING[family] + 3 * 4 * bound, name
    if eps == 1e-12:
        assert 3 * 4 * bound < 1e-5


@pytest.mark.parametrize("strategy", strategies("mean"), ids=str)
def test_one_norm_obeys_the_bound_token_by_token(strategy):
    plain, ids, eps = make("llama"), torch.randint(3, 96, (2, 11)), 1e-6
    converted = convert(plain, strategy)
    reads = []

    class Keep:
        def on_read(self, site, state, value):
            reads.append((state.sources, value))

        def on_write(self, site, state, output): ...

    with torch.no_grad(), converted.model.residual.listen(Keep()):
        converted(ids)

    def norm(x):
        return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)

    for sources, value in reads:
        total = sum(source.double() for source in sources)
        bound = len(sources) ** 2 * eps / (2 * total.square().mean(-1))
        error = (norm(value) - norm(total)).norm(dim=-1) / norm(total).norm(dim=-1)
        assert bool((error <= bound + 1e-6).all())
