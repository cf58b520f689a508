"""Figures: valid, deterministic, and drawn where the data say."""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

import numpy as np
import pytest

from analysis.synthetic import depth_content, write_comparison, write_json, write_run
from attnres.analysis import load_comparison
from attnres.analysis.depth_figures import (
    boundaries,
    color_limit,
    gradient_magnitude,
    input_magnitude,
    mixing_matrix,
    output_magnitude,
    relative_weights,
    tick_step,
)
from attnres.analysis.figures import loss_curves, loss_over_time, paired_band
from attnres.analysis.svg import ARM_COLORS, BASELINE_COLOR, arm_styles

WHOLE = {
    "loss_curves": loss_curves,
    "loss_over_time": loss_over_time,
    "output_magnitude": output_magnitude,
    "gradient_magnitude": gradient_magnitude,
    "input_magnitude": input_magnitude,
}


@pytest.fixture(scope="module")
def drawn(comparison):
    """Every whole-comparison figure, drawn once."""
    return {name: draw(comparison, key="thing") for name, draw in WHOLE.items()}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "c"
    return load_comparison(write_comparison(folder, seeds=(0, 1), sublayers=12, sublayers_per_block=5, steps=100))


def texts(svg):
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def line(svg, gid):
    """Return the x and y of the ends of the line that a figure labels with this id."""
    path = re.search(rf'<g id="[^"]*{gid}">\s*<path d="([^"]+)"', svg)
    assert path is not None, f"{gid} is not drawn"
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", path.group(1))]
    return numbers[0::2], numbers[1::2]


@pytest.mark.parametrize("name", WHOLE)
def test_a_figure_is_valid_svg_with_its_own_ids_and_every_arm(drawn, name):
    svg = drawn[name]
    root = ElementTree.fromstring(svg)
    assert root.get("id") == "thing"
    assert root.get("aria-label")
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    assert all(each.startswith("thing") for each in ids)
    used = re.findall(r'(?:url\(#|href="#)([^")]+)', svg)
    assert set(used) <= set(ids)
    for label in ("PreNorm", "Block AttnRes (S=5)", "Full AttnRes"):
        assert label in texts(svg)
    for variable in ("--arm-0", "--arm-1", "--arm-2", "--ink"):
        assert f"var({variable}, #" in svg


@pytest.mark.parametrize("name", WHOLE)
def test_a_figure_is_the_same_every_time_and_bears_no_date(comparison, drawn, name):
    assert WHOLE[name](comparison, key="thing") == drawn[name]
    assert "<dc:date>" not in drawn[name]


def test_global_settings_of_matplotlib_neither_matter_nor_change(comparison):
    import matplotlib

    before = output_magnitude(comparison)
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9}):
        assert output_magnitude(comparison) == before
        assert matplotlib.rcParams["font.size"] == 30


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("loss_curves", ["loss (nats per token)", "training tokens (thousands)", "training, smoothed"]),
        ("loss_over_time", ["validation loss (nats per token)", "training time (seconds)", "equal time of the table"]),
        ("output_magnitude", ["RMS of the output", "sublayer", "attention", "MLP", "12"]),
        ("gradient_magnitude", ["RMS of the gradient", "sublayer"]),
        ("input_magnitude", ["RMS of the read", "out", "output read"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_axes_have_names_and_units(drawn, name, labels):
    assert set(labels) <= set(texts(drawn[name]))


def test_arms_keep_their_colour_and_the_baseline_is_grey(comparison):
    styles = arm_styles(comparison)
    assert styles["prenorm"].color == BASELINE_COLOR
    assert [styles[name].color for name in ("block", "full")] == list(ARM_COLORS[:2])


def test_attention_and_mlp_have_different_markers(comparison):
    svg = output_magnitude(comparison)
    of_block = re.findall(r'<use xlink:href="#([^"]*)"[^>]*fill: var\((--[^,]*),[^>]*stroke: var\(--arm-1,', svg)
    filled = Counter(mark for mark, fill in of_block if fill == "--arm-1")
    hollow = Counter(mark for mark, fill in of_block if fill == "--page")
    assert list(filled.values()) == [6]
    assert list(hollow.values()) == [6]
    assert not filled.keys() & hollow.keys()


def test_the_paired_difference_is_taken_seed_by_seed(comparison):
    prenorm, block, _ = comparison.arms
    result = paired_band(block, prenorm)
    at_the_end = [block.runs[seed].result.valid_loss - prenorm.runs[seed].result.valid_loss for seed in (0, 1)]
    assert result.mean[-1] == pytest.approx(np.mean(at_the_end))
    assert (result.low[-1], result.high[-1]) == pytest.approx((min(at_the_end), max(at_the_end)))


def measured(folder, arm="block", sublayers=12, sublayers_per_block=4, **changes):
    write_run(folder, arm=arm, sublayers=sublayers, sublayers_per_block=sublayers_per_block, steps=50)
    content = depth_content(arm, 0, sublayers, sublayers_per_block) | changes
    write_json(folder / "depth.json", content)
    return load_comparison(folder)


@pytest.mark.parametrize("last_block_is_named", [True, False], ids=["last end given", "last end left out"])
def test_block_boundaries_are_drawn_after_the_last_sublayer_of_each_block(tmp_path, last_block_is_named):
    ends = [5, 10, 12] if last_block_is_named else [5, 10]
    comparison = measured(tmp_path / "run", sublayers_per_block=5, block_ends=ends)
    svg = mixing_matrix(comparison, comparison.arms[0])
    x, y = line(svg, "stairs")
    left, cell = min(x), (max(x) - min(x)) / 13  # 13 columns: embedding and 12 sublayers
    top = min(y)
    assert len(re.findall(r'id="[^"]*source-boundary-', svg)) == 2
    for end in (5, 10):
        source_x, source_y = line(svg, f"source-boundary-{end}")
        # columns 0..end are left of the line: the embedding and the sublayers up to the end of the block
        assert source_x == pytest.approx([left + (end + 1) * cell] * 2, abs=0.01)
        assert source_y == pytest.approx([top + end * cell, max(y)], abs=0.01)
        site_x, site_y = line(svg, f"site-boundary-{end}")
        # rows 0..end-1 are above the line: the inputs of the sublayers of the block
        assert site_y == pytest.approx([top + end * cell] * 2, abs=0.01)
        assert site_x == pytest.approx([left, left + (end + 1) * cell], abs=0.01)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        pytest.param([], (), id="no blocks"),
        pytest.param([4, 8, 12], (4, 8), id="even blocks"),
        pytest.param([12], (), id="one block"),
        pytest.param(list(range(1, 13)), (), id="a block per sublayer"),
        pytest.param([11], (11,), id="a last block of one sublayer"),
    ],
)
def test_boundaries_lie_inside_the_model_and_between_real_blocks(tmp_path, ends, expected):
    depth = measured(tmp_path / "run", block_ends=ends).arms[0].depths[0]
    assert boundaries(depth) == expected


def test_weights_relative_to_an_even_mix_do_not_depend_on_the_scale_of_a_row():
    ones = np.tril(np.ones((3, 3)))
    expected = np.where(np.tri(3) > 0, 1.0, np.nan)
    np.testing.assert_allclose(relative_weights(ones), expected)
    np.testing.assert_allclose(relative_weights(ones / np.arange(1, 4)[:, None]), expected)
    softmax = np.array([[1.0, 0, 0], [0.75, 0.25, 0], [0.5, 0.5, 0.0]])
    np.testing.assert_allclose(relative_weights(softmax)[1:, :2], [[1.5, 0.5], [1.5, 1.5]])
    np.testing.assert_allclose(relative_weights(softmax)[2, 2], 0)
    np.testing.assert_allclose(relative_weights(-3 * softmax), relative_weights(softmax))


def test_the_colour_scale_holds_the_largest_weight_and_is_shared_by_all_arms(comparison, tmp_path):
    assert color_limit(measured(tmp_path / "even", arm="prenorm")) == 2
    limit = color_limit(comparison)
    largest = max(np.nanmax(relative_weights(arm.depths[0].mixing_matrix)) for arm in comparison.arms)
    assert limit / 2 < largest * 1.3
    for arm in comparison.arms:
        assert {f"1/{limit:.0f}", "1", f"{limit:.0f}", "weight \u00f7 even mix"} <= set(
            texts(mixing_matrix(comparison, arm))
        )


def test_negative_weights_are_marked_and_nan_weights_do_not_stop_the_figure(tmp_path):
    matrix = np.tril(np.ones((13, 13)))
    plain = measured(tmp_path / "a", mixing_matrix=matrix.tolist())
    assert "negative" not in mixing_matrix(plain, plain.arms[0])
    matrix[5, 2], matrix[7, :8] = -0.5, np.nan
    rival = measured(tmp_path / "b", mixing_matrix=matrix.tolist())
    svg = mixing_matrix(rival, rival.arms[0])
    assert 'id="mixing-negative"' in svg


def test_a_matrix_names_its_first_and_last_rows_and_columns(comparison):
    found = texts(mixing_matrix(comparison, comparison.arms[1]))
    assert {"emb", "12", "out", "1"} <= set(found)


@pytest.mark.parametrize(("count", "most", "expected"), [(2, 9, 1), (12, 9, 2), (32, 9, 4), (186, 32, 8)])
def test_ticks_are_thinned_until_they_fit(count, most, expected):
    assert tick_step(count, most) == expected


@pytest.mark.parametrize("sublayers", [1, 2, 3, 186])
def test_any_depth_can_be_drawn(tmp_path, sublayers):
    comparison = measured(tmp_path / "run", sublayers=sublayers, sublayers_per_block=24)
    for svg in (input_magnitude(comparison), mixing_matrix(comparison, comparison.arms[0])):
        found = texts(svg)
        assert "out" in found
        assert str(1) in found


def test_a_magnitude_axis_is_logarithmic_only_when_it_spans_decades(tmp_path):
    wide = measured(tmp_path / "wide", sublayers=4, gradient_magnitude=[1e-5, 1e-4, 1e-3, 1e-2])
    assert {"0.0001", "0.001", "0.01"} <= set(texts(gradient_magnitude(wide)))
    narrow = measured(tmp_path / "narrow", sublayers=4, gradient_magnitude=[0.5, 0.6, 0.7, 0.8])
    assert {"0.0", "0.2", "0.4"} <= set(texts(gradient_magnitude(narrow)))
    dead = measured(tmp_path / "dead", sublayers=4, gradient_magnitude=[0.0, 0.0, 1.0, 2.0])
    assert "0.00" in texts(gradient_magnitude(dead))
    nothing = measured(tmp_path / "nothing", sublayers=4, gradient_magnitude=[0.0] * 4)
    assert "0.0" in texts(gradient_magnitude(nothing))
    tiny = measured(tmp_path / "tiny", sublayers=4, gradient_magnitude=[2e-6, 3e-6, 4e-6, 5e-6])
    assert {"0", "2e-06", "4e-06"} <= set(texts(gradient_magnitude(tiny)))


def test_labels_are_text_and_never_formulas(tmp_path):
    folder = write_comparison(tmp_path / "c", arms=("prenorm", "full"), seeds=(0,), sublayers=2, steps=50)
    comparison = load_comparison(folder)
    odd = 'a $x_1$ <b> & "c"'
    comparison = type(comparison)(
        name="c",
        arms=tuple(type(arm)(name=arm.name, label=odd, runs=arm.runs) for arm in comparison.arms),
        seeds=comparison.seeds,
        baseline="prenorm",
    )
    assert odd in texts(loss_curves(comparison))
    ElementTree.fromstring(mixing_matrix(comparison, comparison.arms[1]))
