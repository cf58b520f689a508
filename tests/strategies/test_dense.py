"""MRLA, MUDDFormer and the projected residual: their formulas in plain loops, where they start, what they refuse."""

import math

import pytest
import torch
from transformers import LlamaConfig

from attnres.errors import ConfigError, UnsupportedModelError
from attnres.models import build
from attnres.residual import OUTPUT, PreNorm, Residual
from attnres.residual.drawing import draw_normal
from attnres.residual.rivals.mrla import LayerAttention
from attnres.residual.rivals.muddformer import MUDDFormer
from attnres.residual.rivals.projected import ProjectedResidual
from models.small import CONFIGS
from strategies.cases import SETTINGS, case_id
from strategies.toy import DIM, EPS, SUBLAYERS, toy

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def settings(cls):
    return [cls(**values) for values in SETTINGS.get(cls.short_name, [{}])]


def rms_norm(value, eps=EPS):
    return value / (value.square().mean(-1, keepdim=True) + eps).sqrt()


def embed():
    return torch.randn(2, 5, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def agree(model, run):
    with torch.no_grad():
        expected, (actual, _) = run(model), model(embed())
    assert len(expected) == len(actual) == SUBLAYERS + 1
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def tiny(strategy, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    return build(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.2, **changes), strategy).eval()


# ---- MRLA


def filtered(output, kernel):
    """A filter along the channels, tap by tap, with zeros outside."""
    normed, half = rms_norm(output), len(kernel) // 2
    columns = []
    for channel in range(DIM):
        taps = [(tap, channel + tap - half) for tap in range(len(kernel))]
        columns.append(sum(kernel[tap] * normed[..., place] for tap, place in taps if 0 <= place < DIM))
    return torch.stack(columns, dim=-1)


def by_heads(query, key, heads):
    """One score a head, as a list."""
    width = DIM // heads
    parts = [slice(width * head, width * (head + 1)) for head in range(heads)]
    return [(query[..., part] * key[..., part]).sum(-1, keepdim=True) / math.sqrt(width) for part in parts]


@pytest.mark.parametrize("strategy", settings(LayerAttention), ids=case_id)
def test_mrla_is_its_formula(strategy):
    heads, width = strategy.heads, DIM // strategy.heads

    def run(model):
        hidden, attended = embed(), None
        reads, keys, values = [], [], []
        for index in range(SUBLAYERS):
            site = model.residual.site(index)
            reads.append(hidden)
            output = model.sublayer(index, hidden)
            query = filtered(output, site.query_kernel)
            keys.append(filtered(output, site.key_kernel))
            values.append(site.value_weight * output)
            if strategy.form == "base":
                scores = [by_heads(query, key, heads) for key in keys]
                parts = []
                for head in range(heads):
                    part = slice(width * head, width * (head + 1))
                    weights = torch.cat([score[head] for score in scores], dim=-1).softmax(-1)
                    parts.append(sum(weights[..., i, None] * value[..., part] for i, value in enumerate(values)))
                attended = torch.cat(parts, dim=-1)
            else:
                gates = [score.sigmoid().expand(2, 5, width) for score in by_heads(query, keys[-1], heads)]
                found = torch.cat(gates, dim=-1) * values[-1]
                attended = found if attended is None else found + site.carry * attended
            hidden = hidden + output + attended
        return [*reads, hidden]

    agree(toy(strategy), run)


@pytest.mark.parametrize("strategy", [*settings(LayerAttention), MUDDFormer()], ids=case_id)
def test_it_starts_as_prenorm(strategy):
    expected, _ = toy(PreNorm())(embed())
    reads, _ = toy(strategy, scramble=0.0)(embed())
    for ours, theirs in zip(reads, expected, strict=True):
        views = ours.unbind(-2) if ours.dim() > theirs.dim() else (ours,)
        for view in views:
            torch.testing.assert_close(view, theirs, **EXACT)


@pytest.mark.parametrize(("dim", "taps"), [(8, 3), (64, 3), (256, 5), (1024, 5), (4096, 7)])
def test_the_filters_of_mrla_have_the_taps_of_eca(dim, taps):
    near = int(abs((math.log2(dim) + 1) / 2))
    assert taps == (near if near % 2 else near + 1)
    residual = Residual(LayerAttention(), 1, dim)
    assert len(residual.site(0).query_kernel) == len(residual.site(0).key_kernel) == taps


def test_the_light_form_keeps_two_tensors_whatever_the_depth():
    model = toy(LayerAttention())
    state = model.residual.start(embed())
    for index in range(SUBLAYERS):
        state = model.residual.write(state, index, model.sublayer(index, model.residual.read(state, index)))
        assert state.values == state.keys == ()
        assert state.attended is not None


# ---- MUDDFormer


def test_muddformer_is_its_formula():
    def weights(site, newest):
        hidden = [(rms_norm(newest) * row).sum(-1) for row in site.in_weight]
        hidden = torch.stack([0.5 * h * (1 + torch.erf(h / math.sqrt(2))) for h in hidden], dim=-1)
        varied = [(hidden * row).sum(-1) for row in site.out_weight]
        streams, count = site.static_weight.shape
        return [[varied[s * count + j] + site.static_weight[s, j] for j in range(count)] for s in range(streams)]

    def mixes(site, finished):
        rows = weights(site, finished[-1])
        return [sum(row[j][..., None] * y for j, y in enumerate(finished)) for row in rows]

    def run(model):
        finished, reads = [embed()], []
        for layer in range(SUBLAYERS // 2):
            if layer == 0:
                residual = embed()
                reads.append(residual)
            else:
                query, key, value, residual = mixes(model.residual.site(2 * layer), finished)
                reads.append(torch.stack([query, key, value], dim=-2))
            hidden = residual + model.sublayer(2 * layer, reads[-1])
            reads.append(hidden)
            finished.append(hidden + model.sublayer(2 * layer + 1, hidden))
        return [*reads, *mixes(model.residual.site(OUTPUT), finished)]

    agree(toy(MUDDFormer()), run)


def test_the_weights_of_muddformer_have_the_published_sizes():
    residual = Residual(MUDDFormer(), 6, 16)
    for layer in (1, 2):
        site, outputs = residual.site(2 * layer), layer + 1
        assert site.in_weight.shape == (4 * outputs, 16)
        assert site.out_weight.shape == (4 * outputs, 4 * outputs)
        assert site.static_weight.shape == (4, outputs)
    last = residual.site(OUTPUT)
    assert [list(p.shape) for p in (last.in_weight, last.out_weight, last.static_weight)] == [[16, 16], [4, 16], [1, 4]]
    plain = [index for index in range(6) if not list(residual.site(index).parameters())]
    assert plain == [0, 1, 3, 5]


# ---- projected residual


@pytest.mark.parametrize("strategy", settings(ProjectedResidual), ids=case_id)
def test_the_projected_residual_is_its_formula(strategy):
    groups = strategy.channel_groups
    width = DIM // groups

    def attend(site, hidden, output):
        result = torch.empty_like(output)
        for batch in range(2):
            for group in range(groups):
                part = slice(width * group, width * (group + 1))
                stream, written = hidden[batch, :, part], output[batch, :, part]
                keys, values = written @ site.key_weight[group], written @ site.value_weight[group]
                for place in range(5):
                    query = stream[place] @ site.query_weight[group]
                    scores = torch.stack([query.dot(keys[t]) / math.sqrt(width) for t in range(place + 1)])
                    result[batch, place, part] = sum(w * values[t] for t, w in enumerate(scores.softmax(0)))
        return result

    def run(model):
        hidden, reads = embed(), []
        for index in range(SUBLAYERS):
            reads.append(hidden)
            hidden = hidden + attend(model.residual.site(index), hidden, model.sublayer(index, hidden))
        return [*reads, hidden]

    agree(toy(strategy), run)


@pytest.mark.parametrize("strategy", settings(ProjectedResidual), ids=case_id)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", [5, 200])
def test_a_later_token_leaves_earlier_reads_bitwise_unchanged(strategy, dtype, tokens):
    model = toy(strategy, dtype=dtype)
    embedding = torch.randn(2, tokens, DIM, dtype=dtype)
    changed = embedding.clone()
    place = tokens // 2
    changed[:, place] += 3.0
    with torch.no_grad():
        before, after = model(embedding)[0], model(changed)[0]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, :place], new[:, :place])
    assert not torch.equal(before[-1][:, place + 1 :], after[-1][:, place + 1 :])  # it does cross tokens


def test_the_source_of_a_projected_residual_is_what_the_stream_gains():
    model = toy(ProjectedResidual())
    strategy, site, state = model.residual.strategy, model.residual.site(0), model.residual.start(embed())
    output = model.sublayer(0, embed())
    gained = strategy.write(state, site, output).hidden - state.hidden
    torch.testing.assert_close(strategy.source_of(state, site, output), gained)
    assert not torch.allclose(gained, output)
    assert PreNorm().source_of(state, site, output) is output


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_projected_residual_generates_without_a_cache_and_refuses_a_step_with_one(family):
    torch.manual_seed(0)
    model, prompt = build(CONFIGS[family](), ProjectedResidual()).eval(), torch.tensor([[3, 7, 11, 5]])
    keywords = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    written = model.generate(prompt, use_cache=False, **keywords)
    with torch.no_grad():
        logits = model(written[:, :-1], use_cache=False).logits
    assert torch.equal(logits[:, 3:].argmax(-1), written[:, 4:])
    assert model(prompt, use_cache=True).cache.get_seq_length() == 4  # filling a cache is no step
    with pytest.raises(UnsupportedModelError, match="use_cache=False"):
        model.generate(prompt, use_cache=True, **keywords)


def test_a_strategy_that_stays_within_its_token_is_not_refused():
    model, prompt = tiny(MUDDFormer()), torch.tensor([[3, 7, 11, 5]])
    keywords = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        model.generate(prompt, use_cache=True, **keywords), model.generate(prompt, use_cache=False, **keywords)
    )


# ---- initial values and refusals


def test_drawn_values_depend_on_seed_and_place_and_leave_the_random_state_alone():
    torch.manual_seed(4)
    values = [torch.empty(50) for _ in range(4)]
    draw_normal(values[0], std=2.0, place=1)
    draw_normal(values[1], std=2.0, place=2)
    after = torch.rand(1)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(1), after)
    draw_normal(values[2], std=2.0, place=1)
    torch.manual_seed(5)
    draw_normal(values[3], std=2.0, place=1)
    assert torch.equal(values[0], values[2])
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[3])


@pytest.mark.parametrize("cls", [LayerAttention, MUDDFormer, ProjectedResidual])
def test_initial_values_are_the_same_off_the_meta_device(cls):
    direct = Residual(cls(), 4, 16)
    moved = Residual(cls(), 4, 16, device="meta").to_empty(device="cpu")
    assert dict(direct.named_parameters()).keys() == dict(moved.named_parameters()).keys()
    for ours, theirs in zip(moved.parameters(), direct.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (LayerAttention, {"form": "full"}),
        (LayerAttention, {"heads": 0}),
        (LayerAttention, {"taps": 4}),
        (LayerAttention, {"taps": True}),
        (MUDDFormer, {"last_expansion": 0}),
        (ProjectedResidual, {"channel_groups": 0}),
    ],
)
def test_a_wrong_setting_is_refused_by_name(cls, wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name} is "):
        cls(**wrong)


@pytest.mark.parametrize(
    ("strategy", "sublayers", "message"),
    [
        (LayerAttention(heads=3), 2, "heads is 3; allowed is a divisor of the width"),
        (ProjectedResidual(channel_groups=3), 2, "channel_groups is 3; allowed is a divisor of the width"),
        (MUDDFormer(), 3, "num_sublayers is 3; allowed is an even number"),
    ],
    ids=["heads", "groups", "odd"],
)
def test_a_model_that_does_not_fit_is_refused(strategy, sublayers, message):
    with pytest.raises(ConfigError, match=message):
        Residual(strategy, sublayers, DIM)
