"""What must not be quantised, as the tools that quantise are told; and what happens where it is."""

import pytest
import torch
from torch import nn
from transformers.quantizers.quantizers_utils import should_convert_module

from attnres.errors import UnsupportedModelError
from attnres.interop import do_not_quantize
from attnres.models import build
from attnres.ops import depth_attention
from attnres.residual import STRATEGIES, BlockAttnRes
from interop.folders import randomise
from models.small import llama


def int8(tensor):
    """The nearest of 255 levels over the range of the tensor."""
    scale = tensor.abs().max() / 127
    return (tensor / scale).round() * scale if scale > 0 else tensor


def all_parameters(model):
    return {name for name, _ in model.named_parameters()}


def residual_parameters(model):
    return {name for name in all_parameters(model) if name.startswith("model.residual.")}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_parameter_of_the_residual_path_is_listed_and_nothing_else(name):
    model = build(llama(layers=4), STRATEGIES[name](**({"sublayers_per_block": 2} if name == "block" else {})))
    listed = set(do_not_quantize(model))
    assert listed & all_parameters(model) == residual_parameters(model)
    modules = {name for name, _ in model.named_modules()}
    assert listed <= modules | all_parameters(model)
    assert "model.residual" in listed


def test_a_list_for_transformers_leaves_all_of_the_base_to_be_quantised():
    """By the rule that bitsandbytes, torchao and others share in Transformers."""
    for name in ("block", "muddformer", "projected", "ddl"):
        model = build(llama(layers=4), STRATEGIES[name](**({"sublayers_per_block": 2} if name == "block" else {})))
        skipped = do_not_quantize(model)
        for module in filter(None, dict(model.named_modules())):
            assert should_convert_module(module, skipped) is not module.startswith("model.residual"), (name, module)


def test_int8_that_follows_the_list_leaves_depth_weights_alone():
    model = randomise(build(llama(layers=4), BlockAttnRes(sublayers_per_block=2))).eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    skipped = do_not_quantize(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in skipped:
                parameter.copy_(int8(parameter))
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert not changed & residual_parameters(model)
    assert "model.layers.1.mlp.up_proj.weight" in changed


def test_a_model_without_a_strategy_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear has no residual strategy of attnres"):
        do_not_quantize(nn.Linear(2, 2))


@pytest.mark.parametrize(("outlier", "least", "most"), [(1, 0.001, 0.01), (20, 0.05, 0.15)])
def test_int8_pseudo_queries_move_depth_weights_where_two_sources_are_close(outlier, least, most):
    """Two sources whose scores differ by 0.02: by how much the weight moves is what docs/interop.md tells."""
    change, flipped = weight_change(margin=0.02, outlier=outlier)
    assert least < change.mean() < most
    assert flipped > 0.1


def weight_change(*, margin, outlier, width=1024, tokens=512):
    """How far int8 rounding of a pseudo-query moves the weight of the first of two sources; how often the other wins.

    The sources of a token have the same length and, by the query, scores that differ by the margin. The query has one
    entry ``outlier`` times its largest, in a channel that the sources do not use; the levels of int8 reach up to it.
    """
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(width, generator=generator)
    query[0] = 0
    query *= 2 / query.norm()  # scores of random sources then have a standard deviation of 2
    first, second = torch.randn(2, tokens, width, generator=generator)
    first[:, 0] = second[:, 0] = 0
    first, second = (unit_scores(source, query, score) for source, score in ((first, 1 + margin), (second, 1.0)))
    query[0] = outlier * query.abs().max()
    before, after = (first_weight(first, second, vector) for vector in (query, int8(query)))
    return (after - before).abs(), ((after < 0.5) != (before < 0.5)).float().mean()


def unit_scores(source, query, score):
    """The source with mean square 1 and, as its inner product with the query, the score."""
    along = query / query.square().sum()
    across = source - (source @ query)[:, None] * along
    length = (source.shape[-1] - score**2 * along.square().sum()).sqrt()
    return score * along + length * torch.nn.functional.normalize(across, dim=-1)


def first_weight(first, second, query):
    return depth_attention([first, second], query, eps=0.0, return_weights=True).depth_weights[..., 0]
