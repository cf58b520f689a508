"""What each figure of the report shows: what is measured, in which unit, averaged over what.

A caption depends on the data (how many seeds, whether an arm was not measured), so it is made beside the figure and not
written into the template.
"""

from collections.abc import Sequence

from attnres.analysis.depth_figures import boundaries, color_limit, mean_matrix
from attnres.analysis.figures import FOCUS, SMOOTHING
from attnres.analysis.numbers import exact_duration, whole
from attnres.analysis.runs import Arm, Comparison, Depth
from attnres.analysis.table import matched_seconds


def loss_curves(comparison: Comparison) -> str:
    """Caption of the loss against tokens."""
    text = "Loss in nats per token against training tokens. Lines with points: validation loss" + _seeds(comparison)
    text += f". Thin lines: training loss, a moving mean over {SMOOTHING * 100:g} % of its records"
    text += _focus()
    if len(comparison.arms) > 1:
        text += " Lower panel: validation loss minus the baseline's at the same tokens, paired by seed."
    return text


def loss_over_time(comparison: Comparison) -> str:
    """Caption of the loss against time."""
    text = "Validation loss in nats per token against training time, without evaluation and checkpoints"
    text += _seeds(comparison) + _focus()
    seconds = matched_seconds(comparison)
    if seconds is not None and len(comparison.arms) > 1:
        text += f" The dashed line is the equal time of the table, {exact_duration(seconds)}."
    return text


def output_magnitude(comparison: Comparison) -> str:
    """Caption of the output magnitudes."""
    return "Root mean square of each sublayer's output, before it is added or mixed" + _measured(comparison)


def gradient_magnitude(comparison: Comparison) -> str:
    """Caption of the gradient magnitudes."""
    text = "Root mean square of the gradient of the loss (nats per token) at each sublayer's output"
    return text + _measured(comparison)


def input_magnitude(comparison: Comparison) -> str:
    """Caption of the magnitudes of reads."""
    text = "Root mean square of what each sublayer reads, before its norm, and of what the output reads"
    return text + _measured(comparison)


def mixing_matrices(comparison: Comparison) -> str:
    """Text above the mixing matrices, which share one scale."""
    limit = int(color_limit(comparison))
    return (
        "A row is a site: the input of a sublayer, or the output. A column is a source: the embedding, or the output "
        "of a sublayer. The colour is the weight of that source at that site divided by what an even mix of the site's "
        "sources would give it (the row's absolute weights divided by their mean, so that strategies with different "
        "scales compare): 1 is what a plain residual sum does. The logarithmic scale is the same for all arms and ends "
        f"at 1/{limit} and {limit}; what lies beyond has the end's colour. Weights are averaged over tokens and seeds; "
        "they say nothing about how large a source is."
    )


def mixing_matrix(arm: Arm) -> str:
    """Caption of one arm's mixing matrix."""
    ends = boundaries(arm.depths[0])
    text = f"{arm.label}, {_runs(len(arm.depths))}."
    if ends:
        text += f" Lines mark the block boundaries: a block closes after sublayer {_listing(ends)}."
        text += " Sublayers of one block share their weight, because a site reads their sum."
    elif arm.depths[0].block_ends:
        one = len(arm.depths[0].block_ends) == 1
        text += " One block spans all sublayers" if one else " Every sublayer is a source of its own"
        text += ", so there is no block boundary to draw."
    if (mean_matrix(arm.depths) < 0).any():
        text += " A small dash marks a negative weight, coloured by its size."
    return text


def _seeds(comparison: Comparison) -> str:
    if len(comparison.seeds) == 1:
        return ", one seed"
    left_out = any(len(arm.shown) < len(arm.runs) for arm in comparison.arms)
    return ", mean over seeds; bands span the smallest to the largest seed" + (
        "; unfinished runs of an arm that has finished ones are left out" if left_out else ""
    )


def _focus() -> str:
    share = f"{FOCUS * 100:g} %"
    return f". The vertical axis is fitted to what comes after the first {share} of the run; the rest lies outside."


def _measured(comparison: Comparison) -> str:
    depths = [depth for arm in comparison.arms for depth in arm.depths]
    text = f", over {_tokens(depths)} tokens of the trained model; no unit."
    if any(len(arm.depths) > 1 for arm in comparison.arms):
        text += " Lines are means over seeds; bands span the smallest to the largest seed."
    unmeasured = [arm.label for arm in comparison.arms if not arm.depths]
    return text + (f" Not measured (no depth.json): {', '.join(unmeasured)}." if unmeasured else "")


def _tokens(depths: Sequence[Depth]) -> str:
    counts = sorted({depth.tokens for depth in depths})
    return " or ".join(whole(count) for count in counts)


def _runs(count: int) -> str:
    return "one run" if count == 1 else f"mean of {count} runs"


def _listing(ends: Sequence[int]) -> str:
    texts = [str(end) for end in ends]
    if len(texts) > 8:
        return f"{', '.join(texts[:3])}, \u2026, {texts[-1]}"
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
