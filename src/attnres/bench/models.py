"""The same Llama-shaped model under several residual strategies, for whole-model benchmarks.

All arms have the same base weights, in fact the same memory, so that no arm is luckier with it. The pseudo-queries of
the AttnRes arms are drawn, since zero queries would make every read a plain mean. The gate uses what zero queries are
good for: with the read scale ``"sum"`` every arm is then the plain model, in its loss and in all gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from attnres.bench.results import significant
from attnres.bench.timing import Times, paired_ratios, spread, taken
from attnres.errors import ConfigError
from attnres.models import build
from attnres.residual import BlockAttnRes, DepthSite, FullAttnRes, PreNorm, Strategy

PLAIN, PRENORM, BLOCK, FULL = "plain", "PreNorm", "Block", "Full"
"""The Hugging Face model as it is, and built with each strategy of ours."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Size of a Llama-shaped model; the MLP is as wide as 8/3 of the model, rounded up to 256."""

    layers: int
    dim: int
    head_dim: int = 64
    vocab: int = 2048
    """Small, so that the head, which is the same in every arm, does not hide what differs."""
    blocks: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; allowed: 1 or more")
        if self.dim % self.head_dim:
            raise ConfigError(f"dim is {self.dim}; allowed: a multiple of head_dim ({self.head_dim})")
        BlockAttnRes(num_blocks=self.blocks).block_ends(2 * self.layers)

    @property
    def config(self) -> LlamaConfig:
        """The Hugging Face config."""
        heads = self.dim // self.head_dim
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.dim,
            intermediate_size=-(-self.dim * 8 // 3 // 256) * 256 if self.dim >= 256 else -(-self.dim * 8 // 3),
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=self.head_dim,
            max_position_embeddings=2**17,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    @property
    def strategies(self) -> dict[str, Strategy]:
        """Every arm but the plain model, by name."""
        return {PRENORM: PreNorm(), BLOCK: BlockAttnRes(num_blocks=self.blocks), FULL: FullAttnRes()}


def make_arms(shape: ModelShape, device: torch.device, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """All arms, with one set of base weights and small random pseudo-queries."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(shape.config, dtype=dtype).to(device)
    arms = {PLAIN: plain}
    for name, strategy in shape.strategies.items():
        arms[name] = with_strategy(plain, strategy, dtype)
        _draw_queries(arms[name])
    return arms


def with_strategy(plain: Any, strategy: Strategy, dtype: torch.dtype) -> Any:
    """A model with a strategy and zero pseudo-queries around the weights of the plain one."""
    model = build(plain.config, strategy, dtype=dtype).to(plain.device)
    model.load_state_dict(plain.state_dict(), strict=False, assign=True)
    return model.requires_grad_()


def _draw_queries(model: Any) -> None:
    """Small random pseudo-queries, the same every time, so that scores have a spread of about one."""
    random = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, DepthSite):
            query = torch.randn(module.pseudo_query.shape, generator=random) / module.pseudo_query.numel() ** 0.5
            module.pseudo_query.data.copy_(query)


def draw_tokens(shape: ModelShape, batch: int, context: int, device: torch.device) -> Tensor:
    """Random token ids ``[batch, context]``."""
    random = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocab, (batch, context), generator=random).to(device)


def check_arms(shape: ModelShape, plain: Any, tokens: Tensor, *, allowed: float) -> dict[str, str]:
    """What is wrong with each strategy at zero queries, if anything: its loss and gradients against the plain model."""
    wrong, truth = {}, _loss_and_gradients(plain, tokens, plain)
    for name, strategy in shape.strategies.items():
        model = with_strategy(plain, strategy.with_read_scale("sum"), torch.float32)
        found = _loss_and_gradients(model, tokens, plain)
        errors = [((mine - true).norm() / true.norm()).item() for mine, true in zip(found, truth, strict=True)]
        worst = max(errors, key=lambda error: float("inf") if error != error else error)
        if not worst <= allowed:
            wrong[name] = f"wrong by {worst:.2g} at zero queries (allowed {allowed:.2g})"
    return wrong


def _loss_and_gradients(model: Any, tokens: Tensor, plain: Any) -> list[Tensor]:
    """The loss, and the gradients of every 2-D weight of the plain model, taken from this one by name."""
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    own = dict(model.named_parameters())
    weights = [own[name] for name, weight in plain.named_parameters() if weight.dim() == 2]
    return [loss.detach(), *torch.autograd.grad(loss, weights)]


def time_columns(times: Times, name: str) -> dict[str, Any]:
    """The columns on an arm's time: its spread, and its ratios to the plain model and to PreNorm in the same rounds."""
    own, ratio = spread(taken(times, name)), spread(paired_ratios(times, name, PLAIN))
    to_prenorm = paired_ratios(times, name, PRENORM) if PRENORM in times else []
    return {
        "median_ms": significant(1e3 * own.median),
        "low_ms": significant(1e3 * own.low),
        "high_ms": significant(1e3 * own.high),
        "rounds": own.count,
        "ratio_to_plain": significant(ratio.median),
        "ratio_low": significant(ratio.low),
        "ratio_high": significant(ratio.high),
        "ratio_to_prenorm": significant(spread(to_prenorm).median) if to_prenorm else None,
    }
