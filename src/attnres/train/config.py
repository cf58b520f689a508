"""Everything that decides a run, in one frozen object that is written to the run folder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from attnres.errors import ConfigError
from attnres.optim import OptimConfig
from attnres.optim.config import require
from attnres.optim.schedule import decay_steps
from attnres.parallel.config import ParallelConfig
from attnres.residual import STRATEGIES, Strategy
from attnres.train.serialize import Unions, from_dict, to_dict

Family = Literal["llama", "qwen3", "kimi_linear"]
Precision = Literal["auto", "fp32", "bf16"]
Device = Literal["auto", "cpu", "cuda"]
ActivationCheckpointing = Literal["none", "reentrant", "non_reentrant"]
TrackerName = Literal["tensorboard", "wandb"]

UNIONS: Unions = {Strategy: {strategy.__name__: strategy for strategy in STRATEGIES.values()}}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder, before any residual strategy.

    Raises:
        ConfigError: A field is outside its range, or the numbers of heads do not divide.
    """

    family: Family = "llama"
    """Hugging Face family that the decoder is built from; without effect when ``hf_config`` is given."""
    hf_config: str | None = None
    """Path (or content) of a Hugging Face ``config.json`` to build from instead; it decides all the fields below."""
    pretrained: str | None = None
    """Folder of a Hugging Face checkpoint that a run starts from: its config decides all the fields below, and the
    model with its weights is converted, so that a read scale left open becomes ``"sum"``."""
    pretrained_sha256: str | None = None
    """Checksum of those weights. A run writes it into its folder, with the content of the config as ``hf_config``; give
    it to insist on certain weights."""
    hidden_size: int = 256
    """Width D."""
    intermediate_size: int = 768
    """Width inside the MLP."""
    num_hidden_layers: int = 8
    """Decoder layers; each is two sublayers."""
    num_attention_heads: int = 4
    """Query heads H."""
    num_key_value_heads: int = 4
    """Key and value heads."""
    tie_word_embeddings: bool = True
    """Whether the head is the embedding."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in the model's norms and the key norm."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        require(self.family in get_args(Family), "family", self.family, ", ".join(get_args(Family)))
        self._check_pretrained()
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        for name in sizes:
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("rms_norm_eps", "initializer_range"):
            require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        _divides("num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size)
        head = self.hidden_size // self.num_attention_heads
        require(head % 2 == 0, "hidden_size / num_attention_heads", head, "an even number, for rotary positions")
        _divides("num_key_value_heads", self.num_key_value_heads, "num_attention_heads", self.num_attention_heads)

    def _check_pretrained(self) -> None:
        require(self.pretrained != "", "pretrained", self.pretrained, "a folder, or None")
        if self.pretrained is None and self.pretrained_sha256 is not None:
            raise ConfigError(f"pretrained_sha256 is {self.pretrained_sha256!r} without pretrained; allowed: both")
        if self.pretrained is not None and self.hf_config is not None and self.pretrained_sha256 is None:
            raise ConfigError(
                f"pretrained={self.pretrained!r} and hf_config={self.hf_config!r} contradict each other; allowed: one, "
                "as a pretrained folder has a config of its own"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the model reads.

    Raises:
        ConfigError: A field is outside its range.
    """

    dataset: str = "bundled"
    """Path of a dataset folder, or ``"bundled"`` for the corpus that comes with the package."""
    vocab_size: int = 4096
    """Token ids of tokenizer and model."""
    context: int = 256
    """Tokens T of a training and evaluation window."""

    def __post_init__(self) -> None:
        require(bool(self.dataset), "dataset", self.dataset, 'a path or "bundled"')
        require(self.vocab_size >= 2, "vocab_size", self.vocab_size, "2 or more")
        require(self.context >= 1, "context", self.context, "1 or more")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at a time, and on what.

    Raises:
        ConfigError: A field is outside its range.
    """

    steps: int = 1000
    """Optimizer steps of the run; may be raised when a run is resumed."""
    batch_size: int = 16
    """Sequences of one forward and backward pass, of all data ranks together."""
    accumulation: int = 1
    """Passes whose gradients make one optimizer step; in a pipeline they are its micro-batches."""
    grad_clip: float | None = 1.0
    """Largest norm of all gradients together; None does not clip."""
    eval_every: int = 100
    """Optimizer steps between evaluations; 0 evaluates at the start and the end only."""
    eval_sequences: int = 128
    """Windows of the validation split that an evaluation reads, always the same ones."""
    checkpoint_every: int = 500
    """Optimizer steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    seed: int = 0
    """Decides the order of the data and every random number drawn in training."""
    precision: Precision = "auto"
    """``"bf16"``: autocast, weights stay float32. ``"auto"``: bf16 where the hardware has it, else fp32."""
    eval_precision: Precision | None = None
    """Of evaluations; None: that of training. Rounding may differ between strategies, and float32 leaves it out."""
    compile: bool = False
    """Whether the model runs through `torch.compile`; on several processes each decoder layer by itself."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Recompute the inside of each decoder layer in the backward pass instead of keeping it."""
    deterministic: bool = True
    """Take only algorithms that give the same bits every time; an operation without one raises and says so."""
    threads: int | None = None
    """CPU threads; None leaves PyTorch's number."""
    device: Device = "auto"
    """``"auto"``: CUDA where there is one, else the CPU."""
    init_from: str | None = None
    """Run or checkpoint folder whose weights the run starts from; only depth parameters may be absent there."""
    trackers: tuple[TrackerName, ...] = ()
    """Where metrics go besides ``metrics.jsonl``."""

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {
            "precision": Precision,
            "activation_checkpointing": ActivationCheckpointing,
            "device": Device,
        }
        if self.eval_precision is not None:
            choices["eval_precision"] = Precision
        for name, literal in choices.items():
            require(getattr(self, name) in get_args(literal), name, getattr(self, name), ", ".join(get_args(literal)))
        for name in ("steps", "batch_size", "accumulation", "eval_sequences", "keep_checkpoints"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("eval_every", "checkpoint_every", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require(self.seed < 2**63, "seed", self.seed, "below 2**63")
        clips = self.grad_clip is None or (self.grad_clip > 0 and math.isfinite(self.grad_clip))
        require(clips, "grad_clip", self.grad_clip, "more than 0, or None")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "1 or more, or None")
        unknown = [name for name in self.trackers if name not in get_args(TrackerName)]
        require(not unknown, "trackers", self.trackers, ", ".join(get_args(TrackerName)))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, completely.

    Raises:
        ConfigError: Parts contradict each other.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """The decoder."""
    residual: Strategy
    """Its residual strategy."""
    data: DataConfig = field(default_factory=DataConfig)
    """What it reads."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """How it is updated."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, how much at a time, and on what."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The processes it runs on; they decide no number but by rounding."""

    def __post_init__(self) -> None:
        require(isinstance(self.residual, Strategy), "residual", self.residual, ", ".join(UNIONS[Strategy]))
        self._check_start()
        self.parallel.check_rows(self.train.batch_size)
        steps, warmup, decay = self.train.steps, self.optim.warmup_steps, decay_steps(self.train.steps, self.optim)
        if warmup + decay > steps:
            decays = f" and optim.decay_fraction={self.optim.decay_fraction} ({decay} steps)" if decay else ""
            raise ConfigError(
                f"optim.warmup_steps={warmup}{decays} do not fit into train.steps={steps}; "
                "allowed: warm-up and decay together no longer than the run"
            )

    def _check_start(self) -> None:
        if self.model.pretrained is not None and self.train.init_from is not None:
            raise ConfigError(
                f"model.pretrained={self.model.pretrained!r} and train.init_from={self.train.init_from!r} contradict "
                "each other; allowed: one start"
            )
        if self.optim.train_only == "depth" and self.train.activation_checkpointing == "reentrant":
            raise ConfigError(
                "train.activation_checkpointing is 'reentrant' with optim.train_only='depth'; allowed: none, "
                "non_reentrant, as the reentrant form passes no gradient where its input needs none"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step is computed from."""
        return self.train.batch_size * self.train.accumulation * self.data.context

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values; the strategy is ``{"type": class name, ...}``."""
        return to_dict(self, unions=UNIONS)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RunConfig":
        """The inverse of `to_dict`; absent keys take their defaults.

        Raises:
            ConfigError: A key is unknown, or a value is not allowed; the message names it.
        """
        return from_dict(cls, data, unions=UNIONS)


def _divides(name: str, value: int, whole_name: str, whole: int) -> None:
    require(whole % value == 0, name, value, f"a divisor of {whole_name}, which is {whole}")
