"""Trained checkpoints to depth attention and back, folder to folder.

The model is loaded twice over, as it were: as the plain model it is, and with the residual strategy put in. Both read
the same text, and only if they say the same is anything written. What is written are the bytes of the source, not what
was loaded, so dtype and values of every weight stay as they are; the parameters of the residual path come beside them.
"""

import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from attnres.data.text import BundledText
from attnres.errors import CheckpointError, ConfigError, UnsupportedModelError
from attnres.interop.folder import CheckpointFolder, check_absent, open_folder, write_folder
from attnres.interop.loading import BROKEN, first_sentence, load_model_and_tokenizer
from attnres.interop.own import read_own
from attnres.interop.stored import StoredTensor, read_header
from attnres.models import convert, unconvert
from attnres.models.config import MODEL_TYPE
from attnres.models.families import Family
from attnres.models.install import family_of_converted
from attnres.models.proof import kernel_hint
from attnres.models.remote import CODE_FILE, check_remote, remote_code_text, remote_fields
from attnres.models.scale import scale_report
from attnres.residual import Residual, Strategy

ALLOWED = 1e-5
"""Largest relative difference of the logits, in the Euclidean norm, that counts as rounding of float32."""
TOKENS = 512
RESIDUAL = ".residual.sites."


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What the two models said about the same text."""

    model: str
    """Class of the model that was written."""
    strategy: str
    """Label of the residual strategy that was put in or taken out."""
    layers: int
    """Decoder layers."""
    sites: int
    """Places that read: sublayers and the output."""
    residual_parameters: int
    """Parameters of the residual path."""
    tokens: int
    """Tokens of the text."""
    largest_logit: float
    """Largest logit of the source in absolute value."""
    largest_difference: float
    """Largest difference of a logit."""
    relative_difference: float
    """Norm of the differences over the norm of the logits."""
    perplexity_before: float
    """Of the source on the text."""
    perplexity_after: float
    """Of what was written."""
    scale_sensitive: tuple[str, ...]
    """Parts that read without a norm, where reads are means."""
    largest_eps: float
    """Largest eps of the norms that follow a read; see `attnres.models.ScaleReport`."""

    @property
    def is_lossless(self) -> bool:
        """Whether the two models are the same to rounding."""
        return self.relative_difference <= ALLOWED

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        values = {name: _finite(value) for name, value in asdict(self).items()}
        return {**values, "lossless": self.is_lossless}


def convert_checkpoint(
    source: Path | str,
    destination: Path | str,
    strategy: Strategy,
    *,
    text: str | None = None,
    tokens: int = TOKENS,
    allow_change: bool = False,
    remote_code: bool = False,
    device: str = "cpu",
) -> ConversionReport:
    """Convert a checkpoint folder of a plain decoder into one with a residual strategy.

    Args:
        source: Folder with ``config.json``, safetensors and a tokenizer. Nothing in it is run.
        destination: Folder to make; it must not be there yet.
        strategy: The residual strategy; a read scale left open becomes ``"sum"``, which is lossless.
        text: What both models read; the first held-out words of the bundled corpus by default.
        tokens: At most so many tokens of it, and no more than the model's context.
        allow_change: Write even if the converted model says something else.
        remote_code: Also write code with which Transformers reads the folder where attnres is not installed.
        device: Where the models run, in float32.

    Returns:
        The difference between the two.

    Raises:
        CheckpointError: The source is damaged or has a strategy already, or the destination is there. Nothing is
            written.
        ConfigError: The strategy does not fit the depth, or a setting is out of range.
        UnsupportedModelError: The family cannot be decomposed, or the model would change by more than rounding and that
            was not allowed. Nothing is written.
    """
    destination = Path(destination)
    if tokens < 2:
        raise ConfigError(f"tokens is {tokens}; allowed: 2 or more")
    check_absent(destination)
    if remote_code:
        check_remote(strategy)
    folder = open_folder(Path(source))
    if folder.config.get("model_type") == MODEL_TYPE or "attnres" in folder.config:
        raise CheckpointError(
            f"{folder.path} has a residual strategy already ({folder.config.get('attnres')}); "
            "allowed is a plain model (attnres unconvert gives it back)"
        )
    model, words = load_model_and_tokenizer(folder, device=device)
    ids = _sample(words, model, text, tokens)
    before = _logits(model, ids)
    convert(model, strategy, allow_change=allow_change)
    base = model.base_model
    family = family_of_converted(base)
    report = _compare(model, base.residual, family, before, _logits(model, ids), ids)
    _refuse_change(report, folder, allow_change)
    config = _config(model, folder)
    texts = {}
    if remote_code:
        config |= remote_fields(family)
        texts[CODE_FILE] = remote_code_text()
    new = {name: value for name, value in model.state_dict().items() if RESIDUAL in name}
    with tempfile.TemporaryDirectory() as scratch:
        added = _store(new, folder, Path(scratch))
        write_folder(destination, folder, config=config, tensors=[*folder.tensors.values(), *added], texts=texts)
    return report


def unconvert_checkpoint(
    source: Path | str,
    destination: Path | str,
    *,
    text: str | None = None,
    tokens: int = TOKENS,
    allow_change: bool = False,
    device: str = "cpu",
) -> ConversionReport:
    """Take the residual strategy out of a checkpoint folder: the plain model, with the weights as they are.

    Lossless while the pseudo-queries are zero and reads are sums. Otherwise the report says by how much the model
    changes, and ``allow_change`` is needed. Arguments and errors are those of `convert_checkpoint`.
    """
    destination = Path(destination)
    if tokens < 2:
        raise ConfigError(f"tokens is {tokens}; allowed: 2 or more")
    check_absent(destination)
    folder = open_folder(Path(source))
    own = read_own(folder)
    model, words = load_model_and_tokenizer(folder, device=device)
    residual, family = model.base_model.residual, family_of_converted(model.base_model)
    ids = _sample(words, model, text, tokens)
    before = _logits(model, ids)
    unconvert(model, allow_change=True)  # by how much it changes is measured
    report = _compare(model, residual, family, before, _logits(model, ids), ids)
    _refuse_change(report, folder, allow_change)
    config = _config(model, folder)
    config["model_type"] = own.base_model_type
    tensors = [tensor for tensor in folder.tensors.values() if RESIDUAL not in tensor.name]
    write_folder(destination, folder, config=config, tensors=tensors)
    return report


def _finite(value: Any) -> Any:
    """The value, or None for a number that JSON has not."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sample(words: Any, model: Any, text: str | None, tokens: int) -> Tensor:
    """Ids ``[1, T]`` of the text that both models read."""
    context = getattr(model.config, "max_position_embeddings", None) or tokens
    ids = words(_held_out() if text is None else text, return_tensors="pt").input_ids[:, : min(tokens, context)]
    if ids.shape[1] < 2:
        raise ConfigError(f"the text has {ids.shape[1]} tokens; allowed: 2 or more")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= vocabulary:
        raise CheckpointError(f"the tokenizer has id {int(ids.max())}, but the model has {vocabulary} embeddings")
    return ids.to(model.device)


def _held_out() -> str:
    return next(iter(BundledText("valid"))).text


def _logits(model: Any, ids: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            return model(ids, use_cache=False).logits.float()
    except BROKEN as error:
        reason = first_sentence(error) + kernel_hint(error)
        raise CheckpointError(f"the {type(model).__name__} cannot be run: {reason}") from error


def _compare(
    model: Any, residual: Residual, family: Family, before: Tensor, after: Tensor, ids: Tensor
) -> ConversionReport:
    base, strategy = model.base_model, residual.strategy
    scale = scale_report(base, family) if getattr(strategy, "read_scale", None) == "mean" else None
    difference = (after - before).double()
    return ConversionReport(
        model=type(model).__name__,
        strategy=strategy.label,
        layers=len(getattr(base, family.layers)),
        sites=len(residual.sites),
        residual_parameters=sum(parameter.numel() for parameter in residual.parameters()),
        tokens=ids.shape[1],
        largest_logit=before.abs().max().item(),
        largest_difference=difference.abs().max().item(),
        relative_difference=_relative(difference, before.double()),
        perplexity_before=_perplexity(before, ids),
        perplexity_after=_perplexity(after, ids),
        scale_sensitive=() if scale is None else scale.without_norm,
        largest_eps=0.0 if scale is None else max((eps for _, eps in scale.eps), default=0.0),
    )


def _relative(difference: Tensor, before: Tensor) -> float:
    size = difference.norm().item()
    return size and size / before.norm().item() if bool(before.any()) else (math.inf if size else 0.0)


def _perplexity(logits: Tensor, ids: Tensor) -> float:
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    return math.exp(min(loss.item(), 700.0))


def _refuse_change(report: ConversionReport, folder: CheckpointFolder, allow_change: bool) -> None:
    if report.is_lossless or allow_change:
        return
    why = ""
    if report.scale_sensitive or report.largest_eps:
        parts = ", ".join(report.scale_sensitive[:3])
        why = f", because reads are means and {parts or f'norms have an eps of {report.largest_eps:g}'}"
        why += " read without a norm" if parts else ""
    raise UnsupportedModelError(
        f"{folder.path} would change: logits differ by {report.relative_difference:.2g} relative (largest "
        f"{report.largest_difference:.3g}), perplexity {report.perplexity_before:.4g} becomes "
        f"{report.perplexity_after:.4g}{why}; allowed is {ALLOWED:g}, or --allow-change"
    )


def _config(model: Any, folder: CheckpointFolder) -> dict[str, Any]:
    """The config of a model that was loaded in float32, with the dtype that the files have."""
    config = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    dtype = folder.config.get("dtype", folder.config.get("torch_dtype"))
    for name in ("dtype", "auto_map"):
        config.pop(name, None)
    return dict(sorted({**config, **({} if dtype is None else {"dtype": dtype})}.items()))


def _store(new: dict[str, Tensor], folder: CheckpointFolder, scratch: Path) -> list[StoredTensor]:
    """The parameters of the residual path as stored tensors, in the dtype of the norms, beside the last weights."""
    name = sorted({tensor.file.name for tensor in folder.tensors.values()})[-1]
    dtype = _stored_dtype(folder)
    save_file({key: value.to("cpu", dtype).contiguous() for key, value in new.items()}, scratch / name)
    tensors, _ = read_header(scratch / name)
    return tensors


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def _stored_dtype(folder: CheckpointFolder) -> torch.dtype:
    """The dtype that most vectors of the checkpoint have: norms keep theirs where weights are quantised."""
    kinds = [tensor.dtype for tensor in folder.tensors.values() if len(tensor.shape) == 1 and tensor.dtype in _DTYPES]
    return _DTYPES[max(sorted(set(kinds)), key=kinds.count)] if kinds else torch.float32
