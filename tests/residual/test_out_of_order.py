"""Reads and writes off the schedule give what one phase gives: phase 1 belongs to sites, not to turns."""

import pytest
import torch

from attnres.ops import use_backend
from attnres.residual import OUTPUT, BlockAttnRes, FullAttnRes, Residual

SUBLAYERS, DIM = 20, 16
STRATEGIES = [lambda **k: BlockAttnRes(num_blocks=5, **k), lambda **k: FullAttnRes(**k)]


def make(strategy, training):
    torch.manual_seed(0)
    residual = Residual(strategy, SUBLAYERS, DIM, dtype=torch.float64).train(training)
    for site in residual.sites:
        torch.nn.init.normal_(site.pseudo_query, std=0.3)
    return residual


def gradients(residual, value, embedding):
    inputs = [embedding, *residual.parameters()]
    found = torch.autograd.grad(value.square().sum(), inputs, allow_unused=True)
    return [torch.zeros_like(each) if grad is None else grad for each, grad in zip(inputs, found, strict=True)]


def early_exit(residual, embedding, weight):
    """The output read in the middle of the model, as for an early exit or a look at the logits."""
    state, total = residual.start(embedding), 0
    for site in range(SUBLAYERS):
        if site in (6, 13):
            total = total + residual.read(state, OUTPUT)
        state = residual.write(state, site, torch.tanh(residual.read(state, site) @ weight))
    return total + residual.read(state, OUTPUT)


def dropped_sublayers(residual, embedding, weight):
    """Sublayers that are left out, as with stochastic depth: neither read nor written."""
    state = residual.start(embedding)
    for site in range(SUBLAYERS):
        if site not in (6, 9, 10, 13):
            state = residual.write(state, site, torch.tanh(residual.read(state, site) @ weight))
    return residual.read(state, OUTPUT)


def another_site(residual, embedding, weight):
    """A site that was put in the place of the one that phase 1 knew."""
    torch.manual_seed(1)
    new = residual.strategy.site(10, SUBLAYERS, DIM, eps=1e-6, device=None, dtype=torch.float64)
    torch.nn.init.normal_(new.pseudo_query, std=0.3)
    residual.sites[10] = new.train(residual.training)
    state = residual.start(embedding)
    for site in range(SUBLAYERS):
        state = residual.write(state, site, torch.tanh(residual.read(state, site) @ weight))
    return residual.read(state, OUTPUT)


@pytest.mark.parametrize("walk", [early_exit, dropped_sublayers, another_site], ids=lambda walk: walk.__name__)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["block", "full"])
@pytest.mark.parametrize("phases", ["auto", "two"])
def test_a_walk_off_the_schedule_is_that_of_one_phase(walk, training, strategy, phases):
    embedding = torch.randn(5, DIM, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(DIM, DIM, dtype=torch.float64) / 4
    results = []
    for way in ("one", phases):
        residual = make(strategy(phases=way), training)
        with use_backend("cpu"):
            value = walk(residual, embedding, weight)
            results.append([value, *gradients(residual, value, embedding)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
