"""Every strategy by its word on the command line."""

from attnres.residual.block import BlockAttnRes
from attnres.residual.full import FullAttnRes
from attnres.residual.prenorm import PreNorm
from attnres.residual.rivals.ddl import DeepDeltaLearning
from attnres.residual.rivals.deepnorm import DeepNorm
from attnres.residual.rivals.denseformer import DenseFormer
from attnres.residual.rivals.highway import Highway
from attnres.residual.rivals.hybrid_norm import HybridNorm
from attnres.residual.rivals.hyper_connections import HyperConnections
from attnres.residual.rivals.keel import Keel
from attnres.residual.rivals.laurel import Laurel
from attnres.residual.rivals.layerscale import LayerScale
from attnres.residual.rivals.mhc import ManifoldHyperConnections
from attnres.residual.rivals.mhc_lite import MHCLite
from attnres.residual.rivals.mrla import LayerAttention
from attnres.residual.rivals.muddformer import MUDDFormer
from attnres.residual.rivals.nanochat import NanochatResidual
from attnres.residual.rivals.postnorm import PostNorm
from attnres.residual.rivals.projected import ProjectedResidual
from attnres.residual.rivals.rescaled import RescaledResidual
from attnres.residual.rivals.rezero import ReZero
from attnres.residual.rivals.sandwich import SandwichNorm
from attnres.residual.rivals.siamese import SiameseNorm
from attnres.residual.strategy import Strategy
from attnres.residual.variants.block_lagged import BlockLaggedQuery
from attnres.residual.variants.block_mhc import BlockMHC
from attnres.residual.variants.cumulative import Cumulative
from attnres.residual.variants.cut_block import CutBlock
from attnres.residual.variants.delta import DeltaAttnRes
from attnres.residual.variants.gated import GatedAttnRes
from attnres.residual.variants.hybrid import Hybrid
from attnres.residual.variants.inkling2 import Inkling2
from attnres.residual.variants.input_dependent import InputDependentQuery
from attnres.residual.variants.input_independent import InputIndependentMixing
from attnres.residual.variants.learned_block import LearnedBlock
from attnres.residual.variants.low_rank_query import LowRankQuery
from attnres.residual.variants.multi_head import MultiHeadAttnRes
from attnres.residual.variants.no_key_norm import NoKeyNorm
from attnres.residual.variants.rms_block import RMSBlock
from attnres.residual.variants.sigmoid import SigmoidAttnRes
from attnres.residual.variants.sliced_key import SlicedKey
from attnres.residual.variants.top_k import TopK
from attnres.residual.variants.wav import WAV
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
EXTENSIONS: tuple[type[Strategy], ...] = (
    LowRankQuery,
    BlockLaggedQuery,
    SlicedKey,
    TopK,
    DeltaAttnRes,
    GatedAttnRes,
    Hybrid,
    CutBlock,
    LearnedBlock,
    RMSBlock,
    WAV,
    BlockMHC,
    Inkling2,
    Cumulative,
)
"""What has been built on it since."""
RIVALS: tuple[type[Strategy], ...] = (
    PreNorm,
    PostNorm,
    SandwichNorm,
    HybridNorm,
    DeepNorm,
    Keel,
    SiameseNorm,
    RescaledResidual,
    ReZero,
    LayerScale,
    Laurel,
    Highway,
    NanochatResidual,
    DenseFormer,
    ManifoldHyperConnections,
    MHCLite,
    HyperConnections,
    DeepDeltaLearning,
    LayerAttention,
    MUDDFormer,
    ProjectedResidual,
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
