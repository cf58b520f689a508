import io

import pytest
from rich.console import Console

from attnres.train import progress
from attnres.train.progress import PlainDisplay, RichDisplay, build_display

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
    display.update(VALID)
    display.stop()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "run: step 5/10 loss 3.250 12,346 tokens/s 0:10 left",
        "run: step 5/10 loss 3.250 valid 3.500 12,346 tokens/s 0:12 left",
    ]


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


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    display = build_display("run", 10, enabled=False)
    display.start(0)
    display.update(TRAIN)
    display.stop()
    assert capsys.readouterr().err == ""
