"""Every error that attnres raises on purpose.

One tree, so that a caller can catch all of it, and so that the command line can tell a user's mistake (one line, exit
status 2) from a defect of ours (a traceback). A message says what was wrong, the value seen, and what is allowed.
"""


class AttnResError(Exception):
    """Base of all errors that attnres raises on purpose."""


class ConfigError(AttnResError, ValueError):
    """A setting is wrong, or contradicts another one."""


class ShapeError(AttnResError, ValueError):
    """Tensors do not fit together in shape or dtype."""


class BackendUnavailableError(AttnResError, RuntimeError):
    """A backend was asked for by name and cannot run here."""


class UnsupportedModelError(AttnResError):
    """No adapter decomposes this model, or its proof failed."""


class CheckpointError(AttnResError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class DataError(AttnResError):
    """Text, tokenizer or token shards cannot be used."""


class TrainingError(AttnResError):
    """A run cannot go on, such as after a loss that is not finite."""
