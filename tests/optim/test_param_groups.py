import pytest
import torch
from torch import nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM, LlamaConfig, LlamaForCausalLM

from attnres.errors import ConfigError
from attnres.optim import OptimConfig, build_optimizer, param_groups
from attnres.residual import BlockAttnRes, Residual


def llama(*, tied: bool) -> nn.Module:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    return LlamaForCausalLM(config)


def kimi_linear() -> nn.Module:
    config = KimiLinearConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_head_dim=8,
        linear_num_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return KimiLinearForCausalLM(config)


class WithDepth(nn.Module):
    """A decoder with depth parameters in three layouts: per site, as a ``[1, D]`` row, and stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.base = llama(tied=False)
        self.residual = Residual(BlockAttnRes(sublayers_per_block=2), 4, 16)
        self.row = nn.Module()
        self.row.pseudo_query = nn.Parameter(torch.zeros(1, 16))
        self.row.key_weight = nn.Parameter(torch.ones(1, 16))
        self.stacked = nn.Module()
        self.stacked.pseudo_query = nn.Parameter(torch.zeros(4, 16))

    def get_output_embeddings(self) -> nn.Module:
        return self.base.get_output_embeddings()


MODELS = {
    "llama": lambda: llama(tied=False),
    "llama-tied": lambda: llama(tied=True),
    "kimi_linear": kimi_linear,
    "with-depth": WithDepth,
}


def roles(model: nn.Module) -> dict[str, str]:
    return {name: group["name"] for group in param_groups(model, lr=1.0) for name, _ in group["params"]}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_every_trainable_parameter_is_in_exactly_one_group(name: str, optimizer: str) -> None:
    model = MODELS[name]()
    built = build_optimizer(model, OptimConfig(optimizer=optimizer))
    grouped = [id(parameter) for group in built.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_muon_gets_matrices_only_and_never_a_depth_parameter(name: str) -> None:
    built = build_optimizer(MODELS[name](), OptimConfig(optimizer="muon"))
    muon = next(part for part in built.parts if isinstance(part, torch.optim.Muon))
    names = [name for group in muon.param_groups for name in group["param_names"]]
    assert names
    assert all(group["name"] == "matrix" for group in muon.param_groups)
    assert not [name for name in names if name.endswith(("pseudo_query", "key_weight"))]
    assert not [name for name in names if "embed" in name or "lm_head" in name or "norm" in name]


def test_depth_parameters_have_their_own_group_without_decay_in_every_layout() -> None:
    groups = {group["name"]: group for group in param_groups(WithDepth(), lr=0.5, weight_decay=0.1, depth_lr_scale=3.0)}
    names = [name for name, _ in groups["depth"]["params"]]
    assert len(names) == 5 * 2 + 3
    assert {"row.pseudo_query", "row.key_weight", "stacked.pseudo_query"} <= set(names)
    assert groups["depth"]["weight_decay"] == 0.0
    assert groups["depth"]["lr"] == 1.5


def test_a_row_pseudo_query_moves_by_its_adam_step_and_not_by_newton_schulz() -> None:
    model = nn.Module()
    model.pseudo_query = nn.Parameter(torch.zeros(1, 4))
    model.linear = nn.Linear(4, 4)
    built = build_optimizer(model, OptimConfig(optimizer="muon", lr=0.01))
    model.pseudo_query.grad = torch.tensor([[1.0, -2.0, 3.0, -4.0]])
    built.step()
    torch.testing.assert_close(model.pseudo_query.data, torch.tensor([[-0.01, 0.01, -0.01, 0.01]]))


def test_weight_decay_is_on_matrices_only() -> None:
    decayed = {group["name"]: group["weight_decay"] for group in param_groups(kimi_linear(), lr=1.0, weight_decay=0.1)}
    assert decayed == {"matrix": 0.1, "expert": 0.1, "embedding": 0.0, "head": 0.0, "vector": 0.0}


def test_kimi_linear_parameters_have_the_role_of_their_kind() -> None:
    found = roles(kimi_linear())
    layer = "model.layers.1."
    assert found[layer + "mlp.experts.gate_up_proj"] == "expert"
    assert found[layer + "mlp.gate.weight"] == "matrix"
    assert found[layer + "self_attn.conv1d.weight"] == "vector"
    assert found[layer + "self_attn.forget_gate.A_log"] == "vector"
    assert found[layer + "input_layernorm.weight"] == "vector"
    assert found["lm_head.weight"] == "head"
    assert found["model.embed_tokens.weight"] == "embedding"


def test_a_tied_head_counts_once_as_embedding() -> None:
    found = roles(llama(tied=True))
    assert found["model.embed_tokens.weight"] == "embedding"
    assert "lm_head.weight" not in found


def test_rates_are_multiplied_per_group() -> None:
    config = OptimConfig(lr=0.1, embedding_lr_scale=2, head_lr_scale=3, vector_lr_scale=4, depth_lr_scale=5)
    built = build_optimizer(WithDepth(), config)
    built.set_lr(0.5)
    rates = {group["name"]: group["lr"] for group in built.param_groups}
    assert rates == pytest.approx({"matrix": 0.05, "embedding": 0.1, "head": 0.15, "vector": 0.2, "depth": 0.25})


def test_frozen_parameters_are_left_out() -> None:
    model = llama(tied=False)
    model.get_input_embeddings().weight.requires_grad_(False)
    assert "model.embed_tokens.weight" not in roles(model)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        param_groups(nn.Identity(), lr=1.0)
