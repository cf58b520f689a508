"""Other people's checkpoints with attention residuals: import, export, and what their tools must leave alone."""

from attnres.interop.checkpoints import FORMATS, Kind, export_checkpoint, import_checkpoint
from attnres.interop.quantisation import do_not_quantize
from attnres.interop.residual import load_residual

__all__ = ["FORMATS", "Kind", "do_not_quantize", "export_checkpoint", "import_checkpoint", "load_residual"]
