"""The ledger: sublayers that return a constant one-hot vector, so that the list of sources can be read off.

It runs through the decoder layers, the loop and the final norm of a real converted Llama; only what a sublayer computes
is replaced.
"""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from attnres.models import convert
from attnres.models.families import FAMILIES
from attnres.models.layer import ResidualDecoderLayer, read_before
from attnres.residual import BlockAttnRes, FullAttnRes, Residual
from models.small import llama

CASES = [(6, 2), (6, 1), (5, 3), (4, 8), (26, 24), (186, 24)]
HALF = 1000.0  # the embedding, so that it cannot be mistaken for a sublayer's 1


class Constant(nn.Module):
    """A sublayer that puts out ``c_i`` whatever it reads."""

    def __init__(self, row, *, as_attention):
        super().__init__()
        self.register_buffer("row", row)
        self.as_attention = as_attention

    def forward(self, hidden_states, **_):
        output = self.row.expand_as(hidden_states).clone()
        return (output, None) if self.as_attention else output


class Sources:
    """Writes down the sources of each read."""

    def __init__(self):
        self.lists = []

    def on_read(self, site, state, value):
        assert site == len(self.lists)
        self.lists.append([source[0, 0] for source in state.sources])

    def on_write(self, site, state, output): ...


def constant_llama(num_sublayers):
    width = 4 * (num_sublayers // 4 + 1)
    model = LlamaForCausalLM(llama(layers=-(-num_sublayers // 2), hidden_size=width, num_attention_heads=1,
                                   num_key_value_heads=1, intermediate_size=4))  # fmt: skip
    unit = torch.eye(width)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = Constant(unit[2 * index], as_attention=True)
        if 2 * index + 1 < num_sublayers:
            layer.mlp = Constant(unit[2 * index + 1], as_attention=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(0).index_fill_(1, torch.tensor([width - 1]), HALF)
    return model, unit


def expected_sources(num_sublayers, size, unit):
    """Eq. 6 word by word: the embedding, each block complete before the site, then what the block has so far."""
    for site in range(num_sublayers + 1):
        complete = site // size
        sources = [HALF * unit[-1]] + [unit[b * size : (b + 1) * size].sum(0) for b in range(complete)]
        if site % size:
            sources.append(unit[complete * size : site].sum(0))
        yield sources


def check(lists, num_sublayers, size, unit):
    assert len(lists) == num_sublayers + 1
    for seen, expected in zip(lists, expected_sources(num_sublayers, size, unit), strict=True):
        assert len(seen) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


@pytest.mark.parametrize(("num_sublayers", "size"), [c for c in CASES if c[0] % 2 == 0], ids=str)
def test_ledger_of_a_converted_model(num_sublayers, size):
    unit = constant_llama(num_sublayers)[1]
    strategies = [BlockAttnRes(sublayers_per_block=size)] + ([FullAttnRes()] if size == 1 else [])
    for strategy in strategies:
        converted = convert(constant_llama(num_sublayers)[0], strategy)
        for site in converted.model.residual.sites:
            nn.init.normal_(site.pseudo_query)
        ledger = Sources()
        with converted.model.residual.listen(ledger), torch.no_grad():
            converted(torch.ones(1, 2, dtype=torch.long))
        check(ledger.lists, num_sublayers, size, unit)


def test_ledger_of_an_odd_number_of_sublayers():
    """Decoder layers come in pairs of sublayers, so the fifth sublayer is written by hand after two real layers."""
    num_sublayers, size = 5, 3
    model, unit = constant_llama(num_sublayers)
    base, ledger = model.model, Sources()
    residual = Residual(BlockAttnRes(sublayers_per_block=size), num_sublayers, unit.shape[0])
    base.residual = residual
    read_before(base.norm, base)
    state = base.embed_tokens(torch.ones(1, 2, dtype=torch.long))
    with residual.listen(ledger), torch.no_grad():
        for index, layer in enumerate(base.layers[:2]):
            state = ResidualDecoderLayer(layer, FAMILIES["LlamaDecoderLayer"], residual, 2 * index)(state)
        read = base.layers[2].input_layernorm(residual.read(state, 4))
        state = residual.write(state, 4, base.layers[2].self_attn(read)[0])
        base.norm(state)
    check(ledger.lists, num_sublayers, size, unit)
