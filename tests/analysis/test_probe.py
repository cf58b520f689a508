import pytest
import torch
from torch import nn

from attnres.analysis.mixing import mixing_matrix
from attnres.analysis.probe import probe
from attnres.models import build
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm
from models.small import llama

STRATEGIES = [
    PreNorm(),
    FullAttnRes(),
    FullAttnRes(read_scale="sum"),
    BlockAttnRes(sublayers_per_block=2),
    BlockAttnRes(sublayers_per_block=4, read_scale="sum"),
]


def random_model(strategy):
    model = build(llama(layers=3), strategy)
    for name, parameter in model.model.residual.named_parameters():
        nn.init.normal_(parameter, mean=float(name.endswith("key_weight")), std=0.5)
    return model


class Keep:
    def __init__(self):
        self.reads, self.outputs = [], []

    def on_read(self, site, state, value):
        self.reads.append(value.detach())

    def on_write(self, site, state, output):
        self.outputs.append(output.detach())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_mixing_matrix_reconstructs_every_read_of_every_token(strategy):
    model, ids, keep = random_model(strategy), torch.randint(3, 96, (2, 7)), Keep()
    with model.model.residual.listen(keep), torch.no_grad():
        model(ids)
    matrix = mixing_matrix(model, ids)
    assert matrix.shape == (2, 7, 7, 7)
    assert torch.equal(matrix, matrix.tril())
    values = torch.stack([model.model.embed_tokens(ids).detach(), *keep.outputs])
    for site, value in enumerate(keep.reads):
        torch.testing.assert_close(torch.einsum("bts,sbtd->btd", matrix[..., site, :], values), value)


def test_probe_measures_what_it_says():
    model, ids = random_model(BlockAttnRes(sublayers_per_block=4)), torch.randint(3, 96, (2, 8))
    inputs, targets, keep = ids[:, :-1], ids[:, 1:], Keep()
    with model.model.residual.listen(keep):
        model.eval()(inputs)
    model.train()
    result = probe(model, inputs, targets)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (result.num_sublayers, result.tokens, result.block_ends) == (6, 14, [4, 6])
    assert result.sublayers == ["attention", "mlp"] * 3
    assert result.output_magnitude == pytest.approx([o.pow(2).mean().sqrt().item() for o in keep.outputs])
    assert result.input_magnitude == pytest.approx([r.pow(2).mean().sqrt().item() for r in keep.reads])
    assert torch.tensor(result.mixing_matrix).sum(-1)[0] == 1
    rows = torch.tensor(result.mixing_matrix)
    assert torch.equal(rows[5, 1:5], rows[5, 1].expand(4))  # a block's weight stands at each of its sublayers
    assert all(magnitude > 0 for magnitude in result.gradient_magnitude)


def test_probe_gradient_is_that_of_the_mean_token_loss():
    model, ids = random_model(FullAttnRes()), torch.randint(3, 96, (1, 6))
    result = probe(model, ids[:, :-1], ids[:, 1:])
    hooked, seen = model.model.layers[-1].mlp, []
    handle = hooked.register_forward_hook(lambda *a: seen.append(a[2].retain_grad() or a[2]))
    logits = model(ids[:, :-1]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    handle.remove()
    assert result.gradient_magnitude[-1] == pytest.approx(seen[0].grad.pow(2).mean().sqrt().item(), rel=1e-5)
