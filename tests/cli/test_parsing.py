import pytest

from attnres.cli.parsing import parse, peek
from attnres.errors import ConfigError


def command(*, steps: int = 3, rate: float = 1.0) -> tuple[int, float]:
    """Return what was given."""
    return steps, rate


def test_values_reach_the_function():
    assert parse(command, ["--steps", "5"], command="x") == (5, 1.0)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_error_box_becomes_one_line_whatever_the_output_can_show(encoding, monkeypatch):
    class Output:
        def write(self, text):
            return len(text)

        def flush(self): ...

        def isatty(self):
            return False

    output = Output()
    output.encoding = encoding
    monkeypatch.setattr("sys.stdout", output)
    with pytest.raises(ConfigError) as caught:
        parse(command, ["--stps", "3"], command="x")
    assert str(caught.value) == ("Unrecognized options: --stps, 3; perhaps you meant --steps (see attnres x --help)")
    with pytest.raises(ConfigError, match=r"^Error parsing --steps: .*'many' \(see attnres x --help\)$"):
        parse(command, ["--steps", "many"], command="x")


def test_an_error_of_the_command_itself_is_not_an_error_of_parsing():
    def broken(*, steps: int = 3) -> None:
        """Fail."""
        raise KeyError(steps)

    with pytest.raises(KeyError):
        parse(broken, [], command="x")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [(["--a", "1", "--b", "2"], "2"), (["--b=3"], "3"), (["--bc", "4"], None), (["--b"], None)],
    ids=str,
)
def test_peek_reads_one_option(arguments, value):
    assert peek(arguments, "--b") == value
