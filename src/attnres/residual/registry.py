"""Every strategy by its word on the command line."""

from attnres.residual.block import BlockAttnRes
from attnres.residual.full import FullAttnRes
from attnres.residual.prenorm import PreNorm
from attnres.residual.rivals.denseformer import DenseFormer
from attnres.residual.rivals.mhc import ManifoldHyperConnections
from attnres.residual.strategy import Strategy
from attnres.residual.variants.input_dependent import InputDependentQuery
from attnres.residual.variants.input_independent import InputIndependentMixing
from attnres.residual.variants.multi_head import MultiHeadAttnRes
from attnres.residual.variants.no_key_norm import NoKeyNorm
from attnres.residual.variants.sigmoid import SigmoidAttnRes
from attnres.residual.variants.window import SlidingWindow

ATTENTION_RESIDUALS: tuple[type[Strategy], ...] = (FullAttnRes, BlockAttnRes)
"""The paper's two forms."""
ABLATIONS: tuple[type[Strategy], ...] = (
    InputDependentQuery,
    InputIndependentMixing,
    SigmoidAttnRes,
    NoKeyNorm,
    SlidingWindow,
    MultiHeadAttnRes,
)
"""What the paper varies."""
EXTENSIONS: tuple[type[Strategy], ...] = ()
"""What has been built on it since."""
RIVALS: tuple[type[Strategy], ...] = (
    PreNorm,
    DenseFormer,
    ManifoldHyperConnections,
)
"""Other residual schemes."""

GROUPS: dict[str, tuple[type[Strategy], ...]] = {
    "Attention Residuals": ATTENTION_RESIDUALS,
    "ablations of the paper": ABLATIONS,
    "beyond the paper": EXTENSIONS,
    "other residuals": RIVALS,
}
"""All strategies in the order of tables."""

STRATEGIES: dict[str, type[Strategy]] = {cls.short_name: cls for group in GROUPS.values() for cls in group}
"""Every strategy by its word on the command line."""
