"""With random queries and key weights, the model equals Eq. 2-6 evaluated in float64 by code that shares nothing."""

import pytest
import torch
from torch import nn

from attnres.models import convert
from attnres.residual import BlockAttnRes, FullAttnRes
from models.small import CONFIGS, make

FAMILIES = list(CONFIGS)


class Float64Norm(nn.Module):
    """RMSNorm in the input's own precision; Transformers' computes in float32 and would hide everything below 1e-7."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, hidden):
        mean_square = hidden.pow(2).mean(-1, keepdim=True)
        return hidden / torch.sqrt(mean_square + self.variance_epsilon) * self.weight


def float64_model(family):
    # torch's grouped_mm has no float64
    grouped = {"experts_implementation": "eager"} if family == "kimi_linear" else {}
    model = make(family, **grouped).double()
    for layer in model.model.layers:
        layer.input_layernorm = Float64Norm(layer.input_layernorm)
        layer.post_attention_layernorm = Float64Norm(layer.post_attention_layernorm)
    model.model.norm = Float64Norm(model.model.norm)
    return model


def by_the_paper(model, ids, size, scale):
    """The whole forward from the sublayers alone: no schedule, no state, no strategy of ours."""
    base = model.model
    kwargs = layer_arguments(model, ids)
    outputs, embedding = [], base.embed_tokens(ids)

    def read(site):
        blocks = [sum(outputs[at : at + size]) for at in range(0, site, size)]
        values = torch.stack([embedding, *blocks])
        parameters = base.residual.sites[site]
        keys = values / (values.pow(2).mean(-1, keepdim=True) + parameters.eps).sqrt() * parameters.key_weight
        alpha = torch.einsum("nbtd,d->nbt", keys, parameters.pseudo_query).softmax(0)
        return torch.einsum("nbt,nbtd->btd", alpha, values) * (len(values) if scale == "sum" else 1)

    for index, layer in enumerate(base.layers):
        attention = layer.self_attn(layer.input_layernorm(read(2 * index)), **kwargs[index])
        outputs.append(attention[0] if isinstance(attention, tuple) else attention)
        outputs.append(layer.mlp(layer.post_attention_layernorm(read(2 * index + 1))))
    return model.lm_head(Float64Norm(base.norm)(read(len(outputs))))


def layer_arguments(model, ids):
    """What each attention is called with, seen from outside."""
    seen = {}
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, at=at: seen.update({at: {k: v for k, v in kwargs.items() if k != "hidden_states"}}),
            with_kwargs=True,
        )
        for at, layer in enumerate(model.model.layers)
    ]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_model_with_random_queries_is_equations_2_to_6(family, size, scale):
    strategies = [BlockAttnRes(sublayers_per_block=size, read_scale=scale)]
    strategies += [FullAttnRes(read_scale=scale)] if size == 1 else []
    for strategy in strategies:
        model, ids = convert(float64_model(family), strategy), torch.randint(3, 96, (2, 7))
        for site in model.model.residual.sites:
            nn.init.normal_(site.pseudo_query)
            nn.init.normal_(site.key_weight, mean=1.0, std=0.3)
        with torch.no_grad():
            actual, expected = model(ids, use_cache=False).logits, by_the_paper(model, ids, size, scale)
        assert actual.dtype == torch.float64
        # Kimi Linear's delta attention and router compute in float32 whatever they are given
        tolerance = 1e-5 if family == "kimi_linear" else 1e-10
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
