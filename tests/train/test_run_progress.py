import io

import pytest
from rich.console import Console

from attnres.train import progress
from attnres.train.progress import Numbers, PlainDisplay, RichDisplay, build_display

TRAIN = {"kind": "train", "step": 5, "loss": 3.25, "tokens_per_second": 12345.6}
VALID = {"kind": "valid", "step": 5, "loss": 3.5}


def test_a_plain_line_has_losses_speed_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 11.0, 12.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    display = PlainDisplay("run", 10)
    display.start(0)
    display.update(TRAIN)
    display.update(TRAIN | {"step": 6})
    display.update(VALID | {"step": 6})
    display.stop()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "run: step 5/10 loss 3.250 12,346 tokens/s 0:10 left",
        "run: step 6/10 loss 3.250 valid 3.500 12,346 tokens/s 0:08 left",
    ]


def test_a_validation_loss_of_an_earlier_step_says_which() -> None:
    numbers = Numbers()
    numbers.take(VALID | {"step": 0})
    assert str(numbers) == "valid 3.500"
    numbers.take(TRAIN)
    assert str(numbers) == "loss 3.250 valid 3.500 (step 0) 12,346 tokens/s"
    numbers.take(VALID)
    assert str(numbers) == "loss 3.250 valid 3.500 12,346 tokens/s"
    numbers.take(TRAIN | {"step": 6})
    assert str(numbers) == "loss 3.250 valid 3.500 (step 5) 12,346 tokens/s"


def test_a_bar_is_for_terminals_only() -> None:
    assert isinstance(build_display("run", 10, enabled=True), PlainDisplay)


def test_a_bar_shows_losses_and_speed() -> None:
    out = io.StringIO()
    display = RichDisplay("run", 10, Console(file=out, force_terminal=True, width=100))
    display.start(2)
    display.update(TRAIN)
    display.update(VALID)
    display.stop()
    text = out.getvalue()
    assert "run" in text
    assert "5/10" in text
    assert "loss 3.250 valid 3.500 12,346 tokens/s" in text


def test_a_narrow_terminal_keeps_step_and_losses() -> None:
    out = io.StringIO()
    display = RichDisplay("my-block-run", 1000, Console(file=out, force_terminal=True, width=80))
    display.start(0)
    display.update(VALID | {"step": 100})
    display.update(TRAIN | {"step": 163})
    display.stop()
    last = out.getvalue().rpartition("\r")[2]
    assert "163/1000" in last
    assert "loss 3.250 valid 3.500 (step 100) 12,346 tokens/s" in last


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    display = build_display("run", 10, enabled=False)
    display.start(0)
    display.update(TRAIN)
    display.stop()
    assert capsys.readouterr().err == ""
