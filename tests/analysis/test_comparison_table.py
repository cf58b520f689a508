"""The comparison table and its forms."""

import io
import json

import pytest
from rich.console import Console

from analysis.synthetic import write_comparison, write_json, write_run
from attnres.analysis import comparison_table, load_comparison, markdown_table, render_table, table_json
from attnres.analysis.table import table_notes

LOSSES = {"prenorm": (3.0, 4.0, 5.0), "block": (2.9, 3.8, 4.7), "full": (3.1, 3.9, 5.0)}
SPEEDS = {"prenorm": (1000.0, 1000.0, 2000.0), "block": (900.0, 950.0, 2000.0), "full": (500.0, 500.0, 500.0)}
SLOWNESS = {"prenorm": 1.0, "block": 1.25, "full": 2.0}


def by_hand(folder, seeds=(0, 1, 2)):
    """Write a comparison whose table can be worked out by hand: loss falls from 10 to its end in two steps."""
    write_comparison(folder, seeds=seeds, sublayers=4, steps=50)
    for arm, slowness in SLOWNESS.items():
        for seed in seeds:
            run, last = folder / f"{arm}-seed{seed}", LOSSES[arm][seed]
            lines = [(0, 10.0), (50, 6.0), (100, last)]
            records = [
                {"kind": "valid", "step": step, "tokens": step * 10, "loss": loss, "seconds": step * slowness}
                for step, loss in lines
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            result = json.loads((run / "result.json").read_text())
            result |= {"valid_loss": last, "tokens_per_second": SPEEDS[arm][seed], "seconds": 100 * slowness}
            write_json(run / "result.json", result)
    return load_comparison(folder)


@pytest.fixture
def rows(tmp_path):
    return comparison_table(by_hand(tmp_path / "c"))


def test_rows_equal_the_numbers_worked_out_by_hand(rows):
    prenorm, block, full = rows
    assert [row.is_baseline for row in rows] == [True, False, False]
    assert prenorm.valid_loss == pytest.approx(4.0)
    assert prenorm.difference is None
    assert block.valid_loss == pytest.approx(3.8)
    assert block.difference.mean == pytest.approx(-0.2)
    assert block.difference.half_width == pytest.approx(0.248414, abs=1e-5)
    assert full.difference.mean == pytest.approx(0.0)
    assert (block.parameters, block.extra_parameters) == (4_300_000 + 1920, 1920)
    assert block.peak_memory_bytes == 1040 * 2**20


def test_speed_is_the_median_over_seeds_of_the_paired_ratio(rows):
    assert [row.speed_ratio for row in rows] == [1.0, 0.95, 0.5]
    assert [row.tokens_per_second for row in rows] == [1000.0, 950.0, 500.0]


def test_losses_at_equal_time_are_taken_when_the_fastest_run_ended(rows):
    prenorm, block, full = rows
    assert {row.matched_seconds for row in rows} == {100.0}
    assert prenorm.matched_loss == pytest.approx(4.0)
    # block is at step 80 of 100: 0.4 of 6 and 0.6 of its last loss; full is at step 50
    assert block.matched_loss == pytest.approx(0.4 * 6 + 0.6 * 3.8)
    assert block.matched_difference.mean == pytest.approx(0.4 * 6 + 0.6 * 3.8 - 4.0)
    assert full.matched_loss == pytest.approx(6.0)
    assert full.matched_difference.mean == pytest.approx(2.0)
    assert full.matched_difference.half_width == pytest.approx(4.30265 / 3**0.5, rel=1e-5)


def test_one_seed_has_a_difference_but_no_interval(tmp_path):
    rows = comparison_table(by_hand(tmp_path / "c", seeds=(0,)))
    assert rows[1].difference.mean == pytest.approx(-0.1)
    assert rows[1].difference.half_width is None
    assert "\u22120.1000 \u00b1 \u2013" in markdown_table(rows)
    assert any("One seed has no interval" in note for note in table_notes(rows))


def test_unfinished_runs_are_named_and_not_counted(tmp_path):
    folder = write_comparison(
        tmp_path / "c",
        sublayers=4,
        steps=50,
        unfinished=("block-seed1", "full-seed0"),
        absent=("full-seed1", "full-seed2"),
    )
    _, block, full = comparison_table(load_comparison(folder))
    assert block.finished_seeds == (0, 2)
    assert block.difference.pairs == 2
    assert full.valid_loss is None
    assert full.difference is None
    notes = "\n".join(table_notes([block, full]))
    for line in ("block-seed1: unfinished at step 20", "full-seed1: not started (no such folder)"):
        assert line in notes
    assert "| 2 of 3 |" in markdown_table([block, full])


def test_an_unfinished_baseline_leaves_losses_without_differences(tmp_path):
    folder = write_comparison(tmp_path / "c", seeds=(0,), sublayers=4, steps=50, unfinished=("prenorm-seed0",))
    prenorm, block, _ = comparison_table(load_comparison(folder))
    assert prenorm.valid_loss is None
    assert block.valid_loss is not None
    assert (block.difference, block.matched_difference, block.speed_ratio) == (None, None, None)


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_table_shortens_no_number(rows, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_table(rows))
    text = console.export_text()
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= width
    for number in (
        "3.8000",
        "\u22120.2000",
        "\u00b1 0.2484",
        "4.6800",
        "950",
        "0.950\u00d7",
        "1,920",
        "(0.045 %)",
        "1.02",
    ):
        assert number in text


def test_markdown_has_one_line_per_arm_and_the_definitions(rows):
    text = markdown_table(rows)
    lines = text.splitlines()
    assert len({line.count("|") for line in lines[:5]}) == 1
    assert lines[3].startswith("| Block AttnRes (S=4) | 3 | 3.8000 | \u22120.2000 \u00b1 0.2484 | 4.6800 |")
    assert "after 100.0 s of training" in text


def test_markdown_escapes_the_separator_in_a_label(tmp_path):
    folder = write_comparison(tmp_path / "c", arms=("prenorm",), seeds=(0,), sublayers=2, steps=50)
    content = json.loads((folder / "compare.json").read_text()) | {"labels": {"prenorm": "a|b"}}
    write_json(folder / "compare.json", content)
    assert "| a\\|b (baseline) |" in markdown_table(comparison_table(load_comparison(folder)))


def test_json_keeps_full_precision_and_stays_json_with_a_loss_that_is_not_finite(tmp_path):
    comparison = by_hand(tmp_path / "c", seeds=(0,))
    path = tmp_path / "c" / "full-seed0" / "result.json"
    write_json(path, json.loads(path.read_text()) | {"valid_loss": float("nan")})
    del comparison
    content = json.loads(table_json(comparison_table(load_comparison(tmp_path / "c"))))
    assert content[1]["difference"] == {"mean": 2.9 - 3.0, "half_width": None, "pairs": 1}
    assert content[2]["valid_loss"] is None


def test_a_lone_run_has_no_columns_of_comparison(tmp_path):
    text = markdown_table(comparison_table(load_comparison(write_run(tmp_path / "run", sublayers=4, steps=50))))
    assert "diff." not in text
    assert "equal time" not in text
    assert "valid. loss" in text


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_that_shared_the_machine_are_noted(tmp_path, jobs):
    folder = write_comparison(tmp_path / "c", arms=("prenorm", "full"), seeds=(0,), sublayers=2, steps=50)
    content = json.loads((folder / "compare.json").read_text())
    (folder / "compare.json").write_text(json.dumps({**content, "jobs": jobs}))
    noted = f"{jobs} runs at a time shared the machine" in markdown_table(comparison_table(load_comparison(folder)))
    assert noted == (jobs > 1)
