"""Import of other people's checkpoints, and export to their formats: folder to folder, byte for byte.

Nothing is computed and no code of a folder runs: tensors get other names, and where only axes of length 1 differ other
shapes, and the config is translated. Everything is checked before anything is written; the new folder appears whole or
not at all.
"""

from pathlib import Path
from typing import Literal

from attnres.errors import CheckpointError
from attnres.interop.fla import FlashLinearAttention
from attnres.interop.folder import CheckpointFolder, check_absent, open_folder, write_folder
from attnres.interop.formats import Format
from attnres.interop.inkling2 import Inkling2
from attnres.interop.kimi_k3 import KimiK3
from attnres.interop.own import base_config, parse_own, read_own

Kind = Literal["auto", "kimi-k3", "fla", "inkling2"]
FORMATS: dict[str, Format] = {format.kind: format for format in (KimiK3(), FlashLinearAttention(), Inkling2())}
"""Every format by its word."""


def import_checkpoint(
    source_folder: Path | str, destination_folder: Path | str, *, kind: Kind = "auto", text_only: bool = False
) -> str:
    """Make a folder of ours from a checkpoint of another project.

    Args:
        source_folder: Folder with ``config.json`` and safetensors, in one file or several with an index.
        destination_folder: Folder to make; it must not be there yet.
        kind: Its format; ``"auto"`` tells by the config.
        text_only: Whether to leave out tensors that are not of the language model, as in a multimodal Kimi K3.

    Returns:
        The format.

    Raises:
        CheckpointError: The source is damaged, not of this format, contradicts itself or has no counterpart here, or
            the destination is there already. Nothing is written then.
    """
    destination = Path(destination_folder)
    check_absent(destination)
    folder = open_folder(Path(source_folder))
    format = FORMATS[_recognized(folder) if kind == "auto" else _named(kind)]
    translated = format.to_ours(folder, text_only=text_only)
    base_config(parse_own(folder, translated.config))  # what Transformers would refuse is refused now
    write_folder(destination, folder, config=translated.config, tensors=translated.tensors)
    return format.kind


def export_checkpoint(source_folder: Path | str, destination_folder: Path | str, *, kind: Kind = "auto") -> str:
    """Make a checkpoint in the format of another project from a folder of ours.

    Args:
        source_folder: Folder of ours: written by `import_checkpoint`, or by ``save_pretrained`` of a converted model.
        destination_folder: Folder to make; it must not be there yet.
        kind: The format; ``"auto"`` is that from which the folder was imported.

    Returns:
        The format.

    Raises:
        CheckpointError: The source is damaged, not one of ours or has no counterpart in the format, or the destination
            is there already. Nothing is written then.
    """
    destination = Path(destination_folder)
    check_absent(destination)
    own = read_own(open_folder(Path(source_folder)))
    origin = own.origin.get("kind")
    if kind == "auto" and origin not in FORMATS:
        raise CheckpointError(
            f"{own.folder.path} was not imported, so its format is not known; kind is one of {', '.join(FORMATS)}"
        )
    format = FORMATS[str(origin) if kind == "auto" else _named(kind)]
    translated = format.from_ours(own)
    write_folder(destination, own.folder, config=translated.config, tensors=translated.tensors)
    return format.kind


def _named(kind: str) -> str:
    if kind not in FORMATS:
        raise CheckpointError(f"kind is {kind!r}; allowed: auto, {', '.join(FORMATS)}")
    return kind


def _recognized(folder: CheckpointFolder) -> str:
    kinds = [kind for kind, format in FORMATS.items() if format.recognizes(folder.config)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise CheckpointError(f"{folder.path}: the config is at once of {' and '.join(kinds)}; allowed is one format")
    raise CheckpointError(
        f"{folder.path}: the config (model_type {folder.config.get('model_type')!r}) is none of {', '.join(FORMATS)}; "
        "it has no block size of attention residuals (attnres.convert gives a plain model attention residuals)"
    )
