import sys

import pytest

from attnres.data.progress import stage


@pytest.mark.parametrize("terminal", [True, False])
def test_bar_is_shown_on_a_terminal_only(capsys, monkeypatch: pytest.MonkeyPatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    with stage("Encoding train", 10) as advance:
        advance(5)
    output = capsys.readouterr()
    assert output.out == ""
    assert ("Encoding train" in output.err) == terminal
