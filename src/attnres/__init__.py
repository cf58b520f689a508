"""Attention Residuals (arXiv 2603.15031): a softmax attention over depth in place of the fixed residual sum.

>>> import attnres
>>> from attnres.residual import BlockAttnRes
>>> model = attnres.convert(hf_model, BlockAttnRes(sublayers_per_block=4))  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from attnres.registration import register_when_imported

__version__ = "0.1.0"
__all__ = ["build", "convert", "unconvert"]

if TYPE_CHECKING:
    from attnres.models import build, convert, unconvert


def __getattr__(name: str) -> Any:
    if name in __all__:  # Transformers is heavy; `import attnres` is not
        from attnres import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_when_imported()
