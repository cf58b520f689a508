"""A model divided by heads, columns and tokens is the same model: loss, gradients, weights after training, and text."""

import re

import pytest
import torch

from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm
from attnres.residual.rivals.hybrid_norm import HybridNorm
from attnres.residual.rivals.postnorm import PostNorm
from attnres.residual.rivals.projected import ProjectedResidual
from attnres.residual.variants.input_dependent import InputDependentQuery
from parallel.work_sequence import (
    accumulate,
    autocast_step,
    clip,
    count_exchanges,
    infer,
    look_through_head,
    own_losses,
    own_sources,
    reduce_once,
    refuse,
    refuse_misuse,
    replaced_parameter,
    step_against_whole,
    sum_replicated,
    train,
    unfrozen_parameter,
)
from strategies.cases import case_id, cases

BLOCK = BlockAttnRes(sublayers_per_block=3)
FOUR = {"num_key_value_heads": 4}
EXACT = 1e-12
ROUNDED = 1e-5  # a family whose norms are float32 in a float64 model
FLOAT32_NORMS = ("gemma2", "gemma3")
FAMILIES = (
    "qwen3",
    "qwen2",
    "mistral",
    "phi3",
    "smollm3",
    "olmo2",
    "gemma2",
    "gemma3",
    "gpt_neox",
    "gpt_neox_sequential",
)


def check_step(processes, ranks, family, strategy, tokens, changes=None, allowed=EXACT, **options):
    for loss, gradient, name in processes.run(
        ranks, step_against_whole, family, strategy, tokens, changes or {}, options
    ):
        assert loss < allowed
        assert gradient < allowed, name


@pytest.mark.parametrize(
    ("ranks", "tokens", "changes"),
    [(2, 8, {}), (2, 7, {}), (4, 8, FOUR), (4, 6, FOUR), (4, 3, FOUR)],
    ids=["2 ranks", "2 ranks, 7 tokens", "4 ranks", "4 ranks, 6 tokens", "4 ranks, 3 tokens"],
)
def test_loss_and_all_gradients_equal_the_whole_models(processes, ranks, tokens, changes):
    check_step(processes, ranks, "llama", BLOCK, tokens, changes)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpointed", "reentrant"])
@pytest.mark.parametrize("late", [False, True], ids=["in turn", "backward at the end"])
def test_micro_batches_of_different_length_accumulate(processes, reentrant, late):
    options = {} if reentrant is None else {"reentrant": reentrant}
    check_step(processes, 2, "llama", BLOCK, 5, {"tie_word_embeddings": True}, batches=3, late=late, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_a_plan_equal_the_whole_model(processes, family):
    check_step(processes, 2, family, BLOCK, 7, allowed=ROUNDED if family in FLOAT32_NORMS else EXACT)


@pytest.mark.parametrize(
    "strategy",
    [FullAttnRes(), BlockAttnRes(sublayers_per_block=3, phases="two"), PreNorm(), PostNorm(), HybridNorm()],
    ids=case_id,
)
def test_strategies_equal_the_whole_model(processes, strategy):
    check_step(processes, 2, "llama", strategy, 7, {"layers": 4})


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("strategy", [case for case in cases() if not case.crosses_tokens], ids=case_id)
def test_every_strategy_per_token_equals_the_whole_model(processes, strategy):
    """To fewer digits, since gates that random parameters saturate lose some: the order of the batch alone costs one
    of these gradients 4e-11."""
    check_step(processes, 2, "llama", strategy, 7, {"layers": 4}, allowed=1e-9, batches=2)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", range(3, 14))
@pytest.mark.parametrize("strategy", [FullAttnRes(), BLOCK, BlockAttnRes(num_blocks=2, phases="two")], ids=case_id)
def test_every_number_of_tokens_equals_the_whole_model(processes, ranks, tokens, strategy):
    check_step(processes, ranks, "qwen3", strategy, tokens, FOUR, reentrant=bool(tokens % 2), batches=2)


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 7), (4, 5)])
@pytest.mark.parametrize("strategy", [BLOCK, FullAttnRes()], ids=case_id)
def test_each_tokens_sources_are_on_one_rank(processes, ranks, tokens, strategy):
    results = processes.run(ranks, own_sources, strategy, tokens)
    whole = results[0][1]
    together = torch.cat([own for own, _ in results], dim=2)
    torch.testing.assert_close(together, whole, rtol=EXACT, atol=1e-13)


@pytest.mark.parametrize("ranks", [2, 4])
def test_queries_and_key_weights_have_parts_of_gradients_until_they_are_summed_once(processes, ranks):
    results = processes.run(ranks, reduce_once, 8)
    (first, total, again, whole), *others = results
    for before, after, after_twice, _ in others:
        for site in range(1, len(first)):
            assert not torch.allclose(first[site], before[site])
        assert all(map(torch.equal, after, total))
        assert all(map(torch.equal, after, after_twice))
    assert all(map(torch.equal, total, again))
    for mine, its in zip(total, whole, strict=True):
        torch.testing.assert_close(mine, its, rtol=EXACT, atol=1e-14)


@pytest.mark.parametrize("keep", [False, True], ids=["set to none", "set to zero"])
@pytest.mark.parametrize("ask_between", [False, True], ids=["asked once", "asked in between"])
def test_nothing_counts_twice_whenever_the_sum_is_asked_for(processes, ask_between, keep):
    for error, name in processes.run(2, accumulate, ask_between, keep):
        assert error < EXACT, name


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.grid])])
def test_after_100_steps_queries_are_bitwise_equal_and_weights_those_of_one_process(processes, ranks):
    results = processes.run(ranks, train, 100, {})
    for queries, (error, name) in results:
        assert torch.equal(queries, results[0][0])
        assert error < 1e-11, name


@pytest.mark.parametrize("pass_over_all", ["foreach", "fused"])
def test_optimizers_that_take_groups_in_one_pass_work(processes, pass_over_all):
    for _, (error, name) in processes.run(2, train, 3, {pass_over_all: True}):
        assert error < EXACT, name


@pytest.mark.parametrize(("dtype", "total"), [(torch.bfloat16, 260.0), (torch.float32, 259.0), (torch.float64, 259.0)])
def test_gradients_are_summed_in_float32_at_least(processes, dtype, total):
    """In bfloat16, 256 + 1 is 256."""
    assert processes.run(4, sum_replicated, dtype, [256.0, 1.0, 1.0, 1.0]) == [total] * 4


def test_float64_gradients_are_summed_in_float64(processes):
    assert processes.run(2, sum_replicated, torch.float64, [1.0, 2.0**-40]) == [1 + 2.0**-40] * 2


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("tokens", [7, 8])
def test_losses_of_own_logits_add_up_to_the_whole_models(processes, tokens, tied):
    results = processes.run(2, own_losses, tokens, tied)
    assert [count for count, *_ in results] == [4, tokens - 4]
    for _, loss, gradient, name in results:
        assert loss < EXACT
        assert gradient < EXACT, name


@pytest.mark.parametrize(
    ("ranks", "dtype", "tokens"),
    [(2, torch.float64, 7), (4, torch.float64, 3), (4, torch.float32, 9), (2, torch.bfloat16, 8)],
    ids=["float64", "fewer tokens than ranks", "float32", "bfloat16"],
)
@pytest.mark.parametrize("strategy", [BLOCK, FullAttnRes(phases="two", read_scale="sum")], ids=case_id)
def test_inference_gives_the_whole_models_logits_and_text(processes, ranks, dtype, tokens, strategy):
    allowed = {torch.float64: EXACT, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for error, expected, found in processes.run(ranks, infer, strategy, dtype, tokens):
        assert error < allowed
        assert found == expected or dtype == torch.bfloat16


def test_hidden_states_can_be_looked_at_through_norm_and_head(processes):
    for same, shape in processes.run(2, look_through_head):
        assert same
        assert shape == (2, 7, 96)


def test_gradients_are_clipped_by_the_norm_of_the_whole_model(processes):
    for expected, norm, error, name in processes.run(2, clip):
        assert norm == pytest.approx(expected, rel=EXACT)
        assert error < 1e-7, name  # PyTorch scales in float32


def test_each_sublayer_costs_one_gather_and_one_reduce_scatter_each_way(processes):
    """Beside the 6 sublayers: final hidden states and logits are gathered, and backward the embedding's gradient; the
    divided head sums the gradient of what it is given."""
    for forward, backward in processes.run(2, count_exchanges):
        assert forward == {"gather": 6 + 2, "scatter": 6, "reduce": 0}
        assert backward == {"gather": 6 + 1, "scatter": 6, "reduce": 1}


def test_autocast_keeps_the_dtypes_of_the_whole_model(processes):
    for expected, found, gradients, error, *_ in processes.run(2, autocast_step):
        assert found == expected == torch.bfloat16
        assert gradients == {torch.float32}
        assert error < 5e-2


@pytest.mark.parametrize(
    ("ranks", "family", "strategy", "changes", "message"),
    [
        (4, "llama", BLOCK, {}, "num_key_value_heads is 2, which 4 tensor ranks do not divide; allowed here: 1, 2"),
        (4, "llama", BLOCK, {"num_attention_heads": 2}, "num_attention_heads is 2"),
        (4, "llama", BLOCK, {**FOUR, "intermediate_size": 50}, "layers.0.mlp.gate_proj.out_features is 50"),
        (2, "llama", ProjectedResidual(), {}, "projected residual looks at other tokens"),
        (2, "gpt2", BLOCK, {}, "GPT-2 has no tensor-parallel plan in Transformers"),
        (2, "qwen3_moe", BLOCK, {}, "Qwen3-MoE: the tensor-parallel plan has layers.1.mlp.experts (moe_tp_experts)"),
        (
            2,
            "deepseek_v3",
            BLOCK,
            {},
            "DeepSeek-V3: the tensor-parallel plan does not cover layers.0.self_attn",
        ),
        (2, "llama", InputDependentQuery(), {}, None),
    ],
    ids=["key heads", "heads", "width", "crosses tokens", "no plan", "experts", "not covered", "is fine"],
)
def test_what_cannot_be_divided_is_refused_on_every_rank(processes, ranks, family, strategy, changes, message):
    for answer in processes.run(ranks, refuse, family, strategy, changes):
        if message is None:
            assert answer is None
        else:
            assert answer[0] == ("ConfigError" if " is " in message else "UnsupportedModelError")
            assert answer[1].startswith(message)


def test_misuse_is_refused(processes):
    for said in processes.run(2, refuse_misuse):
        for message, start in zip(said, MISUSE, strict=True):
            assert message.startswith(start)


MISUSE = (
    """ConfigError: the mesh has 2 dimensions (('data', 'tensor')); allowed is one: mesh["tensor"]""",
    """ConfigError: logits is 'some'; allowed are "all" and "own\"""",
    "",
    "UnsupportedModelError: AttnResLlamaModel is divided over 2 ranks already",
    "UnsupportedModelError: Linear has no residual strategy",
    """ConfigError: labels is given, but logits="own" are of a part of the tokens""",
    """ConfigError: logits_to_keep is 1, but logits="own" are of a part of the tokens""",
)


@pytest.mark.parametrize("how", ["by hand", "fsdp"])
def test_a_parameter_replaced_later_is_not_summed_silently(processes, how):
    for message in processes.run(2, replaced_parameter, how):
        assert re.match(r"(pseudo_query|key_weight) of DepthSite has been replaced since its gradients are", message)


def test_a_frozen_parameter_stays_without_gradient_and_is_to_be_unfrozen_before(processes):
    for message in processes.run(2, unfrozen_parameter):
        assert message.startswith("pseudo_query of DepthSite was frozen when the model was parallelized")
