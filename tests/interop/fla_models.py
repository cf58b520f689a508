"""flash-linear-attention's own models on a CPU.

Its model code runs as it is: blocks, schedule, names, caches of angles. Its GPU kernels are replaced, by its own plain
forms where it has them (the depth attention, the rotation) and by PyTorch otherwise (flash attention, RMSNorm, SwiGLU).
"""

import importlib
import sys
import warnings
from contextlib import contextmanager

import torch
from torch.nn import functional as F


def modules():
    """Its configuration and model classes. On a machine without a GPU it warns while it is imported.

    Transformers' Kimi Linear takes its GPU kernels if they can be imported by then, so it comes first: in tests
    warnings are errors, and it then takes PyTorch.
    """
    importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fla.models import transformer
        from fla.models.transformer import modeling_transformer
    return transformer, modeling_transformer


def make(**settings):
    """A small random model of its transformer family, with reads that matter."""
    transformer, _ = modules()
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 96,
        "initializer_range": 0.2,
        "rope_theta": 500.0,
        "pad_token_id": 0,
        **settings,
    }
    with _without_flash_attention():
        model = transformer.TransformerForCausalLM(transformer.TransformerConfig(**config)).eval()
    for name, parameter in model.named_parameters():
        if "res_proj" in name:
            torch.nn.init.normal_(parameter, std=0.5)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def logits(model, tokens):
    """Its forward pass, with plain forms of its kernels."""
    with _plain_kernels(), torch.no_grad():
        return model(tokens, use_cache=False).logits


@contextmanager
def _without_flash_attention():
    """Its attention layer asks for the package when it is made."""
    from fla.layers import attn

    with _replaced((attn, "flash_attn_func", _attend)):
        yield


@contextmanager
def _plain_kernels():
    from fla.layers import attn
    from fla.ops.attnres.naive import naive_attnres

    _, modeling = modules()
    rotary, norms, mlp = (sys.modules[f"fla.modules.{name}"] for name in ("rotary.ops", "norm.layernorm", "mlp"))

    def rotate(x, cos, sin, interleaved=False, seqlen_offsets=0, **rest):
        assert seqlen_offsets == 0
        assert all(value is None for value in rest.values())
        return rotary.rotary_embedding_ref(x, cos[: x.shape[1]], sin[: x.shape[1]], interleaved)

    def rms_norm(x, weight, bias, eps=1e-5, **rest):
        assert bias is None
        assert not any(rest.values())
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    with _replaced(
        (attn, "flash_attn_func", _attend),
        (modeling, "fused_attnres", naive_attnres),
        (rotary, "rotary_embedding", rotate),
        (norms, "rms_norm", rms_norm),
        (mlp, "swiglu", lambda gate, up: F.silu(gate) * up),
        (mlp, "swiglu_linear", lambda gate, up, weight, bias: F.linear(F.silu(gate) * up, weight, bias)),
    ):
        yield


def _attend(q, k, v, causal, window_size):
    """Causal attention of ``[batch, token, head, dim]``; a window is how far back and forth a query looks."""
    assert causal
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = distance >= 0
    if window_size != (-1, -1):
        back, forth = window_size
        assert forth == 0
        mask &= distance <= back
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@contextmanager
def _replaced(*places):
    before = [getattr(module, name) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)
