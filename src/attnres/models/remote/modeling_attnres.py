"""Attention Residuals (arXiv 2603.15031) for a decoder of Transformers, in plain PyTorch.

This file lies in a checkpoint folder and needs nothing but torch and transformers:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

It reads Full and Block AttnRes on any decoder whose layers the config describes (``attnres_family``). With the package
``attnres`` installed and imported, that is used instead: it has fused kernels, every other strategy, and training at
speed.
"""

import copy
import inspect
import os
import shutil
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing
from transformers.utils.output_capturing import OutputRecorder


def depth_attention(sources: list[Tensor], query: Tensor, weight: Tensor, eps: float, scale: float) -> Tensor:
    """Mix the sources of each token by a softmax over depth (paper, Eq. 2-4), in float32."""
    if len(sources) == 1:
        return sources[0]
    values = [source.float() for source in sources]
    folded = query.float() * weight.float()
    scores = [(value * folded).sum(-1) * torch.rsqrt(value.square().mean(-1) + eps) for value in values]
    weights = torch.stack(scores, dim=-1).softmax(dim=-1)
    mixed = weights[..., :1] * values[0]
    for index, value in enumerate(values[1:], start=1):
        mixed = mixed + weights[..., index, None] * value
    return (mixed * scale).to(sources[0].dtype)


class Site(nn.Module):
    """One place where the history is read."""

    def __init__(self, dim: int, eps: float, closes_block: bool, like: Tensor):
        super().__init__()
        self.eps, self.closes_block = eps, closes_block
        self.pseudo_query = nn.Parameter(torch.zeros(dim, device=like.device, dtype=like.dtype))
        self.key_weight = nn.Parameter(torch.ones(dim, device=like.device, dtype=like.dtype))


class Residual(nn.Module):
    """The residual path: a state is the finished sources and the partial sum of the running block, if there is one."""

    def __init__(self, strategy: dict[str, Any], num_sublayers: int, dim: int, eps: float, like: Tensor):
        super().__init__()
        self.is_sum = strategy["read_scale"] == "sum"
        ends = set(block_ends(strategy, num_sublayers))
        self.sites = nn.ModuleList(Site(dim, eps, site + 1 in ends, like) for site in range(num_sublayers + 1))

    def read(self, state: Any, index: int) -> Tensor:
        """The input of a sublayer before its norm; index -1 is the output."""
        finished, partial = state
        sources = [*finished] if partial is None else [*finished, partial]
        site: Any = self.sites[index]
        scale = float(len(sources)) if self.is_sum else 1.0
        return depth_attention(sources, site.pseudo_query, site.key_weight, site.eps, scale)

    def write(self, state: Any, index: int, output: Tensor) -> Any:
        """The state after a sublayer; the given one stays as it is."""
        finished, partial = state
        partial = output if partial is None else partial + output
        site: Any = self.sites[index]
        return ((*finished, partial), None) if site.closes_block else (finished, partial)


def block_ends(strategy: dict[str, Any], num_sublayers: int) -> list[int]:
    """Sublayer counts at which a block is complete."""
    if strategy["type"] == "FullAttnRes":
        return list(range(1, num_sublayers + 1))
    size, count = strategy["sublayers_per_block"], strategy["num_blocks"]
    size = -(-num_sublayers // count) if size is None else size
    count = -(-num_sublayers // size) if count is None else count
    if strategy["remainder"] == "balanced":
        short, extra = divmod(num_sublayers, count)
        return [short * block + min(block, extra) for block in range(1, count + 1)]
    return [min(size * block, num_sublayers) for block in range(1, count + 1)]


class Tap(nn.Module):
    """Where ``output_hidden_states`` listens."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden``."""
        return hidden


class AttnResDecoderLayer(GradientCheckpointingLayer):
    """A decoder layer with the children of the family's own, which reads and writes the state."""

    def __init__(self, layer: nn.Module, family: dict[str, Any], residual: Residual, first_site: int):
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.tap = Tap()
        self.family, self.first_site, self.parallel = family, first_site, is_parallel(family, layer)
        self._names = tuple(inspect.signature(type(layer).forward).parameters)[2:]
        self._residual = (residual,)  # referred to, not owned

    def forward(self, hidden_states: Any, *positional: Any, **arguments: Any) -> Any:
        """Run the sublayers; takes and returns the state (the first layer takes the embedding)."""
        arguments = {**dict(zip(self._names, positional, strict=False)), **arguments}
        (residual,), site = self._residual, self.first_site
        state = ((hidden_states,), None) if site == 0 else hidden_states
        read = self.tap(residual.read(state, site))
        attended = self._sublayer("attention", read, arguments)
        if self.parallel:
            state = residual.write(state, site, attended + self._sublayer("mlp", read, {}))
        else:
            state = residual.write(state, site, attended)
            state = residual.write(state, site + 1, self._sublayer("mlp", residual.read(state, site + 1), {}))
        return state

    def _sublayer(self, kind: str, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        parts = self.family[kind]
        module = getattr(self, parts["module"])
        hidden = hidden if parts["norm"] is None else getattr(self, parts["norm"])(hidden)
        if kind == "attention":
            dropped = self.family["drops"].get(type(module).__name__, ())
            output = module(hidden_states=hidden, **{k: v for k, v in arguments.items() if k not in dropped})
        else:
            output = module(hidden)
        output = output[0] if isinstance(output, tuple) else output
        for name in (parts["output_norm"], parts["dropout"]):
            output = output if name is None else getattr(self, name)(output)
        return output


def is_parallel(family: dict[str, Any], layer: nn.Module) -> bool:
    """Whether a layer's attention and MLP are one sublayer."""
    parallel = family["parallel"]
    return getattr(layer, parallel) if isinstance(parallel, str) else parallel


def install(base: Any, config: Any) -> None:
    """Put the residual path into a decoder that has its family's own layers."""
    family, strategy = config.attnres_family, config.attnres
    if strategy["type"] not in ("FullAttnRes", "BlockAttnRes"):
        raise ValueError(f"attnres is {strategy['type']}; without the package attnres, FullAttnRes and BlockAttnRes")
    layers, norm = getattr(base, family["layers"]), getattr(base, family["norm"])
    firsts, sites = [], 0
    for layer in layers:
        firsts.append(sites)
        sites += 1 if is_parallel(family, layer) else 2
    like = next(iter(norm.parameters()), base.get_input_embeddings().weight)
    eps = next((e for e in (getattr(norm, n, None) for n in ("variance_epsilon", "eps")) if isinstance(e, float)), 1e-6)
    base.residual = Residual(strategy, sites, base.get_input_embeddings().weight.shape[-1], eps, like)
    replaced = [
        AttnResDecoderLayer(layer, family, base.residual, first) for layer, first in zip(layers, firsts, strict=True)
    ]
    setattr(base, family["layers"], nn.ModuleList(replaced))
    norm.tap, norm._residual = Tap(), (base.residual,)
    norm.register_forward_pre_hook(read_output)


def read_output(norm: Any, arguments: tuple[Any, ...]) -> tuple[Tensor] | None:
    """Before the final norm: read the output from the state."""
    (state,) = arguments
    return None if isinstance(state, Tensor) else (norm.tap(norm._residual[0].read(state, -1)),)


class AttnResConfigMixin:
    """The family's config, with the strategy and the description of its layers in it."""

    @property
    def num_hidden_states(self) -> int:
        """Entries of ``output_hidden_states``."""
        return self.num_hidden_layers + 1  # pyright: ignore[reportAttributeAccessIssue]

    def to_dict(self) -> dict[str, Any]:
        """The fields, under the name ``attnres``."""
        output = super().to_dict()  # pyright: ignore[reportAttributeAccessIssue]
        return {**output, "base_model_type": output["model_type"], "model_type": "attnres"}


class AttnResConfig(PreTrainedConfig):
    """Makes the config of a checkpoint's family."""

    model_type = "attnres"

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """A config of the family's own class, extended."""
        wants_unused = kwargs.pop("return_unused_kwargs", False)
        fields, unused = cls.get_config_dict(*args, **kwargs)
        base = CONFIG_MAPPING[fields["base_model_type"]]
        own = {name: value for name, value in fields.items() if name not in ("model_type", "base_model_type")}
        return config_class(base).from_dict(own, return_unused_kwargs=wants_unused, **unused)


@cache
def config_class(base: type) -> Any:
    """The config class of a family."""
    return type(f"AttnRes{base.__name__}", (AttnResConfigMixin, base), {"__module__": __name__})


class AttnResModelMixin:
    """What is added to the family's model class."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        base: Any = self.base_model  # pyright: ignore[reportAttributeAccessIssue]
        install(base, config)
        if AttnResModelMixin not in type(base).__mro__:
            base.__class__ = model_class(type(base), type(config))
        output_capturing._CAN_RECORD_REGISTRY[base] = base._can_record_outputs

    @classmethod
    def is_custom_code(cls) -> bool:
        """Names of weights are the family's."""
        return False

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model, and this file beside it."""
        super().save_pretrained(save_directory, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        shutil.copyfile(__file__, os.path.join(save_directory, "modeling_attnres.py"))

    def _init_weights(self, module: Any) -> None:
        if not isinstance(module, Site):
            super()._init_weights(module)  # pyright: ignore[reportAttributeAccessIssue]


@cache
def model_class(base: Any, config: type) -> Any:
    """The model class of a family."""
    recorder = OutputRecorder(Tap, capture_initial_hidden_state=False, num_hidden_layers_key="num_hidden_states")
    renamed = get_checkpoint_conversion_mapping(base.__name__)
    if renamed is not None:
        register_checkpoint_conversion_mapping(f"AttnRes{base.__name__}", renamed, overwrite=True)
    return type(
        f"AttnRes{base.__name__}",
        (AttnResModelMixin, base),
        {
            "__module__": __name__,
            "config_class": config,
            "_can_record_outputs": {**(base._can_record_outputs or {}), "hidden_states": recorder},
            "_no_split_modules": [*(base._no_split_modules or ()), "AttnResDecoderLayer", "Residual"],
        },
    )


class AttnResForCausalLM:
    """Makes the causal language model of a checkpoint's family."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Nothing to note: the folder has this file already."""

    @classmethod
    def from_pretrained(cls, *args: Any, config: Any, **kwargs: Any) -> Any:
        """Load the model, with its residual path or not at all."""
        options = {**kwargs, "config": config, "output_loading_info": True}
        model, info = cls._class(config).from_pretrained(*args, **options)
        keys = [*info["missing_keys"], *info["unexpected_keys"], *(str(key[0]) for key in info["mismatched_keys"])]
        wrong = [name for name in keys if "residual" in name.split(".")]
        if wrong:
            raise ValueError(f"the weights do not fit the strategy in the config: {', '.join(sorted(wrong))}")
        return (model, info) if kwargs.get("output_loading_info") else model

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return cls._class(config)._from_config(copy.deepcopy(config), **kwargs)

    @staticmethod
    def _class(config: Any) -> Any:
        return model_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config).__mro__[2]], type(config))
