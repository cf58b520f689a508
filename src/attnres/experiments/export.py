"""A trained model out of its run folder, as a Hugging Face folder."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from attnres.data.folders import publish_folder
from attnres.errors import CheckpointError
from attnres.experiments.models import end_of_text
from attnres.experiments.trained import load_trained
from attnres.interop.folder import check_absent


def export_run(folder: Path, destination: Path) -> Path:
    """Write the newest checkpoint of a run as a folder that ``from_pretrained`` and ``attnres unconvert`` take.

    Args:
        folder: Run folder.
        destination: Folder to make; it must not be there yet.

    Returns:
        The checkpoint.

    Raises:
        ConfigError, CheckpointError, DataError: It is not a run folder, or it is damaged, or the destination is there.
    """
    check_absent(destination)
    trained = load_trained(folder)
    index = end_of_text(trained.tokenizer)
    end = None if index is None else trained.tokenizer.id_to_token(index)
    words = PreTrainedTokenizerFast(tokenizer_object=trained.tokenizer, eos_token=end, pad_token=end)
    try:
        with publish_folder(destination, replace=False) as partial:
            trained.model.to("cpu").save_pretrained(partial)
            words.save_pretrained(partial)
    except FileExistsError as error:
        raise CheckpointError(f"{destination} exists already; allowed is a new folder") from error
    return trained.checkpoint
