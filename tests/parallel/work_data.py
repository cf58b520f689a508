"""What the tests of data ranks run on the ranks."""

import copy
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from transformers import KimiLinearConfig, LlamaConfig, Qwen3MoeConfig

from attnres.models import build
from attnres.optim import OptimConfig, build_optimizer
from attnres.parallel.clipping import clip_gradients
from attnres.parallel.config import ParallelConfig
from attnres.parallel.data_parallel import DataParallel
from attnres.parallel.mesh import Mesh
from attnres.residual import STRATEGIES as CLASSES
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm
from attnres.train.runtime import enable_activation_checkpointing

VOCABULARY = 32
STRATEGIES = {
    "full": FullAttnRes(),
    "block": BlockAttnRes(sublayers_per_block=2),
    "prenorm": PreNorm(),
    "mhc": CLASSES["mhc"](),
    "hybridnorm": CLASSES["hybridnorm"](),
}
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def config_of(family: str) -> Any:
    if family == "llama":
        return LlamaConfig(**SHAPE, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    if family == "qwen3-moe":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
        return Qwen3MoeConfig(**SHAPE, **heads, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8)
    return KimiLinearConfig(
        **SHAPE,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
        moe_intermediate_size=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        linear_head_dim=8,
        linear_num_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


@contextmanager
def quiet_dynamo() -> Iterator[None]:
    """Without the warning that Dynamo itself causes when it asks every input for its gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield


def take_plain_kernels() -> None:
    """Let Transformers load Kimi Linear without the Triton kernels of fla-core, which need a GPU wherever they are."""
    before = sys.modules.get("fla")
    sys.modules["fla"] = None  # pyright: ignore[reportArgumentType]
    try:
        importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    finally:
        del sys.modules["fla"]
        if before is not None:
            sys.modules["fla"] = before


def model_of(family: str, strategy: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    if family == "kimi-linear":
        take_plain_kernels()
    config = config_of(family)
    config._experts_implementation = "eager"  # the grouped one has no float64
    model = build(config, STRATEGIES[strategy], dtype=dtype).train()
    with torch.no_grad():  # so that depth attention is no plain mean
        for name, parameter in model.named_parameters():
            if name.endswith("pseudo_query"):
                parameter.normal_(std=0.5)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    scale = theirs.abs().max().clamp(min=1e-9)
    return float((ours - theirs).abs().max() / scale)


def largest(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert ours.keys() == theirs.keys()
    assert all((ours[name] is None) == (theirs[name] is None) for name in ours)
    return max(relative(whole(ours[name]), theirs[name]) for name in ours if ours[name] is not None)


def compare_with_one_process(
    strategy: str,
    sharding: str,
    *,
    family: str = "llama",
    optimizer: str = "adamw",
    checkpointing: str = "none",
    precision: str = "fp64",
    compiled: bool = False,
    steps: int = 3,
    bound: float = 0.05,
) -> dict[str, float]:
    """Train a model on the data ranks, and the same model as one process would; the largest differences of all."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model, reference = model_of(family, strategy, dtype), model_of(family, strategy, dtype)
    for each in (model, reference):
        enable_activation_checkpointing(each, checkpointing)
    mesh = Mesh(ParallelConfig(data=torch.distributed.get_world_size(), sharding=sharding), device="cpu")  # pyright: ignore[reportArgumentType]
    if compiled:
        for layer in model.base_model.layers:
            layer.compile(backend="eager")
    ranks = DataParallel(model, mesh, sharding=sharding, reentrant=checkpointing == "reentrant")  # pyright: ignore[reportArgumentType]
    settings = OptimConfig(optimizer=optimizer, lr=1e-3)  # pyright: ignore[reportArgumentType]
    optimizers = [build_optimizer(each, settings) for each in (model, reference)]
    found = {"loss": 0.0, "gradient": 0.0, "norm": 0.0, "weight": 0.0}
    for step in range(steps):
        passes = _passes(step)
        for each in optimizers:
            each.zero_grad()
        loss = _step(ranks, mesh, passes, precision)
        norm = clip_gradients(model.named_parameters(), bound=bound, device="cpu", shards=[mesh.data_group])
        expected = sum(_loss(reference, tokens, precision) / len(passes) for tokens in passes)
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), bound)
        expected = expected.detach()
        found["loss"] = max(found["loss"], abs(float(loss - expected)) / float(expected))
        found["norm"] = max(found["norm"], abs(float(norm - expected_norm)) / float(expected_norm))
        found["gradient"] = max(found["gradient"], largest(_gradients(model), _gradients(reference)))
        for each in optimizers:
            each.step()
    found["weight"] = largest(dict(model.named_parameters()), dict(reference.named_parameters()))
    found["local"] = sum(_local(parameter) for parameter in model.parameters())
    found["total"] = sum(parameter.numel() for parameter in reference.parameters())
    return found


def forget_groups() -> None:
    """Make DTensor forget the groups of an earlier call of the pool, which it would take for those of this one."""
    _clear_python_sharding_prop_cache()
    _clear_fast_path_sharding_prop_cache()


def several(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """One call of the pool for many cases."""
    forget_groups()
    with quiet_dynamo():
        return [compare_with_one_process(**case) for case in cases]


def _local(parameter: Any) -> int:
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel()


def _gradients(model: Any) -> dict[str, Any]:
    return {name: copy.copy(parameter.grad) for name, parameter in model.named_parameters()}


def _passes(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, VOCABULARY, (4, 9), generator=generator) for _ in range(2)]


def _step(ranks: DataParallel, mesh: Mesh, passes: list[torch.Tensor], precision: str) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for index, tokens in enumerate(passes):
        own = tokens.chunk(mesh.config.data)[mesh.data_rank]
        ranks.before_pass(is_last=index == len(passes) - 1)
        loss = _loss(ranks.model, own, precision) / len(passes)
        loss.backward()
        total += loss.detach()
    ranks.finish()
    torch.distributed.all_reduce(total)
    return total / mesh.config.data


def _loss(forward: Any, tokens: torch.Tensor, precision: str) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits = forward(input_ids=tokens[:, :-1], use_cache=False).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
